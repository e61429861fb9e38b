#include "evenkeel/runtime/ops/activation.h"

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckLike;
using ops_internal::DispatchFloat;
using ops_internal::Load;
using ops_internal::Sigmoid;
using ops_internal::Store;
using ops_internal::Wide;

// 0.5 (1 + tanh(u)) == sigmoid(2 u), so GELU's tanh form is x * sigmoid(2 u) with 2 u = kScale (x + kCubic x^3).
constexpr double kScale = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double kCubic = 0.044715;

struct Gelu {
  template <typename W>
  W Value(W x) const {
    return x * Sigmoid(static_cast<W>(kScale) * (x + static_cast<W>(kCubic) * (x * x * x)));
  }
  // d/dx x s(v(x)) = s + x s (1 - s) v'.
  template <typename W>
  W Slope(W x) const {
    const W square = x * x;
    const W s = Sigmoid(static_cast<W>(kScale) * (x + static_cast<W>(kCubic) * (square * x)));
    const W inner = static_cast<W>(kScale) * (W{1} + static_cast<W>(3 * kCubic) * square);
    return s + x * (s * (W{1} - s)) * inner;
  }
};

struct Silu {
  template <typename W>
  W Value(W x) const {
    return x * Sigmoid(x);
  }
  template <typename W>
  W Slope(W x) const {
    const W s = Sigmoid(x);
    return s + x * (s * (W{1} - s));
  }
};

template <typename Activation, typename T>
EK_VECTOR_CLONES void ForwardKernel(const T* x, T* y, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) y[i] = Store<T>(Activation().Value(Load(x[i])));
}

template <typename Activation, typename T>
EK_VECTOR_CLONES void BackwardKernel(const T* x, const T* dy, T* dx, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) dx[i] = Store<T>(Load(dy[i]) * Activation().Slope(Load(x[i])));
}

template <typename T>
EK_VECTOR_CLONES void SwiGluKernel(const T* gate, const T* up, T* y, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) y[i] = Store<T>(Silu().Value(Load(gate[i])) * Load(up[i]));
}

template <typename T>
EK_VECTOR_CLONES void SwiGluBackwardKernel(const T* gate, const T* up, const T* dy, T* dgate, T* dup, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) {
    const Wide<T> g = Load(gate[i]), u = Load(up[i]), d = Load(dy[i]);
    dgate[i] = Store<T>(d * u * Silu().Slope(g));
    dup[i] = Store<T>(d * Silu().Value(g));
  }
}

template <typename Activation>
absl::Status Forward(absl::string_view op, ConstTensorView x, TensorView y, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckLike(op, "y", y, x));
  return DispatchFloat(op, x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([x = x.data<T>(), y = y.data<T>(), n = y.num_elements()] {
      ForwardKernel<Activation>(x, y, n);
      return absl::OkStatus();
    });
  });
}

template <typename Activation>
absl::Status Backward(absl::string_view op, ConstTensorView x, ConstTensorView dy, TensorView dx, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckLike(op, "dy", dy, x));
  EK_RETURN_IF_ERROR(CheckLike(op, "dx", dx, x));
  return DispatchFloat(op, x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([x = x.data<T>(), dy = dy.data<T>(), dx = dx.data<T>(), n = dx.num_elements()] {
      BackwardKernel<Activation>(x, dy, dx, n);
      return absl::OkStatus();
    });
  });
}

}  // namespace

absl::Status GeluForward(ConstTensorView x, TensorView y, Stream& stream) {
  return Forward<Gelu>("GeluForward", x, y, stream);
}

absl::Status GeluBackward(ConstTensorView x, ConstTensorView dy, TensorView dx, Stream& stream) {
  return Backward<Gelu>("GeluBackward", x, dy, dx, stream);
}

absl::Status SiluForward(ConstTensorView x, TensorView y, Stream& stream) {
  return Forward<Silu>("SiluForward", x, y, stream);
}

absl::Status SiluBackward(ConstTensorView x, ConstTensorView dy, TensorView dx, Stream& stream) {
  return Backward<Silu>("SiluBackward", x, dy, dx, stream);
}

absl::Status SwiGluForward(ConstTensorView gate, ConstTensorView up, TensorView y, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckLike("SwiGluForward", "up", up, gate));
  EK_RETURN_IF_ERROR(CheckLike("SwiGluForward", "y", y, gate));
  return DispatchFloat("SwiGluForward", gate, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([gate = gate.data<T>(), up = up.data<T>(), y = y.data<T>(), n = y.num_elements()] {
      SwiGluKernel(gate, up, y, n);
      return absl::OkStatus();
    });
  });
}

absl::Status SwiGluBackward(ConstTensorView gate, ConstTensorView up, ConstTensorView dy, TensorView dgate,
                            TensorView dup, Stream& stream) {
  static constexpr char kOp[] = "SwiGluBackward";
  EK_RETURN_IF_ERROR(CheckLike(kOp, "up", up, gate));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dy", dy, gate));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dgate", dgate, gate));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dup", dup, gate));
  if (dgate.raw() == dup.raw() && dup.num_elements() > 0) return BadArgument(kOp, "dgate and dup are the same memory");
  return DispatchFloat(kOp, gate, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([gate = gate.data<T>(), up = up.data<T>(), dy = dy.data<T>(), dgate = dgate.data<T>(),
                          dup = dup.data<T>(), n = dup.num_elements()] {
      SwiGluBackwardKernel(gate, up, dy, dgate, dup, n);
      return absl::OkStatus();
    });
  });
}

}  // namespace evenkeel
