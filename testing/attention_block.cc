#include "evenkeel/testing/attention_block.h"

#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/norm.h"
#include "evenkeel/testing/leaf_tensors.h"

namespace evenkeel::testutil {

absl::StatusOr<std::unique_ptr<AttentionBlock>> AttentionBlock::Create(const LanguageModelConfig& config,
                                                                       comm::Communicator* tp, Device* device,
                                                                       Stream* stream) {
  std::unique_ptr<AttentionBlock> block(new AttentionBlock(config, tp, device, stream));
  EK_RETURN_IF_ERROR(block->Allocate());
  return block;
}

absl::Status AttentionBlock::Allocate() {
  const int64_t s = config_.tokens(), h = config_.hidden, d = local_heads() * head_dim();
  EK_ASSIGN_OR_RETURN(addend_, Tensor::Create(device_, config_.dtype, {s, h}));
  for (Tensor* narrow : {&dq_, &dk_, &dv_, &dcontext_}) {
    EK_ASSIGN_OR_RETURN(*narrow, Tensor::Create(device_, config_.dtype, {s, d}));
  }
  if (!config_.canonical()) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(head_blocks_,
                      HeadBlocks::Create({s, h, local_heads(), head_dim(), config_.dtype}, device_, &stream_));
  EK_ASSIGN_OR_RETURN(partial_, Tensor::Create(device_, config_.wide_dtype(), {s, h}));
  return absl::OkStatus();
}

absl::Status AttentionBlock::AllocateTape(AttentionTape* tape) {
  const int64_t s = config_.tokens(), n = config_.sequence, d = local_heads() * head_dim();
  EK_ASSIGN_OR_RETURN(tape->normed, Tensor::Create(device_, config_.dtype, {s, config_.hidden}));
  EK_ASSIGN_OR_RETURN(tape->inverse_rms, Tensor::Create(device_, config_.wide_dtype(), {s}));
  for (Tensor* narrow : {&tape->q, &tape->k, &tape->v, &tape->context}) {
    EK_ASSIGN_OR_RETURN(*narrow, Tensor::Create(device_, config_.dtype, {s, d}));
  }
  EK_ASSIGN_OR_RETURN(tape->probabilities,
                      Tensor::Create(device_, config_.dtype, {config_.sequences * local_heads(), n, n}));
  return absl::OkStatus();
}

absl::Status AttentionBlock::Inner(ConstTensorView x, absl::Span<const ConstTensorView> weights, AttentionTape* tape) {
  EK_RETURN_IF_ERROR(RmsNormForward(x, weights[kAttentionNorm], config_.norm_epsilon, tape->normed.view(),
                                    tape->inverse_rms.view(), stream_));
  const ConstTensorView normed = tape->normed.const_view();
  const Tensor* outputs[] = {&tape->q, &tape->k, &tape->v};
  for (int i = 0; i < 3; ++i) {
    const TensorView to = outputs[i]->view();
    EK_RETURN_IF_ERROR(head_blocks_ != nullptr ? head_blocks_->Columns(normed, weights[kWq + i], to)
                                               : Gemm(false, false, 1, normed, weights[kWq + i], 0, to, stream_));
  }
  return CausalAttentionForward(sizes(), tape->q.const_view(), tape->k.const_view(), tape->v.const_view(),
                                tape->probabilities.view(), tape->context.view(), stream_);
}

absl::Status AttentionBlock::Project(const AttentionTape& tape, absl::Span<const ConstTensorView> weights) {
  const ConstTensorView context = tape.context.const_view(), wo = weights[kWo];
  if (head_blocks_ != nullptr) return head_blocks_->RowsPartial(context, wo, partial_.view());
  return Gemm(false, false, 1, context, wo, 0, addend_.view(), stream_);
}

absl::Status AttentionBlock::AddOutput(ConstTensorView x, TensorView y) {
  const TensorView sum = head_blocks_ != nullptr ? partial_.view() : addend_.view();
  EK_RETURN_IF_ERROR(SumOverLanes(sum));
  if (head_blocks_ != nullptr) EK_RETURN_IF_ERROR(Cast(sum, addend_.view(), stream_));
  return Add(x, addend_.const_view(), y, stream_);
}

absl::Status AttentionBlock::Backward(const AttentionTape& tape, absl::Span<const ConstTensorView> weights,
                                      ConstTensorView dy, absl::Span<const TensorView> gradients, TensorView dnormed) {
  EK_RETURN_IF_ERROR(OutputBackward(tape, weights[kWo], dy, gradients[kWo]));
  EK_RETURN_IF_ERROR(CausalAttentionBackward(sizes(), tape.q.const_view(), tape.k.const_view(), tape.v.const_view(),
                                             tape.probabilities.const_view(), dcontext_.const_view(), dq_.view(),
                                             dk_.view(), dv_.view(), stream_));
  return head_blocks_ != nullptr ? ProjectionsBackwardByHead(tape, weights, gradients, dnormed)
                                 : ProjectionsBackward(tape, weights, gradients, dnormed);
}

absl::Status AttentionBlock::SumOverLanes(TensorView partial) {
  if (tp_ == nullptr) return absl::OkStatus();
  return tp_->AllReduce(partial, partial, comm::ReduceOp::kSum, stream_);
}

absl::Status AttentionBlock::OutputBackward(const AttentionTape& tape, ConstTensorView wo, ConstTensorView dy,
                                            TensorView dwo) {
  const ConstTensorView context = tape.context.const_view();
  if (head_blocks_ != nullptr) {
    EK_RETURN_IF_ERROR(head_blocks_->RowsWeightGradient(context, dy, dwo));
    return head_blocks_->RowsInputGradient(dy, wo, dcontext_.view());
  }
  EK_RETURN_IF_ERROR(GemmWeightGradient(context, dy, {}, dwo, stream_));
  return Gemm(false, true, 1, dy, wo, 0, dcontext_.view(), stream_);
}

absl::Status AttentionBlock::ProjectionsBackward(const AttentionTape& tape, absl::Span<const ConstTensorView> weights,
                                                 absl::Span<const TensorView> gradients, TensorView dnormed) {
  const ConstTensorView normed = tape.normed.const_view();
  const Tensor* outputs[] = {&dq_, &dk_, &dv_};
  for (int i = 0; i < 3; ++i) {
    const ConstTensorView d = outputs[i]->const_view();
    EK_RETURN_IF_ERROR(GemmWeightGradient(normed, d, {}, gradients[kWq + i], stream_));
    EK_RETURN_IF_ERROR(Gemm(false, true, 1, d, weights[kWq + i], 0, i == 0 ? dnormed : addend_.view(), stream_));
    if (i > 0) EK_RETURN_IF_ERROR(Add(dnormed, addend_.const_view(), dnormed, stream_));
  }
  return SumOverLanes(dnormed);
}

absl::Status AttentionBlock::ProjectionsBackwardByHead(const AttentionTape& tape,
                                                       absl::Span<const ConstTensorView> weights,
                                                       absl::Span<const TensorView> gradients, TensorView dnormed) {
  const Tensor* outputs[] = {&dq_, &dk_, &dv_};
  std::vector<std::pair<ConstTensorView, ConstTensorView>> products;
  for (int i = 0; i < 3; ++i) {
    const ConstTensorView d = outputs[i]->const_view();
    EK_RETURN_IF_ERROR(head_blocks_->ColumnsWeightGradient(tape.normed.const_view(), d, gradients[kWq + i]));
    products.push_back({d, weights[kWq + i]});
  }
  EK_RETURN_IF_ERROR(head_blocks_->ColumnsInputPartial(products, partial_.view()));
  EK_RETURN_IF_ERROR(SumOverLanes(partial_.view()));
  return Cast(partial_.const_view(), dnormed, stream_);
}

}  // namespace evenkeel::testutil
