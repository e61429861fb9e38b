#include "evenkeel/runtime/ops/norm.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/canonical_sum.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::AddCanonicalRowSum;
using ops_internal::BadArgument;
using ops_internal::CheckDType;
using ops_internal::CheckLike;
using ops_internal::CheckRank;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::DispatchHalf;
using ops_internal::LaneSum;
using ops_internal::Load;
using ops_internal::Store;
using ops_internal::Wide;

template <typename T>
void ForwardKernel(const T* x, const T* weight, Wide<T> epsilon, T* y, Wide<T>* inverse_rms, int64_t rows, int64_t n) {
  using W = Wide<T>;
  for (int64_t i = 0; i < rows; ++i, x += n, y += n) {
    const W squares = LaneSum<W>(n, [x](int64_t j) { return Load(x[j]) * Load(x[j]); });
    const W scale = W{1} / std::sqrt(squares / static_cast<W>(n) + epsilon);
    inverse_rms[i] = scale;
    EK_INDEPENDENT_LOOP
    for (int64_t j = 0; j < n; ++j) y[j] = Store<T>(Load(x[j]) * scale * Load(weight[j]));
  }
}

// With g = dy * weight and r = inverse_rms: dx = r (g - x r^2 mean(g x)).
template <typename T>
void InputGradientKernel(const T* x, const T* weight, const Wide<T>* inverse_rms, const T* dy, T* dx, int64_t rows,
                         int64_t n) {
  using W = Wide<T>;
  for (int64_t i = 0; i < rows; ++i, x += n, dy += n, dx += n) {
    const W r = inverse_rms[i];
    const W dot = LaneSum<W>(n, [=](int64_t j) { return Load(dy[j]) * Load(weight[j]) * Load(x[j]); });
    const W pull = r * r * (dot / static_cast<W>(n));
    EK_INDEPENDENT_LOOP
    for (int64_t j = 0; j < n; ++j) dx[j] = Store<T>(r * (Load(dy[j]) * Load(weight[j]) - Load(x[j]) * pull));
  }
}

template <typename T, typename D>
absl::Status LaunchBackward(ConstTensorView x, ConstTensorView weight, ConstTensorView inverse_rms, ConstTensorView dy,
                            TensorView dx, TensorView dweight, Stream& stream) {
  using W = Wide<T>;
  return stream.Launch([x = x.data<T>(), weight = weight.data<T>(), inverse_rms = inverse_rms.data<W>(),
                        dy = dy.data<T>(), dx = dx.data<T>(), dweight = dweight.data<D>(), rows = x.shape().dim(0),
                        n = x.shape().dim(1)] {
    // First, because dx may coincide with dy.
    AddCanonicalRowSum(rows, n, /*positions=*/{}, dweight,
                       [=](int64_t i, int64_t j) { return Load(dy[i * n + j]) * Load(x[i * n + j]) * inverse_rms[i]; });
    InputGradientKernel(x, weight, inverse_rms, dy, dx, rows, n);
    return absl::OkStatus();
  });
}

absl::Status CheckCommon(absl::string_view op, ConstTensorView x, ConstTensorView weight, ConstTensorView inverse_rms) {
  EK_RETURN_IF_ERROR(CheckRank(op, "x", x, 2));
  EK_RETURN_IF_ERROR(CheckDType(op, "weight", weight, x.dtype()));
  EK_RETURN_IF_ERROR(CheckShape(op, "weight", weight, {x.shape().dim(1)}));
  EK_RETURN_IF_ERROR(CheckDType(op, "inverse_rms", inverse_rms, WideDType(x.dtype())));
  EK_RETURN_IF_ERROR(CheckShape(op, "inverse_rms", inverse_rms, {x.shape().dim(0)}));
  if (x.shape().dim(1) < 1 && x.shape().dim(0) > 0) {
    return BadArgument(op, absl::StrCat("x is ", x.shape().ToString(), ", its rows are empty"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RmsNormForward(ConstTensorView x, ConstTensorView weight, double epsilon, TensorView y,
                            TensorView inverse_rms, Stream& stream) {
  static constexpr char kOp[] = "RmsNormForward";
  EK_RETURN_IF_ERROR(CheckCommon(kOp, x, weight, inverse_rms));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "y", y, x));
  if (!(epsilon >= 0)) return BadArgument(kOp, absl::StrCat("epsilon is ", epsilon, ", it must be >= 0"));
  return DispatchFloat(kOp, x, [&](auto tag) {
    using T = decltype(tag);
    using W = Wide<T>;
    return stream.Launch([x = x.data<T>(), weight = weight.data<T>(), epsilon = static_cast<W>(epsilon),
                          y = y.data<T>(), inverse_rms = inverse_rms.data<W>(), rows = x.shape().dim(0),
                          n = x.shape().dim(1)] {
      ForwardKernel(x, weight, epsilon, y, inverse_rms, rows, n);
      return absl::OkStatus();
    });
  });
}

absl::Status RmsNormBackward(ConstTensorView x, ConstTensorView weight, ConstTensorView inverse_rms, ConstTensorView dy,
                             TensorView dx, TensorView dweight, Stream& stream) {
  static constexpr char kOp[] = "RmsNormBackward";
  EK_RETURN_IF_ERROR(CheckCommon(kOp, x, weight, inverse_rms));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dy", dy, x));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dx", dx, x));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "dweight", dweight, weight.shape()));
  if (IsHalf(x.dtype()) && dweight.dtype() == DType::kF32) {
    return DispatchHalf(x, [&](auto element, auto wide) {
      return LaunchBackward<decltype(element), decltype(wide)>(x, weight, inverse_rms, dy, dx, dweight, stream);
    });
  }
  EK_RETURN_IF_ERROR(CheckDType(kOp, "dweight", dweight, x.dtype()));
  return DispatchFloat(kOp, x, [&](auto tag) {
    return LaunchBackward<decltype(tag), decltype(tag)>(x, weight, inverse_rms, dy, dx, dweight, stream);
  });
}

}  // namespace evenkeel
