// The language model of the proof on one rank: real runtime/ops, a real moe::MoeLayer per block, and every parameter in
// zero3. Its double twin is reference_model.h.
//
//   EK_ASSIGN_OR_RETURN(Mesh mesh, comm::Mesh::Create(shape));
//   zero3::ModelDescription description = DescribeLanguageModel(config, mesh, rank);
//   ... zero3::PartitionedModel::Create(description.parameters, ...)
//   EK_ASSIGN_OR_RETURN(auto model, LanguageModel::Create(config, order, groups, &parameters, device, stream));
//   EK_ASSIGN_OR_RETURN(ModelPass pass, model->ForwardBackward(batch, router_step, tap));
//   EK_RETURN_IF_ERROR(parameters.Step().status());
//
// Token and position embedding; per layer x += attention(norm(x)), x += experts(norm(x)), perhaps with a dense branch
// beside the experts (one more sum over lanes, booked as attention's are); final norm, output
// projection, cross entropy. Tensor parallelism: heads and ffn columns are split over lanes; q, k, v are column
// parallel and wo row parallel, with the adjoint pair copy (backward: all-reduce) and all-reduce (backward: identity)
// around them, so that everything outside is computed identically on all lanes. In canonical numerics these products
// are cut by head (head_blocks.h), and partial sums of bf16 stay f32 until lanes are summed. Leaves: embedding,
// layer.L.attention, layer.L.moe, head. Each is fetched for its forward, released, fetched again for its backward,
// flushed and released. All of that happens in one fixed order, whatever the data.
#ifndef EVENKEEL_TESTING_LANGUAGE_MODEL_H_
#define EVENKEEL_TESTING_LANGUAGE_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::testutil {

// What a tap shows. The value is finished (the stream is synchronized) and valid during the call.
enum class TapKind : uint8_t {
  kParameter,           // a parameter as fetched for the forward: this rank's slice, gathered
  kActivation,          // at a block boundary: "embedding", "layer.0.attention", "layer.0.moe", ...
  kLoss,                // [1] f64: this replica's loss with its auxiliary terms
  kActivationGradient,  // at a block boundary, times the loss scale
  kGradient,            // of a parameter, averaged over the replicas, without the loss scale (TrainingRun shows these)
};
// "parameter", "activation", "loss", "activation gradient", "gradient".
absl::string_view TapKindName(TapKind kind);

struct Tap {
  TapKind kind = TapKind::kActivation;
  absl::string_view name;
  ConstTensorView value;
  int64_t batch = 0;  // of the step: activations, their gradients and the loss belong to one, parameters to none
};
using TapFunction = std::function<void(const Tap&)>;

// What one forward and backward found on this rank.
struct ModelPass {
  double loss = 0;                            // of this replica: cross entropy plus auxiliary losses
  double cross_entropy = 0;                   // of this replica
  std::vector<moe::RoutingDecision> routing;  // per layer
  // Payload that the order's closed form predicts for this rank's forward and backward, over all layers.
  int64_t predicted_ep_bytes = 0;
  int64_t predicted_ep_inter_node_bytes = 0;  // of them, between nodes
  int64_t predicted_tp_bytes = 0;
};

// This rank's slices of every parameter, and the tree of modules. Initial values are keyed by name and global index.
zero3::ModelDescription DescribeLanguageModel(const LanguageModelConfig& config, const comm::Mesh& mesh, int rank);

// The rules that make attention and expert blocks leaves.
zero3::LeafOptions LanguageModelLeaves();

// The groups of this rank; they outlive the model. `attention_tp` is apart from the expert layer's groups, so that the
// ledger of the tp axis holds the order's traffic alone.
struct LanguageModelGroups {
  comm::Communicator* attention_tp = nullptr;
  moe::MoeGroups moe;
};

// Not thread-safe. All ranks of all groups make the same calls in the same order.
class LanguageModel {
 public:
  // `parameters` was made from DescribeLanguageModel and LanguageModelLeaves; it, `device` and `stream` outlive the
  // model. InvalidArgument when the order or the sizes do not fit the groups.
  static absl::StatusOr<std::unique_ptr<LanguageModel>> Create(const LanguageModelConfig& config,
                                                               const moe::Order& order,
                                                               const LanguageModelGroups& groups,
                                                               zero3::PartitionedModel* parameters, Device* device,
                                                               Stream* stream);
  virtual ~LanguageModel() = default;

  // Loss and every gradient of one batch (config.sequences sequences), flushed into `parameters`; the caller steps.
  // step.source is the batch's number.
  // `tap` may be empty. InvalidArgument when the batch has other extents; errors of the layers and groups.
  virtual absl::StatusOr<ModelPass> ForwardBackward(const CorpusBatch& batch, const moe::RouterStep& step,
                                                    const TapFunction& tap) = 0;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_LANGUAGE_MODEL_H_
