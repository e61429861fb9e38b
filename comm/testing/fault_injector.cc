#include "evenkeel/comm/testing/fault_injector.h"

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

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
  std::vector<TensorView> written{info.recv};
  for (const CallInfo& part : info.grouped) written.push_back(part.recv);
  int64_t bits = 0;
  for (const TensorView& view : written) bits += view.num_bytes() * 8;
  if (bits == 0) return absl::OkStatus();
  int64_t bit = fault->bit % bits;
  for (const TensorView& view : written) {
    if (bit < view.num_bytes() * 8) {
      auto* const byte = static_cast<uint8_t*>(view.raw()) + bit / 8;
      return stream.Launch([byte, bit] {
        *byte ^= static_cast<uint8_t>(1u << (bit % 8));
        return absl::OkStatus();
      });
    }
    bit -= view.num_bytes() * 8;
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
