// Causal attention of the language model on one rank: heads split over tensor-parallel lanes, q, k, v column parallel
// and wo row parallel, in canonical numerics cut by head (head_blocks.h). The norm in front of it is the block's own.
//
//   EK_RETURN_IF_ERROR(block->Inner(x, weights, &tape));
//   EK_RETURN_IF_ERROR(block->Project(tape, weights));     // the weights may be released now
//   EK_RETURN_IF_ERROR(block->AddOutput(x, y));            // y = x + the lanes' sum
//
// Symbols: s rows (whole sequences back to back), h hidden, d = local heads times head_dim. Weights and gradients are
// in the leaf's order (AttentionPlace). Tensors have the model's dtype, inverse_rms and partial sums its wide dtype
// (f32 for bf16).
#ifndef EVENKEEL_TESTING_ATTENTION_BLOCK_H_
#define EVENKEEL_TESTING_ATTENTION_BLOCK_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/ops/attention.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/testing/head_blocks.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

// What a forward leaves for its backward.
struct AttentionTape {
  Tensor normed;         // [s, h]
  Tensor inverse_rms;    // [s]
  Tensor q, k, v;        // [s, d]
  Tensor probabilities;  // [sequences * local heads, sequence, sequence]
  Tensor context;        // [s, d]
};

// Serves all layers. Enqueues on one stream; its scratch is used again by every call in stream order. Not thread-safe:
// all lanes make the same calls in the same order.
class AttentionBlock {
 public:
  // `tp`: the lanes, which outlive the block as do `device` and `stream`; null: all heads are here.
  static absl::StatusOr<std::unique_ptr<AttentionBlock>> Create(const LanguageModelConfig& config,
                                                                comm::Communicator* tp, Device* device, Stream* stream);

  absl::Status AllocateTape(AttentionTape* tape);

  // Everything before the output projection: norm, q, k, v, probabilities and context of x [s, h].
  absl::Status Inner(ConstTensorView x, absl::Span<const ConstTensorView> weights, AttentionTape* tape);
  // This lane's addend of the output projection, kept until AddOutput.
  absl::Status Project(const AttentionTape& tape, absl::Span<const ConstTensorView> weights);
  // y [s, h] = x [s, h] + the sum of the lanes' addends.
  absl::Status AddOutput(ConstTensorView x, TensorView y);

  // dnormed [s, h] = the gradient of the normed input for that of the output, dy [s, h]; adds those of wq, wk, wv and
  // wo to `gradients`.
  absl::Status Backward(const AttentionTape& tape, absl::Span<const ConstTensorView> weights, ConstTensorView dy,
                        absl::Span<const TensorView> gradients, TensorView dnormed);

 private:
  AttentionBlock(const LanguageModelConfig& config, comm::Communicator* tp, Device* device, Stream* stream)
      : config_(config), tp_(tp), device_(device), stream_(*stream) {}
  absl::Status Allocate();

  int64_t local_heads() const { return config_.heads / (tp_ != nullptr ? tp_->size() : 1); }
  int64_t head_dim() const { return config_.hidden / config_.heads; }
  AttentionSizes sizes() const { return {config_.sequences, config_.sequence, local_heads(), head_dim()}; }

  // Sums partial values over the lanes, in place.
  absl::Status SumOverLanes(TensorView partial);
  // dcontext_ for dy; adds wo's gradient.
  absl::Status OutputBackward(const AttentionTape& tape, ConstTensorView wo, ConstTensorView dy, TensorView dwo);
  // dnormed = the lanes' sum of dq wq' + dk wk' + dv wv'; adds the three weights' gradients.
  absl::Status ProjectionsBackward(const AttentionTape& tape, absl::Span<const ConstTensorView> weights,
                                   absl::Span<const TensorView> gradients, TensorView dnormed);
  absl::Status ProjectionsBackwardByHead(const AttentionTape& tape, absl::Span<const ConstTensorView> weights,
                                         absl::Span<const TensorView> gradients, TensorView dnormed);

  const LanguageModelConfig config_;
  comm::Communicator* const tp_;
  Device* const device_;
  Stream& stream_;
  std::unique_ptr<HeadBlocks> head_blocks_;  // canonical numerics only, as is partial_
  Tensor partial_;                           // this lane's addend, wide
  Tensor addend_;                            // [s, h]
  Tensor dq_, dk_, dv_, dcontext_;           // [s, d]
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_ATTENTION_BLOCK_H_
