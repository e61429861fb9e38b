// A model whose parameters are sharded over data-parallel ranks (ZeRO-3) and fetched leaf by leaf.
//
//   EK_ASSIGN_OR_RETURN(LeafSelection selection, SelectLeaves(description, leaf_options));
//   EK_ASSIGN_OR_RETURN(auto model, PartitionedModel::Create(description.parameters, selection, options, groups,
//                                                            device, compute_stream, comm_stream));
//   const LeafId block = *model->FindLeaf("layers.0.moe");
//   EK_ASSIGN_OR_RETURN(LeafWeights weights, model->Fetch(block));        // forward
//   EK_ASSIGN_OR_RETURN(ConstTensorView w_in, weights.Get(0));           // on the compute stream
//   EK_RETURN_IF_ERROR(model->Release(block));
//   ...
//   EK_ASSIGN_OR_RETURN(LeafWeights again, model->Fetch(block));          // backward
//   EK_ASSIGN_OR_RETURN(absl::Span<const TensorView> dw, model->Gradients(block));  // add into these
//   EK_RETURN_IF_ERROR(model->FlushGradients(block));                     // sums over ranks, keeps this rank's shard
//   EK_RETURN_IF_ERROR(model->Release(block));
//   EK_ASSIGN_OR_RETURN(StepResult result, model->Step());                // vote, norm, clip, update
//
// All ranks of every group make the same calls in the same order (Fetch, Release, Gradients, FlushGradients,
// Step, Read...):
// nothing here depends on data. A leaf may be fetched several times at once (nested use, several threads): it is
// gathered once and released when the last user is done. A parameter that two leaves share has its own storage unit
// with the same rule. A rank whose order differs is found by the next Step at the latest, which shows both lists.
// Gradient convention: what the ranks add into Gradients() is SUMMED over the family's replicas (DP or EDP), in the
// canonical tree, and divided by the full DP size; nothing else scales (f16 models: what loss_scale() multiplies in,
// Step divides out). Every FlushGradients adds to the step's total; with PartitionedModelOptions::micro_batches > 1 by
// the tree, and the average is over the micro-batches too.
#ifndef EVENKEEL_ZERO3_PARTITIONED_MODEL_H_
#define EVENKEEL_ZERO3_PARTITIONED_MODEL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/model_types.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/state_access.h"

namespace evenkeel::zero3 {

struct LeafId {
  int value = -1;
  friend bool operator==(const LeafId&, const LeafId&) = default;
};

// The gathered parameters of one fetched leaf. A value; stale after the Release that frees the memory.
class LeafWeights {
 public:
  LeafWeights() = default;
  LeafWeights(absl::Span<const ConstTensorView> views, const std::atomic<uint64_t>* current, uint64_t generation)
      : views_(views), current_(current), generation_(generation) {}
  int size() const { return static_cast<int>(views_.size()); }
  // The i-th parameter of the leaf, in the leaf's order. FailedPrecondition when the leaf was released meanwhile,
  // InvalidArgument when i is out of range.
  absl::StatusOr<ConstTensorView> Get(int i) const;
  // All of them, unchecked.
  absl::Span<const ConstTensorView> views() const { return views_; }

 private:
  absl::Span<const ConstTensorView> views_;
  const std::atomic<uint64_t>* current_ = nullptr;
  uint64_t generation_ = 0;
};

// What the model has counted since it was made, with predictions beside them where they exist.
struct ModelCounts {
  int64_t fetches = 0;              // Fetch calls that found the leaf not in use
  int64_t gathers = 0;              // collectives issued for weights
  int64_t prefetched = 0;           // units gathered early
  int64_t prefetch_wasted = 0;      // gathered early and dropped without use
  int64_t reused = 0;               // units found still gathered
  int64_t flushes = 0;              // collectives issued for gradients
  int64_t gathered_bytes = 0;       // live now
  int64_t peak_gathered_bytes = 0;  // since ResetPeak
  // Of the passes that have ended, from their visits alone, also of one that left its recorded order. Equal to the
  // counted peak at every end of a pass (Step, UseTrace).
  int64_t predicted_peak_gathered_bytes = 0;
  int64_t arena_bytes = 0;             // reserved for planned leaves
  int64_t gradient_pool_bytes = 0;     // buffers for full gradients, kept for reuse
  int64_t pending_gradient_bytes = 0;  // sums of micro-batches that wait for others; with micro_batches > 1
  // ceil(log2(micro_batches)) times this rank's gradient shards, from the layouts alone; equal to the former.
  int64_t predicted_pending_gradient_bytes = 0;
  int64_t trace_changes = 0;  // times the recorded order was left
  // Host operations inside Fetch and Release, and the number of fetches of leaves that are not always resident: their
  // quotient is the cost of a leaf fetch. The device must be this rank's own.
  int64_t fetch_host_operations = 0;
  int64_t fetch_cycles = 0;
};

enum class TraceState : uint8_t { kRecording, kComplete };

// One rank's part of the model. Thread-safe: calls of several threads take turns. Their order must still be that of the
// other ranks' calls wherever they are collective; threads that fetch one leaf at the same time are one gather.
class PartitionedModel {
 public:
  // `parameters` and `selection` are copied; device, streams and groups must outlive the model. The two streams may
  // be one. Collective over dp and edp. InvalidArgument with the numbers when sizes, options or groups do not fit.
  static absl::StatusOr<std::unique_ptr<PartitionedModel>> Create(std::vector<ParameterSpec> parameters,
                                                                  const LeafSelection& selection,
                                                                  const PartitionedModelOptions& options,
                                                                  const ModelGroups& groups, Device* device,
                                                                  Stream* compute, Stream* comm);
  ~PartitionedModel();

  int num_leaves() const;
  const Leaf& leaf(LeafId id) const;
  // NotFound listing the leaves.
  absl::StatusOr<LeafId> FindLeaf(absl::string_view name) const;
  absl::Span<const ParameterSpec> parameters() const;

  // Makes the leaf's parameters readable on the compute stream and counts one more user. Collective where the leaf is
  // not resident. ResourceExhausted when max_live_bytes would be passed.
  absl::StatusOr<LeafWeights> Fetch(LeafId id);
  // One user less; after the last one the memory may be reused once the compute stream gets here.
  // FailedPrecondition when nobody has fetched the leaf.
  absl::Status Release(LeafId id);

  // Buffers to add gradients into, on the compute stream, in the leaf's parameter order: f32 (f64 for f64
  // parameters), zero at first. Frozen parameters have a view of 0 elements. Valid until FlushGradients of the leaf;
  // until then every call returns the same views, so that threads may each add to parameters of their own.
  absl::StatusOr<absl::Span<const TensorView>> Gradients(LeafId id);
  // Sums the leaf's gradients over the ranks and adds the average to this rank's shard; zero where a rank has added
  // nothing. Units shared with other leaves are reduced when all of their leaves have flushed. With
  // reduce_bucket_bytes, small units wait for others of their group, at the latest until Step or a read of gradients.
  absl::Status FlushGradients(LeafId id);
  // Flushes what has not been flushed (on all ranks, if any of them has asked for its gradients since), votes, computes
  // the norm, clips, updates, zeroes the gradients. Collective over all groups. FailedPrecondition when a leaf is still
  // fetched or was not flushed micro_batches times; Aborted after too many skips.
  absl::StatusOr<StepResult> Step();
  void set_learning_rate(double learning_rate);
  // What to multiply the loss by, so that f16 gradients do not vanish: a power of two, equal on all ranks, changed by
  // Step only. 1 for models without trainable f16 parameters.
  double loss_scale() const;
  // Forgets the step's gradients without using them.
  absl::Status ZeroGradients();

  // Names the recorded order that the following fetches belong to ("train", "eval"): each has its own.
  // Only between passes: FailedPrecondition when a leaf is fetched.
  absl::Status UseTrace(absl::string_view name);
  TraceState trace_state() const;
  // The plan of the current order, a line per visit; empty while recording.
  std::string PlanText() const;

  // The whole local tensor, gathered over the family's group, into `out` (f32, f64 or the stored dtype; the
  // parameter's shape). Collective. kGradient: the average so far, times loss_scale(), between flush and
  // Step. Finished on return.
  absl::Status ReadTensor(int parameter, TensorKind kind, absl::string_view state, TensorView out);
  // Every tensor with this rank's part, in one fixed order on all ranks. Views stay valid as long as the model.
  std::vector<StateTensor> StateTensors();
  // After a load: makes weights follow the masters and drops gathered copies. Collective nowhere.
  absl::Status StateLoaded(const StepProgress& progress);
  int64_t step() const { return progress().step; }
  StepProgress progress() const;

  ModelCounts counts() const;
  void ResetPeak();
  // Unit by unit: parameters, bytes, padding, policy, predicted host operations.
  std::string ToTable() const;
  // Host operations of one fetch + release of the leaf, as the policy's formula predicts.
  int64_t PredictedHostOperations(LeafId id) const;

 private:
  class Impl;
  explicit PartitionedModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_PARTITIONED_MODEL_H_
