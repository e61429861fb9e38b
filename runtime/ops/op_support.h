// What the launchers of this folder share: checks that name the numbers, and dispatch over element types.
// Private to runtime/ops.
//
//   EK_RETURN_IF_ERROR(CheckShape("GeluForward", "y", y, x.shape()));
//   return DispatchFloat("GeluForward", x, [&](auto tag) { using T = decltype(tag); ... });
#ifndef EVENKEEL_RUNTIME_OPS_OP_SUPPORT_H_
#define EVENKEEL_RUNTIME_OPS_OP_SUPPORT_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::ops_internal {

// "f32 [3, 4]".
std::string Describe(const ConstTensorView& view);
// InvalidArgument "`op`: `what`".
absl::Status BadArgument(absl::string_view op, absl::string_view what);
// `view` must have this shape, dtype, or rank; otherwise InvalidArgument naming what it has and what is wanted.
absl::Status CheckShape(absl::string_view op, absl::string_view name, const ConstTensorView& view, const Shape& wanted);
absl::Status CheckDType(absl::string_view op, absl::string_view name, const ConstTensorView& view, DType wanted);
absl::Status CheckRank(absl::string_view op, absl::string_view name, const ConstTensorView& view, int wanted);
// Shape and dtype of `like`.
absl::Status CheckLike(absl::string_view op, absl::string_view name, const ConstTensorView& view,
                       const ConstTensorView& like);
// f32, f64, bf16 or f16.
absl::Status CheckFloat(absl::string_view op, absl::string_view name, const ConstTensorView& view);

// The type that values of T are computed and summed in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
inline Wide<T> Load(T value) {
  return static_cast<Wide<T>>(value);
}
template <typename T>
inline T Store(Wide<T> value) {
  return static_cast<T>(value);
}

// Calls f(T()) for the element type of `view`, f32, f64, bf16 or f16, and returns its status.
template <typename F>
absl::Status DispatchFloat(absl::string_view op, const ConstTensorView& view, F&& f) {
  switch (view.dtype()) {
    case DType::kF32:
      return f(float{});
    case DType::kF64:
      return f(double{});
    case DType::kBF16:
      return f(BF16{});
    case DType::kF16:
      return f(F16{});
    default:
      return BadArgument(op, "elements must be f32, f64, bf16 or f16, not " + std::string(DTypeName(view.dtype())));
  }
}

// Calls f(T(), float()) for the 16-bit element type of `view`; only where IsHalf(view.dtype()).
template <typename F>
absl::Status DispatchHalf(const ConstTensorView& view, F&& f) {
  return view.dtype() == DType::kF16 ? f(F16{}, float{}) : f(BF16{}, float{});
}

// Where the canonical binary tree splits a range of `length` > 1: at the largest power of two below it.
constexpr int64_t CanonicalSplit(int64_t length) {
  int64_t half = 1;
  while (half * 2 < length) half *= 2;
  return half;
}

// Sum of count addends in one fixed order that a compiler may vectorize: eight interleaved partial sums, then
// ((0+4)+(2+6)) + ((1+5)+(3+7)). term(i) is called once for each i.
template <typename W, typename Term>
inline W LaneSum(int64_t count, Term&& term) {
  W lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int64_t j = 0; j < 8; ++j) lane[j] += term(i + j);
  }
  for (int64_t j = 0; i < count; ++i, ++j) lane[j] += term(i);
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

}  // namespace evenkeel::ops_internal

#endif  // EVENKEEL_RUNTIME_OPS_OP_SUPPORT_H_
