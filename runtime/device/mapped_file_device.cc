#include "evenkeel/runtime/device/mapped_file_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

constexpr int64_t kPage = 4096;

int64_t RoundUpToPage(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

absl::StatusOr<std::unique_ptr<MappedFileDevice>> MappedFileDevice::Create(Device* streams, const Options& options) {
  const std::string pattern = absl::StrCat(options.folder, "/evenkeel-offload-XXXXXX");
  std::vector<char> path(pattern.begin(), pattern.end());
  path.push_back('\0');
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) {
    return absl::UnavailableError(
        absl::StrCat(options.name, ": cannot make a file in ", options.folder, ": ", std::strerror(errno)));
  }
  unlink(path.data());
  return std::unique_ptr<MappedFileDevice>(new MappedFileDevice(streams, options, file));
}

MappedFileDevice::~MappedFileDevice() { close(file_); }

// Every buffer has a stretch of the file of its own; a freed stretch is given back by punching a hole.
absl::StatusOr<Buffer> MappedFileDevice::Allocate(int64_t bytes) {
  if (bytes < 0) return absl::InvalidArgumentError(absl::StrCat("cannot allocate ", bytes, " bytes"));
  if (bytes == 0) return Buffer(this, nullptr, 0);
  const int64_t live = counters_.ReserveLive(bytes, options_.max_live_bytes);
  if (live < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(options_.name, ": ", bytes, " bytes wanted, ",
                                                     counters_.Snapshot().live_bytes, " live of a limit of ",
                                                     options_.max_live_bytes));
  }
  absl::StatusOr<void*> data = Map(bytes);
  if (!data.ok()) {
    counters_.CancelLive(bytes);
    return data.status();
  }
  counters_.AddAllocation(bytes, live);
  return Buffer(this, *data, bytes);
}

absl::StatusOr<void*> MappedFileDevice::Map(int64_t bytes) {
  EK_ASSIGN_OR_RETURN(const int64_t padded, CheckedRoundUp(bytes, kPage));
  absl::MutexLock lock(&mutex_);
  // Reserved now: a full disk is an error here and not a signal at the first write.
  const int error = posix_fallocate(file_, file_bytes_, padded);
  if (error != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.name, ": no room for ", bytes, " bytes in the file: ", std::strerror(error)));
  }
  void* data = mmap(nullptr, static_cast<size_t>(padded), PROT_READ | PROT_WRITE, MAP_SHARED, file_, file_bytes_);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(options_.name, ": cannot map ", bytes, " bytes: ", std::strerror(errno)));
  }
  file_bytes_ += padded;
  return data;
}

absl::StatusOr<std::unique_ptr<Stream>> MappedFileDevice::CreateStream(absl::string_view name) {
  return streams_->CreateStream(name);
}

absl::Status MappedFileDevice::FillNow(void* destination, int value, int64_t bytes) {
  if (bytes > 0) std::memset(destination, value, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

void MappedFileDevice::Free(void* data, int64_t bytes) {
  const auto padded = static_cast<size_t>(RoundUpToPage(bytes));
  madvise(data, padded, MADV_REMOVE);
  munmap(data, padded);
  counters_.AddFree(bytes);
}

}  // namespace evenkeel
