// From leaves to units on the gradients' side: which views a leaf's caller adds into, and when a unit is reduced.
//
// A unit that several leaves share waits until all of them have flushed, so that it is reduced once per micro-batch; a
// unit that nobody flushed in a step is reduced at its end, with zeros. So all ranks reduce the same units in the same
// order, whatever they have gradients for.
#ifndef EVENKEEL_ZERO3_LEAF_GRADIENTS_H_
#define EVENKEEL_ZERO3_LEAF_GRADIENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/gradient_reducer.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/state_access.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// Not thread-safe; the views that Open returns may be read at any time. Everything passed in outlives it.
class LeafGradients {
 public:
  // `micro_batches`: reductions of every unit in a step where above 1; see GradientAccumulator.
  LeafGradients(std::vector<Unit*> units, absl::Span<const Leaf> leaves, const StateAccess* homes, int micro_batches,
                std::unique_ptr<GradientReducer> reducer);

  // Views to add into, in the leaf's parameter order; the same until the leaf is flushed.
  absl::StatusOr<absl::Span<const TensorView>> Open(int leaf);
  // The leaf's part of this micro-batch is complete. Collective.
  absl::Status Flush(int leaf);
  // A bit for every unit that is open here: somebody has asked for its gradients since its last reduction.
  std::vector<int64_t> OpenUnits() const;
  // The end of the step: reduces, in unit order, what any rank has open (`open`: OpenUnits of all ranks, or-ed) or was
  // not reduced in it, and all buckets. Collective. FailedPrecondition naming a unit that was not flushed micro_batches
  // times.
  absl::Status FlushRest(absl::Span<const int64_t> open);
  // Makes the parameter's shard hold all that was flushed. Collective.
  absl::Status FinishBucketOf(int parameter) { return reducer_->FinishBucketOf(homes_->home(parameter).unit); }
  // Forgets everything that is open, waiting or pending.
  void Discard();

  // What waiting sums of micro-batches take, from the layouts alone.
  int64_t PredictPendingBytes() const;

  const GradientReducer& reducer() const { return *reducer_; }

 private:
  struct LeafState {
    std::vector<int> parameters;
    std::vector<int> units;          // ascending
    std::vector<uint64_t> openings;  // of its units, when the views were taken
    std::vector<TensorView> views;
  };
  struct UnitState {
    std::vector<bool> flushed;  // by user of the unit, in this micro-batch
    bool reduced = false;       // at least once in this step
  };
  absl::Status Reduce(int unit);
  void Reset(UnitState& state);

  const std::vector<Unit*> units_;
  const StateAccess* const homes_;
  const int micro_batches_;
  const std::unique_ptr<GradientReducer> reducer_;
  std::vector<LeafState> leaves_;
  std::vector<UnitState> states_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_LEAF_GRADIENTS_H_
