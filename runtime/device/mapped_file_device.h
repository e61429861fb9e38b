// Memory that lives in a file: for state that does not fit, or should not take, main memory.
//
// Buffers are pages of one temporary file that has no name any more, mapped shared; the kernel writes them out and
// reads them back as it likes. Streams and events are those of another device, so that work on either memory is ordered
// together.
//
//   EK_ASSIGN_OR_RETURN(auto offload, MappedFileDevice::Create(host.get(), {.folder = "/var/tmp"}));
//   EK_ASSIGN_OR_RETURN(Buffer moments, offload->Allocate(bytes));   // zero, as fresh file pages are
#ifndef EVENKEEL_RUNTIME_DEVICE_MAPPED_FILE_DEVICE_H_
#define EVENKEEL_RUNTIME_DEVICE_MAPPED_FILE_DEVICE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel {

// Thread-safe. Outlives its buffers.
class MappedFileDevice final : public Device {
 public:
  struct Options {
    std::string name = "file";
    std::string folder;  // where the file is made
    int64_t max_live_bytes = std::numeric_limits<int64_t>::max();
  };

  // `streams` makes streams and events and outlives this device. Unavailable naming the folder when no file can be
  // made.
  static absl::StatusOr<std::unique_ptr<MappedFileDevice>> Create(Device* streams, const Options& options);
  ~MappedFileDevice() override;

  absl::string_view name() const override { return options_.name; }
  // Zero bytes. ResourceExhausted when the limit would be passed or the file system is full.
  absl::StatusOr<Buffer> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(absl::string_view name) override;
  std::unique_ptr<Event> CreateEvent() override { return streams_->CreateEvent(); }
  absl::Status FillNow(void* destination, int value, int64_t bytes) override;
  WorkCounters& counters() override { return counters_; }

 private:
  MappedFileDevice(Device* streams, const Options& options, int file)
      : streams_(streams), options_(options), file_(file) {}
  void Free(void* data, int64_t bytes) override;
  absl::StatusOr<void*> Map(int64_t bytes);

  Device* const streams_;
  const Options options_;
  const int file_;
  absl::Mutex mutex_;
  int64_t file_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  WorkCounters counters_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_DEVICE_MAPPED_FILE_DEVICE_H_
