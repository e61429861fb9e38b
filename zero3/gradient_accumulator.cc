#include "evenkeel/zero3/gradient_accumulator.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"

namespace evenkeel::zero3 {

GradientAccumulator::GradientAccumulator(std::vector<Unit*> units, int dp_size, int micro_batches, Stream* comm)
    : units_(std::move(units)),
      dp_size_(dp_size),
      micro_batches_(micro_batches),
      comm_(comm),
      pending_(units_.size()) {}

absl::StatusOr<std::unique_ptr<GradientAccumulator>> GradientAccumulator::Create(std::vector<Unit*> units, int dp_size,
                                                                                 int micro_batches, Device* device,
                                                                                 Stream* comm) {
  std::unique_ptr<GradientAccumulator> accumulator(
      new GradientAccumulator(std::move(units), dp_size, micro_batches, comm));
  for (size_t u = 0; u < accumulator->units_.size(); ++u) {
    const Unit& unit = *accumulator->units_[u];
    if (!unit.trainable()) continue;
    for (int batches = 1; batches < micro_batches; batches *= 2) {
      EK_ASSIGN_OR_RETURN(Buffer level, device->Allocate(unit.gradient_count() * SizeOf(unit.gradient_dtype())));
      accumulator->pending_[u].levels.push_back(std::move(level));
    }
  }
  return accumulator;
}

// A binary counter over the step's micro-batches: sum n completes every level whose bit is set in n.
absl::Status GradientAccumulator::Add(int unit_index, const TensorView& sum) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const TensorView shard = unit.Gradients(0, unit.gradient_count());
  if (micro_batches_ == 1) return Axpy(1.0 / dp_size_, sum, shard, *comm_);
  Pending& pending = pending_[static_cast<size_t>(unit_index)];
  const int n = pending.sums++;
  size_t level = 0;
  for (; ((n >> level) & 1) != 0; ++level) {
    const TensorView earlier(pending.levels[level].data(), unit.gradient_dtype(), sum.shape());
    EK_RETURN_IF_ERROR(evenkeel::Add(earlier, sum, sum, *comm_));
  }
  if (pending.sums < micro_batches_) {
    return comm_->Copy(pending.levels[level].data(), sum.raw(), sum.num_bytes());
  }
  pending.sums = 0;
  return Axpy(1.0 / (static_cast<double>(dp_size_) * micro_batches_), sum, shard, *comm_);
}

void GradientAccumulator::Forget() {
  for (Pending& pending : pending_) pending.sums = 0;
}

absl::Status GradientAccumulator::CheckComplete() const {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (pending_[u].sums == 0) continue;  // complete, or without gradients
    return absl::FailedPreconditionError(absl::StrCat("unit ", units_[u]->name(), " was flushed ", pending_[u].sums,
                                                      " times in this step, micro_batches is ", micro_batches_));
  }
  return absl::OkStatus();
}

int64_t GradientAccumulator::pending_bytes() const {
  int64_t bytes = 0;
  for (const Pending& pending : pending_) {
    for (const Buffer& level : pending.levels) bytes += level.bytes();
  }
  return bytes;
}

}  // namespace evenkeel::zero3
