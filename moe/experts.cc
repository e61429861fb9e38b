#include "evenkeel/moe/experts.h"

#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/experts_canonical.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/activation.h"
#include "evenkeel/runtime/ops/gemm.h"

namespace evenkeel::moe {
namespace {

template <typename View>
absl::Status CheckTensor(const char* name, const View& view, bool wanted, DType dtype, const Shape& shape) {
  if (!wanted) return absl::OkStatus();
  if (view.dtype() == dtype && view.shape() == shape) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("experts: ", name, " is ", std::string(DTypeName(view.dtype())), " ",
                                                 view.shape().ToString(), ", wants ", std::string(DTypeName(dtype)),
                                                 " ", shape.ToString()));
}

template <typename View>
absl::Status CheckAll(const ExpertShape& shape, const ExpertTensors<View>& tensors, DType dtype) {
  const int64_t le = shape.local_experts, h = shape.hidden, f = shape.ffn;
  EK_RETURN_IF_ERROR(CheckTensor("w_in", tensors.w_in, true, dtype, Shape({le, h, f})));
  EK_RETURN_IF_ERROR(CheckTensor("w_gate", tensors.w_gate, shape.gated(), dtype, Shape({le, h, f})));
  EK_RETURN_IF_ERROR(CheckTensor("w_out", tensors.w_out, true, dtype, Shape({le, f, h})));
  EK_RETURN_IF_ERROR(CheckTensor("b_in", tensors.b_in, shape.bias, dtype, Shape({le, f})));
  EK_RETURN_IF_ERROR(CheckTensor("b_gate", tensors.b_gate, shape.bias && shape.gated(), dtype, Shape({le, f})));
  return CheckTensor("b_out", tensors.b_out, shape.bias, dtype, Shape({le, h}));
}

absl::Status CheckRows(const ExpertShape& shape, const ConstTensorView& x, absl::Span<const int64_t> row_counts) {
  if (static_cast<int64_t>(row_counts.size()) != shape.local_experts) {
    return absl::InvalidArgumentError(
        absl::StrCat("experts: ", row_counts.size(), " row counts for ", shape.local_experts, " local experts"));
  }
  const int64_t rows = std::accumulate(row_counts.begin(), row_counts.end(), int64_t{0});
  return CheckTensor("x", x, true, shape.dtype, Shape({rows, shape.hidden}));
}

// Expert g's matrix or vector.
template <typename View>
View Of(const View& stacked, int64_t g) {
  View one = stacked.Rows(g, 1);
  if (stacked.shape().rank() == 3) return one.Reshaped(Shape({stacked.shape().dim(1), stacked.shape().dim(2)}));
  return one.Reshaped(Shape({stacked.shape().dim(1)}));
}

// Adds each expert's bias to its rows, in place.
absl::Status AddBiases(ConstTensorView bias, absl::Span<const int64_t> row_counts, TensorView rows, Stream& stream) {
  int64_t begin = 0;
  for (size_t g = 0; g < row_counts.size(); ++g) {
    if (row_counts[g] > 0) {
      const TensorView block = rows.Rows(begin, row_counts[g]);
      EK_RETURN_IF_ERROR(AddBias(block, Of(bias, static_cast<int64_t>(g)), block, stream));
    }
    begin += row_counts[g];
  }
  return absl::OkStatus();
}

absl::Status AddBiasGradients(ConstTensorView dy, absl::Span<const int64_t> row_counts,
                              absl::Span<const int64_t> positions, TensorView dbias, Stream& stream) {
  int64_t begin = 0;
  for (size_t g = 0; g < row_counts.size(); ++g) {
    if (row_counts[g] > 0) {
      const absl::Span<const int64_t> own = positions.empty() ? positions : positions.subspan(begin, row_counts[g]);
      EK_RETURN_IF_ERROR(BiasGradient(dy.Rows(begin, row_counts[g]), own, Of(dbias, static_cast<int64_t>(g)), stream));
    }
    begin += row_counts[g];
  }
  return absl::OkStatus();
}

// hidden = activation(pre, gate).
absl::Status Activate(const ExpertShape& shape, const ExpertWork& work, Stream& stream) {
  if (shape.gated()) return SwiGluForward(work.gate, work.pre, work.hidden, stream);
  return GeluForward(work.pre, work.hidden, stream);
}

}  // namespace

absl::Status CheckExpertTensors(const ExpertShape& shape, const ExpertWeights& weights) {
  return CheckAll(shape, weights, shape.dtype);
}

absl::Status CheckExpertTensors(const ExpertShape& shape, const ExpertGradients& gradients) {
  return CheckAll(shape, gradients, shape.gradient_dtype());
}

absl::Status ExpertsRecompute(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                              absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckExpertTensors(shape, weights));
  EK_RETURN_IF_ERROR(CheckRows(shape, x, row_counts));
  if (shape.canonical()) {
    EK_RETURN_IF_ERROR(CanonicalRecompute(shape, weights, x, row_counts, work, stream));
  } else {
    EK_RETURN_IF_ERROR(GemmGrouped(false, 1.0, x, weights.w_in, row_counts, 0.0, work.pre, stream));
    if (shape.gated()) {
      EK_RETURN_IF_ERROR(GemmGrouped(false, 1.0, x, weights.w_gate, row_counts, 0.0, work.gate, stream));
    }
  }
  if (!shape.bias) return absl::OkStatus();
  EK_RETURN_IF_ERROR(AddBiases(weights.b_in, row_counts, work.pre, stream));
  return shape.gated() ? AddBiases(weights.b_gate, row_counts, work.gate, stream) : absl::OkStatus();
}

absl::Status ExpertsForward(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                            absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView y,
                            Stream& stream) {
  EK_RETURN_IF_ERROR(ExpertsRecompute(shape, weights, x, row_counts, work, stream));
  EK_RETURN_IF_ERROR(Activate(shape, work, stream));
  if (shape.canonical()) return CanonicalOutput(shape, weights, row_counts, work, y, stream);
  EK_RETURN_IF_ERROR(GemmGrouped(false, 1.0, work.hidden, weights.w_out, row_counts, 0.0, y, stream));
  if (shape.bias && shape.adds_output_bias) EK_RETURN_IF_ERROR(AddBiases(weights.b_out, row_counts, y, stream));
  return absl::OkStatus();
}

absl::Status ExpertsBackward(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                             absl::Span<const int64_t> row_counts, absl::Span<const int64_t> positions,
                             const ExpertWork& work, ConstTensorView dy, TensorView dx,
                             const ExpertGradients& gradients, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckExpertTensors(shape, weights));
  EK_RETURN_IF_ERROR(CheckExpertTensors(shape, gradients));
  EK_RETURN_IF_ERROR(CheckRows(shape, x, row_counts));
  const auto weight_gradient = [&](ConstTensorView in, ConstTensorView dout, TensorView dw) {
    if (!work.adds_gradients) return absl::OkStatus();
    if (!shape.canonical()) return GemmGroupedWeightGradient(in, dout, row_counts, positions, dw, stream);
    const bool middle_is_in = in.raw() == work.hidden.raw();
    return CanonicalWeightGradient(shape, middle_is_in, in, dout, row_counts, positions, work, dw, stream);
  };
  const auto bias_gradient = [&](ConstTensorView dout, TensorView db) {
    if (!shape.bias || !work.adds_gradients) return absl::OkStatus();
    if (shape.canonical()) return CanonicalBiasGradient(dout, row_counts, positions, work, db, stream);
    return AddBiasGradients(dout, row_counts, positions, db, stream);
  };
  // The output matrix: `hidden` is recomputed rather than kept.
  EK_RETURN_IF_ERROR(Activate(shape, work, stream));
  EK_RETURN_IF_ERROR(weight_gradient(work.hidden, dy, gradients.w_out));
  EK_RETURN_IF_ERROR(bias_gradient(dy, gradients.b_out));
  // From here `hidden` holds its own gradient.
  if (shape.canonical()) {
    EK_RETURN_IF_ERROR(CanonicalMiddleGradient(shape, weights, dy, row_counts, work, stream));
  } else {
    EK_RETURN_IF_ERROR(GemmGrouped(true, 1.0, dy, weights.w_out, row_counts, 0.0, work.hidden, stream));
  }
  if (shape.gated()) {
    EK_RETURN_IF_ERROR(SwiGluBackward(work.gate, work.pre, work.hidden, work.dgate, work.dpre, stream));
    EK_RETURN_IF_ERROR(weight_gradient(x, work.dgate, gradients.w_gate));
    EK_RETURN_IF_ERROR(bias_gradient(work.dgate, gradients.b_gate));
  } else {
    EK_RETURN_IF_ERROR(GeluBackward(work.pre, work.hidden, work.dpre, stream));
  }
  EK_RETURN_IF_ERROR(weight_gradient(x, work.dpre, gradients.w_in));
  EK_RETURN_IF_ERROR(bias_gradient(work.dpre, gradients.b_in));
  if (shape.canonical()) return CanonicalInputGradient(shape, weights, row_counts, work, dx, stream);
  EK_RETURN_IF_ERROR(GemmGrouped(true, 1.0, work.dpre, weights.w_in, row_counts, 0.0, dx, stream));
  if (!shape.gated()) return absl::OkStatus();
  return GemmGrouped(true, 1.0, work.dgate, weights.w_gate, row_counts, 1.0, dx, stream);
}

}  // namespace evenkeel::moe
