#include "evenkeel/runtime/ops/elementwise.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::CheckLike;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::DispatchHalf;
using ops_internal::Load;
using ops_internal::Store;
using ops_internal::Wide;

template <typename T, typename F>
void Map(const T* a, const T* b, T* out, int64_t n, F f) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) out[i] = Store<T>(f(Load(a[i]), Load(b[i])));
}

template <typename T, typename F>
absl::Status LaunchBinary(ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream, F f) {
  return stream.Launch([a = a.data<T>(), b = b.data<T>(), out = out.data<T>(), n = out.num_elements(), f] {
    Map(a, b, out, n, f);
    return absl::OkStatus();
  });
}

template <typename F>
absl::Status Binary(absl::string_view op, ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream, F f) {
  EK_RETURN_IF_ERROR(CheckLike(op, "b", b, a));
  EK_RETURN_IF_ERROR(CheckLike(op, "out", out, a));
  return DispatchFloat(op, a, [&](auto tag) { return LaunchBinary<decltype(tag)>(a, b, out, stream, f); });
}

template <typename X, typename Y>
void AxpyKernel(Wide<Y> alpha, const X* x, Y* y, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) y[i] = Store<Y>(Load(y[i]) + alpha * static_cast<Wide<Y>>(Load(x[i])));
}

template <typename X, typename Y>
absl::Status LaunchAxpy(double alpha, ConstTensorView x, TensorView y, Stream& stream) {
  return stream.Launch([alpha = static_cast<Wide<Y>>(alpha), x = x.data<X>(), y = y.data<Y>(), n = y.num_elements()] {
    AxpyKernel(alpha, x, y, n);
    return absl::OkStatus();
  });
}

// Rounds a double to 16 bits once. Rounding to f32 first could round twice, so the float is made "round to odd": then
// its last bit says that something was cut off, and the second rounding decides rightly.
template <typename To>
To RoundOnce(double value) {
  const float nearest = static_cast<float>(value);
  if (std::isnan(nearest) || static_cast<double>(nearest) == value || std::isinf(nearest)) return To(nearest);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  if ((bits & 1u) == 0) {
    const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(value);
    bits = away ? bits - 1 : bits + 1;
  }
  return To(std::bit_cast<float>(bits));
}

template <typename From, typename To>
To Convert(From value) {
  if constexpr (std::is_same_v<From, double> && sizeof(To) == 2) {
    return RoundOnce<To>(value);
  } else {
    return static_cast<To>(static_cast<Wide<To>>(Load(value)));
  }
}

template <typename From, typename To>
absl::Status LaunchCast(ConstTensorView x, TensorView out, Stream& stream) {
  return stream.Launch([x = x.data<From>(), out = out.data<To>(), n = out.num_elements()] {
    if constexpr (std::is_same_v<From, To>) {
      if (n > 0 && x != out) std::memcpy(out, x, static_cast<size_t>(n) * sizeof(To));
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = Convert<From, To>(x[i]);
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status Add(ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream) {
  return Binary("Add", a, b, out, stream, [](auto u, auto v) { return u + v; });
}

absl::Status Multiply(ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream) {
  return Binary("Multiply", a, b, out, stream, [](auto u, auto v) { return u * v; });
}

absl::Status Axpy(double alpha, ConstTensorView x, TensorView y, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckShape("Axpy", "y", y, x.shape()));
  if (IsHalf(x.dtype()) && y.dtype() == DType::kF32) {
    return DispatchHalf(
        x, [&](auto from, auto to) { return LaunchAxpy<decltype(from), decltype(to)>(alpha, x, y, stream); });
  }
  EK_RETURN_IF_ERROR(CheckLike("Axpy", "y", y, x));
  return DispatchFloat("Axpy", x,
                       [&](auto tag) { return LaunchAxpy<decltype(tag), decltype(tag)>(alpha, x, y, stream); });
}

absl::Status Scale(double alpha, ConstTensorView x, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckLike("Scale", "out", out, x));
  return DispatchFloat("Scale", x, [&](auto tag) {
    using T = decltype(tag);
    const auto factor = static_cast<Wide<T>>(alpha);
    return LaunchBinary<T>(x, x, out, stream, [factor](Wide<T> u, Wide<T>) { return factor * u; });
  });
}

absl::Status FillElements(double value, TensorView out, Stream& stream) {
  return DispatchFloat("FillElements", out, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([out = out.data<T>(), n = out.num_elements(), element = Convert<double, T>(value)] {
      for (int64_t i = 0; i < n; ++i) out[i] = element;
      return absl::OkStatus();
    });
  });
}

absl::Status Cast(ConstTensorView x, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckShape("Cast", "out", out, x.shape()));
  return DispatchFloat("Cast", x, [&](auto from) {
    return DispatchFloat("Cast", out,
                         [&](auto to) { return LaunchCast<decltype(from), decltype(to)>(x, out, stream); });
  });
}

}  // namespace evenkeel
