#include "evenkeel/moe/wide_moe_layer.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/moe_tape_state.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

class WideMoeLayer final : public MoeLayer {
 public:
  WideMoeLayer(const MoeConfig& config, std::unique_ptr<MoeLayer> inner)
      : config_(config), inner_(std::move(inner)), shape_(inner_->expert_shape()) {
    shape_.dtype = config.dtype;
  }

  const TypedOrder& order() const override { return inner_->order(); }
  const MoeConfig& config() const override { return config_; }
  const ExpertShape& expert_shape() const override { return shape_; }
  void SetObserver(std::function<void(const MoeTap&)> observer) override { inner_->SetObserver(std::move(observer)); }

  absl::Status Forward(const MoeWeights& weights, ConstTensorView x, TensorView y, const MoeCall& call, MoeTape* tape,
                       Stream& stream) override {
    EK_RETURN_IF_ERROR(CheckTokens(x, y));
    *tape = MoeTape();  // what the last forward left goes first
    EK_ASSIGN_OR_RETURN(Tensor wide_x, Tensor::Create(stream.device(), DType::kF32, x.shape()));
    Copies copies(stream);
    EK_ASSIGN_OR_RETURN(const MoeWeights wide_weights, Widen(weights, &copies));
    EK_RETURN_IF_ERROR(Cast(x, wide_x.view(), stream));
    EK_ASSIGN_OR_RETURN(const TensorView wide_y, copies.New(y.shape()));
    EK_RETURN_IF_ERROR(copies.Finish(inner_->Forward(wide_weights, wide_x.view(), wide_y, call, tape, stream)));
    EK_RETURN_IF_ERROR(copies.Finish(Cast(wide_y, y, stream)));
    tape->state().wide_tokens = std::move(wide_x);
    Predict(copies.bytes(), x.num_elements() * SizeOf(DType::kF32), &tape->state());
    return absl::OkStatus();
  }

  absl::Status Backward(const MoeWeights& weights, MoeTape& tape, ConstTensorView dy, TensorView dx,
                        const MoeGradients& gradients, Stream& stream, float loss_scale) override {
    EK_RETURN_IF_ERROR(CheckTokens(dy, dx));
    Copies copies(stream);
    EK_ASSIGN_OR_RETURN(const MoeWeights wide_weights, Widen(weights, &copies));
    EK_ASSIGN_OR_RETURN(const TensorView wide_dy, copies.New(dy.shape()));
    EK_ASSIGN_OR_RETURN(const TensorView wide_dx, copies.New(dx.shape()));
    EK_RETURN_IF_ERROR(Cast(dy, wide_dy, stream));
    EK_RETURN_IF_ERROR(
        copies.Finish(inner_->Backward(wide_weights, tape, wide_dy, wide_dx, gradients, stream, loss_scale)));
    return copies.Finish(Cast(wide_dx, dx, stream));
  }

 private:
  // Tensors of one call. Whatever happens, they go only when the work queued on them is done.
  class Copies {
   public:
    explicit Copies(Stream& stream) : stream_(stream) {}
    ~Copies() {
      if (!stream_.is_inline()) stream_.Synchronize().IgnoreError();
    }
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;
    absl::StatusOr<TensorView> New(const Shape& shape) {
      EK_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Create(stream_.device(), DType::kF32, shape));
      bytes_ += tensor.view().num_bytes();
      tensors_.push_back(std::move(tensor));
      return tensors_.back().view();
    }
    // `status` of work on the copies, once the stream has done it.
    absl::Status Finish(const absl::Status& status) {
      const absl::Status done = stream_.Synchronize();
      return status.ok() ? done : status;
    }
    Stream& stream() const { return stream_; }
    int64_t bytes() const { return bytes_; }

   private:
    Stream& stream_;
    std::vector<Tensor> tensors_;
    int64_t bytes_ = 0;
  };

  absl::Status CheckTokens(const ConstTensorView& in, const TensorView& out) const {
    if (in.dtype() == config_.dtype && out.dtype() == config_.dtype && in.shape() == out.shape()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("moe: tokens are ", DTypeName(in.dtype()), " ",
                                                   in.shape().ToString(), " and ", DTypeName(out.dtype()), " ",
                                                   out.shape().ToString(), ", wants ", DTypeName(config_.dtype)));
  }

  // The router's weights stay: it computes in f32 whatever they are.
  absl::StatusOr<MoeWeights> Widen(const MoeWeights& weights, Copies* copies) {
    EK_RETURN_IF_ERROR(CheckExpertTensors(shape_, weights.experts));
    MoeWeights wide = weights;
    for (ConstTensorView* view : {&wide.experts.w_in, &wide.experts.w_gate, &wide.experts.w_out, &wide.experts.b_in,
                                  &wide.experts.b_gate, &wide.experts.b_out}) {
      if (view->num_elements() == 0) continue;
      EK_ASSIGN_OR_RETURN(const TensorView copy, copies->New(view->shape()));
      EK_RETURN_IF_ERROR(Cast(*view, copy, copies->stream()));
      *view = copy;
    }
    return wide;
  }

  // `call`: copies of the forward, output included; `tokens`: one widened copy of the tokens. The router's logits,
  // which come and go before and after the layer's own buffers, are on top of the copies too.
  static void Predict(int64_t call, int64_t tokens, MoeTapeState* state) {
    const int64_t logits = state->decision.num_tokens * state->decision.num_experts * SizeOf(DType::kF32);
    OrderMemory& memory = state->memory;
    memory.forward_peak = std::max(memory.forward_peak, logits) + call + tokens;
    memory.tape += tokens;
    // Weights and two gradients instead of weights and one output.
    memory.backward_peak = std::max(memory.backward_peak, logits) + tokens + call + tokens;
  }

  const MoeConfig config_;
  const std::unique_ptr<MoeLayer> inner_;
  ExpertShape shape_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MoeLayer>> CreateWideMoeLayer(
    const MoeConfig& config,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<MoeLayer>>(const MoeConfig& wide)> create) {
  MoeConfig wide = config;
  wide.dtype = DType::kF32;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<MoeLayer> inner, create(wide));
  return std::unique_ptr<MoeLayer>(std::make_unique<WideMoeLayer>(config, std::move(inner)));
}

}  // namespace evenkeel::moe
