// A dense MLP that every token passes beside its routed experts: shared experts and residual MoE.
//
//   kAdd      y = m + d                      shared experts (DeepSeekMoE, arXiv 2401.06066)
//   kSigmoid  y = m + sigmoid(x . w) d       gated shared expert (Qwen2-MoE)
//   kSoftmax  y = a_0 m + a_1 d, (a_0, a_1) = softmax(x W' + b), per token     residual MoE (arXiv 2201.05596)
// where m is the MoE layer's output for x and d the MLP's. Several shared experts are one MLP of their joint width.
//
// The MLP is sliced over TP as experts are (experts.h, one local expert, f = F / T): one all_reduce of [s, h] forward
// (P -> I) and one backward. x, m and y are the same on all lanes, and so are the gradients of mix and mix_bias, which
// must not be summed over TP. Mixing coefficients are computed in double from any dtype.
//
//   EK_RETURN_IF_ERROR(layer->Forward(weights, x, m, call, &tape, stream));
//   EK_RETURN_IF_ERROR(branch->Forward(branch_weights, x, m, y, &branch_tape, stream));
//   ...
//   EK_RETURN_IF_ERROR(branch->Backward(branch_weights, branch_tape, x, dy, dm, dx_branch, branch_gradients, stream));
//   EK_RETURN_IF_ERROR(layer->Backward(weights, tape, dm, dx, gradients, stream));
//   EK_RETURN_IF_ERROR(Add(dx, dx_branch, dx, stream));
#ifndef EVENKEEL_MOE_DENSE_BRANCH_H_
#define EVENKEEL_MOE_DENSE_BRANCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

enum class BranchMix : uint8_t { kAdd = 0, kSigmoid = 1, kSoftmax = 2 };

// A value.
struct DenseBranchConfig {
  int64_t hidden = 0;
  int64_t ffn = 0;  // full width F of the MLP; a multiple of T
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = false;
  BranchMix mix = BranchMix::kAdd;
  DType dtype = DType::kF32;  // of tokens and weights: f32, f64, bf16, f16
  // kCanonical: the same bits for every T that divides kCanonicalBlocks, which divide ffn. 16 bits are then computed in
  // f32 up to the lanes' sum, from widened copies of weights and tokens.
  ExpertNumerics numerics = ExpertNumerics::kFast;

  // Rows of the mix matrix: 0, 1 or 2.
  int64_t mix_rows() const { return static_cast<int64_t>(mix); }
};

// The caller's parameters on this rank. mix: [mix_rows, h]; mix_bias: [mix_rows], or empty for none.
template <typename View>
struct DenseBranchTensors {
  ExpertTensors<View> mlp;
  View mix, mix_bias;
};
using DenseBranchWeights = DenseBranchTensors<ConstTensorView>;
using DenseBranchGradients = DenseBranchTensors<TensorView>;  // added to; f32 where the weights have 16 bits

// What a forward leaves for its backward: the two outputs, the MLP's middle and the coefficients. Movable.
struct DenseBranchTape {
  Tensor moe, dense;   // m and d, [s, h]
  Tensor pre, gate;    // of ExpertWork
  Tensor coefficient;  // [s, 2] f64: a_0, a_1
};

// Bytes of the branch's own device buffers, above what was live before the forward, whose tape was empty.
struct DenseBranchMemory {
  int64_t forward_peak = 0;
  int64_t tape = 0;           // kept between forward and backward
  int64_t backward_peak = 0;  // the tape included
  friend bool operator==(const DenseBranchMemory&, const DenseBranchMemory&) = default;
};

// Not thread-safe. All lanes make the same calls in the same order.
class DenseBranch {
 public:
  // tp: null for one lane; it must outlive the branch. InvalidArgument when extents are below 1, T does not divide F,
  // or canonical numerics do not fit.
  static absl::StatusOr<std::unique_ptr<DenseBranch>> Create(const DenseBranchConfig& config, comm::Communicator* tp,
                                                             Device* device);

  const DenseBranchConfig& config() const { return config_; }

  // For a forward and a backward of so many tokens; what is counted is equal to it.
  DenseBranchMemory PredictMemory(int64_t tokens) const;

  // y from x and m, all [s, h] of the configured dtype; y may be m itself, no other overlap. s may be 0.
  // Enqueued; what is passed must outlive the work. InvalidArgument when shapes do not fit.
  absl::Status Forward(const DenseBranchWeights& weights, ConstTensorView x, ConstTensorView m, TensorView y,
                       DenseBranchTape* tape, Stream& stream);

  // dm and dx are overwritten (dx holds what passes through this branch only), gradients are added to. dm must not
  // overlap dy. Waits for `stream` at the end, because scratch memory is freed.
  absl::Status Backward(const DenseBranchWeights& weights, DenseBranchTape& tape, ConstTensorView x, ConstTensorView dy,
                        TensorView dm, TensorView dx, const DenseBranchGradients& gradients, Stream& stream);

 private:
  // What the MLP is called with: the caller's views, or copies in the dtype it computes in, and its scratch.
  struct MlpInput {
    ExpertWeights weights;
    ConstTensorView x;
    TensorView scratch;
    std::vector<Tensor> keep;  // what the views show, until the queued work is done
  };

  DenseBranch(const DenseBranchConfig& config, const ExpertShape& shape, comm::Communicator* tp, Device* device)
      : config_(config), shape_(shape), compute_(shape), tp_(tp), device_(device) {
    if (widens()) compute_.dtype = DType::kF32;
  }
  bool widens() const { return shape_.canonical() && IsHalf(config_.dtype); }
  CanonicalExtents ScratchExtents(int64_t tokens) const;
  absl::StatusOr<MlpInput> PrepareMlp(const ExpertWeights& weights, ConstTensorView x, bool backward, Stream& stream);
  // `out` itself, or where the MLP computes wider a tensor of that dtype, kept in `keep`.
  absl::StatusOr<TensorView> WideOrSame(TensorView out, std::vector<Tensor>* keep);
  absl::Status CheckTokens(ConstTensorView view, int64_t tokens, const char* name) const;
  absl::Status CheckMix(ConstTensorView mix, ConstTensorView bias, DType dtype) const;
  absl::Status SumOverLanes(TensorView partial, Stream& stream);

  const DenseBranchConfig config_;
  const ExpertShape shape_;
  ExpertShape compute_;  // the same in the dtype it is computed in
  comm::Communicator* const tp_;
  Device* const device_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_DENSE_BRANCH_H_
