// The CPU as a device: inline streams for speed and simplicity, worker-thread
// streams for real asynchrony.
//
//   auto device = HostDevice::Create({.stream_mode =
//   HostDevice::StreamMode::kWorker});
#ifndef EVENKEEL_RUNTIME_DEVICE_HOST_DEVICE_H_
#define EVENKEEL_RUNTIME_DEVICE_HOST_DEVICE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel {

class HostDevice final : public Device {
 public:
  enum class StreamMode { kInline, kWorker };

  struct Options {
    std::string name = "host";
    StreamMode stream_mode = StreamMode::kInline;
    // Allocations beyond this fail with ResourceExhausted.
    int64_t max_live_bytes = std::numeric_limits<int64_t>::max();
    // Fill fresh and freed memory with a NaN pattern (0xff bytes), so that a
    // use of stale memory shows.
    bool poison = false;
    // Called by a worker stream before its n-th operation; the worker sleeps
    // that long. For race tests.
    std::function<absl::Duration(absl::string_view stream, int64_t n)> delay = nullptr;
    // Sleeps of injected delays go through this clock.
    Clock* clock = Clock::Real();
  };

  static std::unique_ptr<HostDevice> Create(Options options);
  static std::unique_ptr<HostDevice> Create() { return Create(Options()); }
  ~HostDevice() override;

  absl::string_view name() const override { return options_.name; }
  absl::StatusOr<Buffer> Allocate(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<Stream>> CreateStream(absl::string_view name) override;
  std::unique_ptr<Event> CreateEvent() override;
  absl::Status FillNow(void* destination, int value, int64_t bytes) override;
  WorkCounters& counters() override { return counters_; }
  const Options& options() const { return options_; }

 private:
  explicit HostDevice(Options options);
  void Free(void* data, int64_t bytes) override;

  const Options options_;
  WorkCounters counters_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_DEVICE_HOST_DEVICE_H_
