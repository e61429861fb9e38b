#include "evenkeel/comm/testing/fault_injector.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {

void FaultInjector::At(int64_t index, Fault fault) {
  absl::MutexLock lock(&mutex_);
  faults_[index] = std::move(fault);
}

int64_t FaultInjector::num_calls() const {
  absl::MutexLock lock(&mutex_);
  return num_calls_;
}

int64_t FaultInjector::num_injected() const {
  absl::MutexLock lock(&mutex_);
  return num_injected_;
}

absl::Status FaultInjector::Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) {
  std::optional<Fault> fault;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = faults_.find(num_calls_++);
    if (found != faults_.end()) {
      fault = found->second;
      ++num_injected_;
    }
  }
  if (!fault.has_value()) return call();
  switch (fault->kind) {
    case Fault::Kind::kSkip:
      return absl::OkStatus();
    case Fault::Kind::kFail:
      return fault->status;
    case Fault::Kind::kDelay: {
      EK_RETURN_IF_ERROR(stream.Launch([this, delay = fault->delay] {
        clock_->Sleep(delay);
        return absl::OkStatus();
      }));
      return call();
    }
    case Fault::Kind::kFlipBit:
      break;
  }
  EK_RETURN_IF_ERROR(call());
  const int64_t bits = info.recv.num_bytes() * 8;
  if (bits == 0) return absl::OkStatus();
  auto* const bytes = static_cast<uint8_t*>(info.recv.raw());
  return stream.Launch([bytes, bit = fault->bit % bits] {
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    return absl::OkStatus();
  });
}

}  // namespace evenkeel::comm
