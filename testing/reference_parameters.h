// Sizes, names and shapes of the reference model's parameters.
#ifndef EVENKEEL_TESTING_REFERENCE_PARAMETERS_H_
#define EVENKEEL_TESTING_REFERENCE_PARAMETERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/testing/reference_branch.h"
#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_routing.h"

namespace evenkeel::testutil {

struct ReferenceConfig {
  int64_t vocabulary = 256;
  int64_t sequence = 32;
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t layers = 2;
  int64_t ffn = 128;
  bool swiglu = false;       // else a GELU MLP
  bool expert_bias = false;  // b_in and b_out per expert
  // A dense MLP beside the experts; hidden, swiglu and bias are those of the model.
  ReferenceMix branch = ReferenceMix::kNone;
  int64_t branch_ffn = 0;
  double norm_epsilon = 1e-5;
  ReferenceRouterConfig router;
  int64_t capacity_replicas = 1;  // consecutive replicas that exchange tokens, hence share a capacity
};

// Full parameters and gradients by global name, as matrices: [out of place of a vector: 1 x n], experts stacked by
// rows ([experts * rows, cols]).
//   embedding.token [vocabulary, hidden]      embedding.position [sequence, hidden]
//   layer.L.attention.norm [1, hidden]        layer.L.attention.{wq,wk,wv,wo} [hidden, hidden], y = x w
//   layer.L.moe.norm [1, hidden]              layer.L.moe.router [experts, hidden]
//   layer.L.moe.w_in (w_gate) [experts * hidden, ffn]     layer.L.moe.w_out [experts * ffn, hidden]
//   layer.L.moe.b_in (b_gate) [experts, ffn]  layer.L.moe.b_out [experts, hidden]
//   layer.L.moe.shared.*: see AddBranchTensors
//   final.norm [1, hidden]                    output [hidden, vocabulary]
using ReferenceTensors = reference::Tensors;

// "layer.3.attention.wq" for layer 3 and "attention.wq".
std::string ReferenceLayerName(int64_t layer, absl::string_view rest);
// The dense branch of every layer.
ReferenceBranchConfig ReferenceBranchOf(const ReferenceConfig& config);

// InvalidArgument with the numbers when the sizes do not fit.
absl::Status CheckReferenceConfig(const ReferenceConfig& config);
// Zeros of every parameter's shape.
ReferenceTensors ZeroReferenceTensors(const ReferenceConfig& config);
// InvalidArgument when `found` lacks a tensor of `wanted`, or has it in another shape.
absl::Status CheckReferenceTensors(const ReferenceTensors& wanted, const ReferenceTensors& found);
// Names of the boundaries between blocks: "embedding", "layer.0.attention", "layer.0.moe", ...
std::vector<std::string> ReferenceBoundaryNames(const ReferenceConfig& config);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_PARAMETERS_H_
