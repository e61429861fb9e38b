// The MoE block of a published checkpoint (safetensors, Hugging Face names): loaded by a name map, run on one rank.
//
//   EK_ASSIGN_OR_RETURN(auto block, PublishedBlock::Load(fs, "Mixtral-8x7B-v0.1", {.layer = 3}, device));
//   EK_RETURN_IF_ERROR(block->Forward(x, y, stream));          // x, y: [tokens, hidden], f32
//
// Families and their tensors below "model.layers.N." (HF transformers, models/mixtral, qwen2_moe, qwen3_moe,
// deepseek_v2, deepseek_v3); every matrix is stored [out, in]:
//   mixtral      block_sparse_moe.gate, block_sparse_moe.experts.I.{w1 gate, w3 up, w2 down}; softmax, normalised top-k
//   qwen_moe     mlp.gate, mlp.experts.I.{gate,up,down}_proj, optional mlp.shared_expert.* times
//   sigmoid(shared_expert_gate) deepseek     as qwen_moe, mlp.shared_experts.* added as is, optional
//   mlp.gate.e_score_correction_bias,
//                group-limited selection, softmax or sigmoid scores, route scale
// Weights are converted to f32; 16-bit ones exactly. Nothing in a checkpoint runs; see runtime/tensor/safetensors.h.
#ifndef EVENKEEL_MOE_INTEROP_PUBLISHED_BLOCK_H_
#define EVENKEEL_MOE_INTEROP_PUBLISHED_BLOCK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

struct PublishedBlockOptions {
  int64_t layer = 0;
  // "mixtral", "qwen_moe", "deepseek"; empty: by config.json's model_type.
  std::string family = {};
  // A dropless order for one rank.
  std::string order = "token_sliced";
};

// Not thread-safe.
class PublishedBlock {
 public:
  // `folder` holds config.json and *.safetensors. NotFound naming the first tensor or file that is missing;
  // InvalidArgument naming what does not fit (an unknown family or activation, a shape that differs from config.json,
  // a damaged header). `device` outlives the block.
  static absl::StatusOr<std::unique_ptr<PublishedBlock>> Load(FileSystem* fs, const std::string& folder,
                                                              const PublishedBlockOptions& options, Device* device);
  virtual ~PublishedBlock() = default;

  virtual int64_t hidden() const = 0;
  virtual const std::string& family() const = 0;
  virtual const MoeConfig& config() const = 0;
  virtual bool has_shared_expert() const = 0;
  // y = block(x); both [tokens, hidden] f32, no overlap. Finished on return. Evaluation: no noise, no drops.
  virtual absl::Status Forward(ConstTensorView x, TensorView y, Stream& stream) = 0;
  // Of the last Forward.
  virtual const RoutingDecision& decision() const = 0;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_INTEROP_PUBLISHED_BLOCK_H_
