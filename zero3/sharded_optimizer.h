// The update of the shards: one vote, one norm, one clip, then every rank steps its own elements, or none does.
//
// Non-finite gradients travel as a flag (bitwise or over all ranks), never as a value. The norm is the square root of
// an exact sum (see exact_sum.h): dense parameters over DP, experts over EDP and EP, both over TP, where parameters
// that are replicated over TP count on lane 0 only. So it is the same bits on all ranks, for every layout and policy.
#ifndef EVENKEEL_ZERO3_SHARDED_OPTIMIZER_H_
#define EVENKEEL_ZERO3_SHARDED_OPTIMIZER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/zero3/exact_sum.h"
#include "evenkeel/zero3/loss_scale.h"
#include "evenkeel/zero3/model_types.h"
#include "evenkeel/zero3/order_log.h"
#include "evenkeel/zero3/unit.h"
#include "evenkeel/zero3/word_collectives.h"

namespace evenkeel::zero3 {

// The names of an optimizer's states, in the order of Unit::State.
std::vector<std::string> OptimizerStateNames(const OptimizerOptions& options);
// InvalidArgument with the number that does not fit.
absl::Status ValidateOptimizerOptions(const OptimizerOptions& options);

// One rank's part. Not thread-safe. Everything passed in outlives it.
class ShardedOptimizer {
 public:
  static absl::StatusOr<std::unique_ptr<ShardedOptimizer>> Create(std::vector<Unit*> units,
                                                                  const PartitionedModelOptions& options,
                                                                  const ModelGroups& groups, Device* device,
                                                                  Stream* compute, Stream* comm);

  // Both streams are idle and every unit is reduced. Collective over all groups. On return gradients are zero.
  // Aborted after max_skipped_in_a_row skipped steps, or when the loss scale cannot fall any further; DataLoss where a
  // rank found shards changed since the last step (`changed` on this one). FailedPrecondition on all ranks, with the
  // odd ranks' lists beside the common one, when the orders of gathers and reductions in `log` differ: units of equal
  // size may have been mixed up; and when ranks scale their losses differently. `replicas`: what a comparison of
  // replicas found on this rank; DataLoss on all ranks when it is not OK anywhere.
  absl::StatusOr<StepResult> Step(const OrderLog& log, const absl::Status& replicas,
                                  const std::vector<std::string>& changed);
  absl::Status ZeroGradients();
  // Every word or-ed over all ranks, in place. Collective over dp and tp; both streams are then idle.
  absl::Status OrOverRanks(absl::Span<int64_t> words);
  void set_learning_rate(double learning_rate) { options_.learning_rate = learning_rate; }
  StepProgress progress() const;
  void set_progress(const StepProgress& progress);

 private:
  struct Sums {
    ExactSumOfSquares dense;
    ExactSumOfSquares expert;
  };

  ShardedOptimizer(std::vector<Unit*> units, const PartitionedModelOptions& options, const ModelGroups& groups,
                   Stream* compute, Stream* comm);
  int64_t AddLocalSquares(Sums& sums) const;
  // The flags of all ranks; kOrderDiffers or kScaleDiffers among them when those are not equal on all.
  absl::StatusOr<int64_t> Vote(int64_t flags, uint64_t order_digest);
  absl::Status ReportOrder(const OrderLog& log);
  absl::Status ReportScale();
  absl::StatusOr<double> GlobalNorm(Sums& sums);
  absl::Status Update(double gradient_scale);
  absl::Status UpdateRun(const Unit& unit, const OptimizerRun& run, double gradient_scale);
  absl::Status ReportChangedShards(const std::vector<std::string>& names);
  absl::StatusOr<StepResult> Skip();

  const std::vector<Unit*> units_;
  OptimizerOptions options_;
  const double max_gradient_norm_;
  const int max_skipped_in_a_row_;
  const ModelGroups groups_;
  Stream* const compute_;
  Stream* const comm_;
  bool has_experts_ = false;  // anywhere in the model, so equal on all ranks
  WordCollectives collectives_;
  LossScale loss_scale_;
  int64_t step_ = 0;
  int64_t skipped_total_ = 0;
  int skipped_in_a_row_ = 0;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_SHARDED_OPTIMIZER_H_
