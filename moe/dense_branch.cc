#include "evenkeel/moe/dense_branch.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"

namespace evenkeel::moe {
namespace {

// 16-bit elements are computed in float, rounded once per result.
template <typename T>
double ToDouble(T value) {
  return static_cast<double>(value);
}
double ToDouble(BF16 value) { return static_cast<float>(value); }
double ToDouble(F16 value) { return static_cast<float>(value); }
template <typename T>
T FromDouble(double value) {
  return static_cast<T>(value);
}
template <>
BF16 FromDouble<BF16>(double value) {
  return BF16(static_cast<float>(value));
}
template <>
F16 FromDouble<F16>(double value) {
  return F16(static_cast<float>(value));
}

template <typename T>
double Dot(const T* a, const T* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += ToDouble(a[i]) * ToDouble(b[i]);
  return sum;
}

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// Calls `body` with a null pointer of the element type of `dtype`.
template <typename Body>
void Dispatch(DType dtype, Body body) {
  switch (dtype) {
    case DType::kF32:
      return body(static_cast<float*>(nullptr));
    case DType::kF64:
      return body(static_cast<double*>(nullptr));
    case DType::kBF16:
      return body(static_cast<BF16*>(nullptr));
    case DType::kF16:
      return body(static_cast<F16*>(nullptr));
    default:
      EK_CHECK(false);
  }
}

// a: [s, 2] from x: [s, h] and mix: [rows, h].
template <typename T>
void Coefficients(BranchMix kind, ConstTensorView x, const DenseBranchWeights& weights, double* a) {
  const int64_t tokens = x.shape().dim(0);
  const int64_t hidden = x.shape().dim(1);
  const int64_t rows = static_cast<int64_t>(kind);
  const bool biased = weights.mix_bias.num_elements() > 0;
  for (int64_t t = 0; t < tokens; ++t) {
    double logit[2] = {};
    for (int64_t j = 0; j < rows; ++j) {
      logit[j] = Dot(x.data<T>() + t * hidden, weights.mix.data<T>() + j * hidden, hidden) +
                 (biased ? ToDouble(weights.mix_bias.data<T>()[j]) : 0.0);
    }
    switch (kind) {
      case BranchMix::kAdd:
        a[2 * t] = a[2 * t + 1] = 1.0;
        break;
      case BranchMix::kSigmoid:
        a[2 * t] = 1.0;
        a[2 * t + 1] = Sigmoid(logit[0]);
        break;
      case BranchMix::kSoftmax:
        a[2 * t] = Sigmoid(logit[0] - logit[1]);
        a[2 * t + 1] = Sigmoid(logit[1] - logit[0]);
        break;
    }
  }
}

// y = a_0 m + a_1 d.
template <typename T>
void Mix(const double* a, ConstTensorView m, ConstTensorView d, TensorView y) {
  const int64_t hidden = m.shape().dim(1);
  for (int64_t t = 0; t < m.shape().dim(0); ++t) {
    for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) {
      y.data<T>()[i] = FromDouble<T>(a[2 * t] * ToDouble(m.data<T>()[i]) + a[2 * t + 1] * ToDouble(d.data<T>()[i]));
    }
  }
}

// dm = a_0 dy, dd = a_1 dy.
template <typename T>
void MixBackward(const double* a, ConstTensorView dy, TensorView dm, TensorView dd) {
  const int64_t hidden = dy.shape().dim(1);
  for (int64_t t = 0; t < dy.shape().dim(0); ++t) {
    for (int64_t i = t * hidden; i < (t + 1) * hidden; ++i) {
      const double g = ToDouble(dy.data<T>()[i]);
      dm.data<T>()[i] = FromDouble<T>(a[2 * t] * g);
      dd.data<T>()[i] = FromDouble<T>(a[2 * t + 1] * g);
    }
  }
}

// dlogit of one token from the gradients of its coefficients.
void LogitGradient(BranchMix kind, const double* a, double da0, double da1, double* dlogit) {
  if (kind == BranchMix::kSigmoid) {
    dlogit[0] = da1 * a[1] * (1.0 - a[1]);
    return;
  }
  const double dot = a[0] * da0 + a[1] * da1;
  dlogit[0] = a[0] * (da0 - dot);
  dlogit[1] = a[1] * (da1 - dot);
}

// dx += through the coefficients; dmix and dmix_bias get the sum over tokens, taken in token order, added once.
template <typename T, typename G>
void CoefficientsBackward(BranchMix kind, const DenseBranchTape& tape, const DenseBranchWeights& weights,
                          ConstTensorView x, ConstTensorView dy, TensorView dx, const DenseBranchGradients& gradients) {
  const int64_t tokens = x.shape().dim(0);
  const int64_t hidden = x.shape().dim(1);
  const int64_t rows = static_cast<int64_t>(kind);
  std::vector<double> dmix(rows * hidden, 0.0);
  std::vector<double> dbias(rows, 0.0);
  const double* a = tape.coefficient.data<double>();
  for (int64_t t = 0; t < tokens; ++t) {
    const T* g = dy.data<T>() + t * hidden;
    double dlogit[2] = {};
    LogitGradient(kind, a + 2 * t, Dot(g, tape.moe.data<T>() + t * hidden, hidden),
                  Dot(g, tape.dense.data<T>() + t * hidden, hidden), dlogit);
    T* dx_row = dx.data<T>() + t * hidden;
    for (int64_t i = 0; i < hidden; ++i) {
      double sum = ToDouble(dx_row[i]);
      for (int64_t j = 0; j < rows; ++j) {
        sum += dlogit[j] * ToDouble(weights.mix.data<T>()[j * hidden + i]);
        dmix[j * hidden + i] += dlogit[j] * ToDouble(x.data<T>()[t * hidden + i]);
      }
      dx_row[i] = FromDouble<T>(sum);
    }
    for (int64_t j = 0; j < rows; ++j) dbias[j] += dlogit[j];
  }
  for (size_t i = 0; i < dmix.size(); ++i) gradients.mix.data<G>()[i] += static_cast<G>(dmix[i]);
  if (gradients.mix_bias.num_elements() == 0) return;
  for (size_t j = 0; j < dbias.size(); ++j) gradients.mix_bias.data<G>()[j] += static_cast<G>(dbias[j]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DenseBranch>> DenseBranch::Create(const DenseBranchConfig& config,
                                                                 comm::Communicator* tp, Device* device) {
  const int lanes = tp != nullptr ? tp->size() : 1;
  if (config.hidden < 1 || config.ffn < 1 || config.ffn % lanes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a dense branch needs hidden and ffn of at least 1 and ffn divisible ", "by TP, got hidden ",
                     config.hidden, ", ffn ", config.ffn, ", TP ", lanes));
  }
  if (!IsFloating(config.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("a dense branch of dtype ", DTypeName(config.dtype)));
  }
  ExpertShape shape;
  shape.local_experts = 1;
  shape.hidden = config.hidden;
  shape.ffn = config.ffn / lanes;
  shape.activation = config.activation;
  shape.bias = config.bias;
  shape.adds_output_bias = tp == nullptr || tp->rank() == 0;
  shape.dtype = config.dtype;
  shape.numerics = config.numerics;
  shape.tp = lanes;
  if (shape.canonical() && (kCanonicalBlocks % lanes != 0 || config.ffn % kCanonicalBlocks != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("a dense branch in canonical numerics is cut into ",
                                                   kCanonicalBlocks, " blocks; ffn ", config.ffn, " with TP ", lanes,
                                                   " does not fit"));
  }
  return std::unique_ptr<DenseBranch>(new DenseBranch(config, shape, tp, device));
}

absl::Status DenseBranch::CheckTokens(ConstTensorView view, int64_t tokens, const char* name) const {
  if (view.dtype() == config_.dtype && view.shape() == Shape{tokens, config_.hidden}) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dense branch: ", name, " must be ", DTypeName(config_.dtype), "[",
                                                 tokens, ", ", config_.hidden, "], got ", DTypeName(view.dtype()),
                                                 view.shape().ToString()));
}

absl::Status DenseBranch::CheckMix(ConstTensorView mix, ConstTensorView bias, DType dtype) const {
  const int64_t rows = config_.mix_rows();
  const bool fits = rows == 0 || (mix.dtype() == dtype && mix.shape() == Shape{rows, config_.hidden});
  const bool bias_fits = bias.num_elements() == 0 || (bias.dtype() == dtype && bias.num_elements() == rows);
  if (fits && bias_fits) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dense branch: mix must be ", DTypeName(dtype), "[", rows, ", ",
                                                 config_.hidden, "] and its bias [", rows, "] or empty, got ",
                                                 DTypeName(mix.dtype()), mix.shape().ToString(), " and ",
                                                 DTypeName(bias.dtype()), bias.shape().ToString()));
}

absl::Status DenseBranch::SumOverLanes(TensorView partial, Stream& stream) {
  if (tp_ == nullptr || tp_->size() == 1) return absl::OkStatus();
  return tp_->AllReduce(partial, partial, comm::ReduceOp::kSum, stream);
}

CanonicalExtents DenseBranch::ScratchExtents(int64_t tokens) const {
  return {.rows = tokens, .hidden = shape_.hidden, .ffn = shape_.ffn, .blocks = kCanonicalBlocks / shape_.tp};
}

DenseBranchMemory DenseBranch::PredictMemory(int64_t tokens) const {
  const int64_t own = SizeOf(config_.dtype), wide = SizeOf(compute_.dtype);
  const int64_t rows = tokens * shape_.hidden, middle = tokens * shape_.ffn;
  const int64_t gates = shape_.gated() ? 1 : 0;
  const int64_t weights =
      (2 + gates) * shape_.hidden * shape_.ffn + (shape_.bias ? (1 + gates) * shape_.ffn + shape_.hidden : 0);
  const int64_t widened = widens() ? (rows + weights) * wide : 0;  // x and the MLP's weights
  const CanonicalExtents extents = ScratchExtents(tokens);
  const int64_t forward_scratch = shape_.canonical() ? CanonicalForwardScratch(extents) * wide : 0;
  const int64_t backward_scratch = shape_.canonical() ? CanonicalBackwardScratch(extents) * wide : 0;
  DenseBranchMemory memory;
  memory.tape = 2 * rows * own + (1 + gates) * middle * wide + 2 * tokens * SizeOf(DType::kF64);
  memory.forward_peak = memory.tape + middle * wide + forward_scratch + widened + (widens() ? rows * wide : 0);
  memory.backward_peak = memory.tape + rows * own + (2 + gates) * middle * wide + backward_scratch + widened +
                         (widens() ? 2 * rows * wide : 0);
  return memory;
}

absl::StatusOr<DenseBranch::MlpInput> DenseBranch::PrepareMlp(const ExpertWeights& weights, ConstTensorView x,
                                                              bool backward, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckExpertTensors(shape_, weights));
  MlpInput input;
  input.weights = weights;
  input.x = x;
  if (!shape_.canonical()) return input;
  const CanonicalExtents extents = ScratchExtents(x.shape().dim(0));
  const int64_t scratch = backward ? CanonicalBackwardScratch(extents) : CanonicalForwardScratch(extents);
  EK_ASSIGN_OR_RETURN(Tensor memory, Tensor::Create(device_, compute_.dtype, {scratch}));
  input.scratch = memory.view();
  input.keep.push_back(std::move(memory));
  if (!widens()) return input;
  ExpertWeights& w = input.weights;
  for (ConstTensorView* view : {&input.x, &w.w_in, &w.w_gate, &w.w_out, &w.b_in, &w.b_gate, &w.b_out}) {
    if (view->num_elements() == 0) continue;
    EK_ASSIGN_OR_RETURN(Tensor copy, Tensor::Create(device_, compute_.dtype, view->shape()));
    EK_RETURN_IF_ERROR(Cast(*view, copy.view(), stream));
    *view = copy.const_view();
    input.keep.push_back(std::move(copy));
  }
  return input;
}

absl::StatusOr<TensorView> DenseBranch::WideOrSame(TensorView out, std::vector<Tensor>* keep) {
  if (!widens()) return out;
  EK_ASSIGN_OR_RETURN(Tensor wide, Tensor::Create(device_, compute_.dtype, out.shape()));
  keep->push_back(std::move(wide));
  return keep->back().view();
}

absl::Status DenseBranch::Forward(const DenseBranchWeights& weights, ConstTensorView x, ConstTensorView m, TensorView y,
                                  DenseBranchTape* tape, Stream& stream) {
  const int64_t tokens = x.shape().rank() == 2 ? x.shape().dim(0) : 0;
  EK_RETURN_IF_ERROR(CheckTokens(x, tokens, "x"));
  EK_RETURN_IF_ERROR(CheckTokens(m, tokens, "m"));
  EK_RETURN_IF_ERROR(CheckTokens(y, tokens, "y"));
  EK_RETURN_IF_ERROR(CheckMix(weights.mix, weights.mix_bias, config_.dtype));
  const auto make = [&](int64_t columns) { return Tensor::Create(device_, config_.dtype, {tokens, columns}); };
  EK_ASSIGN_OR_RETURN(tape->moe, make(config_.hidden));
  EK_ASSIGN_OR_RETURN(tape->dense, make(config_.hidden));
  const auto make_middle = [&](bool wanted) {
    return Tensor::Create(device_, compute_.dtype, {tokens, wanted ? shape_.ffn : 0});
  };
  EK_ASSIGN_OR_RETURN(tape->pre, make_middle(true));
  EK_ASSIGN_OR_RETURN(tape->gate, make_middle(shape_.gated()));
  EK_ASSIGN_OR_RETURN(tape->coefficient, Tensor::Create(device_, DType::kF64, {tokens, 2}));
  EK_ASSIGN_OR_RETURN(Tensor middle, make_middle(true));
  EK_ASSIGN_OR_RETURN(MlpInput mlp, PrepareMlp(weights.mlp, x, /*backward=*/false, stream));
  EK_ASSIGN_OR_RETURN(const TensorView dense, WideOrSame(tape->dense.view(), &mlp.keep));
  const ExpertWork work{.pre = tape->pre.view(),
                        .gate = tape->gate.view(),
                        .hidden = middle.view(),
                        .dpre = {},
                        .dgate = {},
                        .positions_per_source = std::max<int64_t>(1, tokens),
                        .scratch = mlp.scratch};
  mlp.keep.push_back(std::move(middle));
  EK_RETURN_IF_ERROR(stream.Copy(tape->moe.view().raw(), m.raw(), m.num_bytes()));
  EK_RETURN_IF_ERROR(ExpertsForward(compute_, mlp.weights, mlp.x, {tokens}, work, dense, stream));
  EK_RETURN_IF_ERROR(SumOverLanes(dense, stream));
  if (widens()) EK_RETURN_IF_ERROR(Cast(dense, tape->dense.view(), stream));
  // Scratch lives in the queued work until the MLP is done.
  return stream.Launch([kind = config_.mix, dtype = config_.dtype, weights, x, y, moe = tape->moe.const_view(),
                        dense = tape->dense.const_view(), a = tape->coefficient.data<double>(),
                        keep = std::move(mlp.keep)] {
    Dispatch(dtype, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      Coefficients<T>(kind, x, weights, a);
      Mix<T>(a, moe, dense, y);
    });
    return absl::OkStatus();
  });
}

absl::Status DenseBranch::Backward(const DenseBranchWeights& weights, DenseBranchTape& tape, ConstTensorView x,
                                   ConstTensorView dy, TensorView dm, TensorView dx,
                                   const DenseBranchGradients& gradients, Stream& stream) {
  const int64_t tokens = tape.dense.shape().dim(0);
  EK_RETURN_IF_ERROR(CheckTokens(x, tokens, "x"));
  EK_RETURN_IF_ERROR(CheckTokens(dy, tokens, "dy"));
  EK_RETURN_IF_ERROR(CheckTokens(dm, tokens, "dm"));
  EK_RETURN_IF_ERROR(CheckTokens(dx, tokens, "dx"));
  EK_RETURN_IF_ERROR(CheckMix(gradients.mix, gradients.mix_bias, shape_.gradient_dtype()));
  const auto make = [&](int64_t columns) { return Tensor::Create(device_, config_.dtype, {tokens, columns}); };
  EK_ASSIGN_OR_RETURN(const Tensor ddense, make(config_.hidden));
  const auto make_middle = [&](bool wanted) {
    return Tensor::Create(device_, compute_.dtype, {tokens, wanted ? shape_.ffn : 0});
  };
  EK_ASSIGN_OR_RETURN(const Tensor middle, make_middle(true));
  EK_ASSIGN_OR_RETURN(const Tensor dpre, make_middle(true));
  EK_ASSIGN_OR_RETURN(const Tensor dgate, make_middle(shape_.gated()));
  const DType dtype = config_.dtype;
  std::vector<Tensor> keep;
  const auto run = [&]() -> absl::Status {
    EK_RETURN_IF_ERROR(stream.Launch([&] {
      Dispatch(dtype, [&](auto* type) {
        MixBackward<std::remove_pointer_t<decltype(type)>>(tape.coefficient.data<double>(), dy, dm, ddense.view());
      });
      return absl::OkStatus();
    }));
    EK_ASSIGN_OR_RETURN(MlpInput mlp, PrepareMlp(weights.mlp, x, /*backward=*/true, stream));
    keep = std::move(mlp.keep);
    EK_ASSIGN_OR_RETURN(const TensorView wide_dense, WideOrSame(ddense.view(), &keep));
    EK_ASSIGN_OR_RETURN(const TensorView wide_dx, WideOrSame(dx, &keep));
    if (widens()) EK_RETURN_IF_ERROR(Cast(ddense.const_view(), wide_dense, stream));
    const ExpertWork work{.pre = tape.pre.view(),
                          .gate = tape.gate.view(),
                          .hidden = middle.view(),
                          .dpre = dpre.view(),
                          .dgate = dgate.view(),
                          .positions_per_source = std::max<int64_t>(1, tokens),
                          .scratch = mlp.scratch};
    EK_RETURN_IF_ERROR(
        ExpertsBackward(compute_, mlp.weights, mlp.x, {tokens}, {}, work, wide_dense, wide_dx, gradients.mlp, stream));
    EK_RETURN_IF_ERROR(SumOverLanes(wide_dx, stream));
    if (widens()) EK_RETURN_IF_ERROR(Cast(wide_dx, dx, stream));
    if (config_.mix == BranchMix::kAdd) return absl::OkStatus();
    return stream.Launch([&] {
      Dispatch(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        using G = std::conditional_t<std::is_same_v<T, double>, double, float>;
        CoefficientsBackward<T, G>(config_.mix, tape, weights, x, dy, dx, gradients);
      });
      return absl::OkStatus();
    });
  };
  const absl::Status status = run();
  const absl::Status synchronized = stream.Synchronize();
  return status.ok() ? synchronized : status;
}

}  // namespace evenkeel::moe
