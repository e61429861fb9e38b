// Activation functions, elementwise, forward and backward.
//
//   EK_RETURN_IF_ERROR(GeluForward(x, y, stream));
//   EK_RETURN_IF_ERROR(GeluBackward(x, dy, dx, stream));     // x is the forward's input
//
// One dtype and shape for all arguments of a call: f32, f64, bf16 or f16 (16-bit ones computed in f32, rounded once).
// Outputs may coincide with an input of the same call, any other overlap is not allowed. An element's result depends on
// that element alone. NaN stays NaN. InvalidArgument when shapes or dtypes differ.
#ifndef EVENKEEL_RUNTIME_OPS_ACTIVATION_H_
#define EVENKEEL_RUNTIME_OPS_ACTIVATION_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form of GELU (Hendrycks and Gimpel, "Gaussian
// error linear units", arXiv:1606.08415, section 2), computed as x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).
absl::Status GeluForward(ConstTensorView x, TensorView y, Stream& stream);
// dx = dy * gelu'(x).
absl::Status GeluBackward(ConstTensorView x, ConstTensorView dy, TensorView dx, Stream& stream);

// y = x * sigmoid(x) (SiLU; arXiv:1606.08415 section 2, arXiv:1702.03118).
absl::Status SiluForward(ConstTensorView x, TensorView y, Stream& stream);
// dx = dy * silu'(x).
absl::Status SiluBackward(ConstTensorView x, ConstTensorView dy, TensorView dx, Stream& stream);

// y = silu(gate) * up, the gated part of SwiGLU (Shazeer, "GLU variants improve transformer", arXiv:2002.05202).
absl::Status SwiGluForward(ConstTensorView gate, ConstTensorView up, TensorView y, Stream& stream);
// dgate = dy * up * silu'(gate), dup = dy * silu(gate). dgate and dup must not coincide with each other.
absl::Status SwiGluBackward(ConstTensorView gate, ConstTensorView up, ConstTensorView dy, TensorView dgate,
                            TensorView dup, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_ACTIVATION_H_
