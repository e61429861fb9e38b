// Adds the reduced sums of a step's micro-batches to a rank's gradient shards.
//
// By default one after the other: the shard gets sum / DP size at once. With `micro_batches` > 1 the sums of a step are
// added by the canonical tree as they come (at most one pending sum per level of the tree), and the shard gets
// total / (DP size * micro_batches) with the last one. Micro-batch m of data replica r is then leaf m * W + r of one
// tree over all micro-batches of all replicas: for powers of two the same tree whatever W is.
#ifndef EVENKEEL_ZERO3_GRADIENT_ACCUMULATOR_H_
#define EVENKEEL_ZERO3_GRADIENT_ACCUMULATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// Not thread-safe; all work is enqueued on the comm stream. Units, device and stream outlive it.
class GradientAccumulator {
 public:
  // `micro_batches`: a power of two.
  static absl::StatusOr<std::unique_ptr<GradientAccumulator>> Create(std::vector<Unit*> units, int dp_size,
                                                                     int micro_batches, Device* device, Stream* comm);
  // `sum`: the unit's gradient shard summed over the ranks, unit.gradient_count() elements; its memory is used up.
  absl::Status Add(int unit, const TensorView& sum);
  // Forgets the pending sums.
  void Forget();
  // FailedPrecondition naming a unit that got another number of sums than micro_batches in this step.
  absl::Status CheckComplete() const;
  // Bytes of the pending sums: log2(micro_batches) gradient shards.
  int64_t pending_bytes() const;

 private:
  struct Pending {
    std::vector<Buffer> levels;  // the sum of 2^level micro-batches; comm stream only
    int sums = 0;                // of this step so far
  };
  GradientAccumulator(std::vector<Unit*> units, int dp_size, int micro_batches, Stream* comm);

  const std::vector<Unit*> units_;
  const int dp_size_;
  const int micro_batches_;
  Stream* const comm_;
  std::vector<Pending> pending_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_GRADIENT_ACCUMULATOR_H_
