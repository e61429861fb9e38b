// Elementwise arithmetic and conversion.
//
//   EK_RETURN_IF_ERROR(Add(x, residual, x, stream));            // in place
//   EK_RETURN_IF_ERROR(Cast(master_f32, parameter_bf16, stream));
//
// Shapes are equal; dtypes are equal unless said otherwise: f32, f64, bf16 or f16 (16-bit ones computed in f32, rounded
// once). Outputs may coincide with an input of the same dtype, any other overlap is not allowed. InvalidArgument
// otherwise.
#ifndef EVENKEEL_RUNTIME_OPS_ELEMENTWISE_H_
#define EVENKEEL_RUNTIME_OPS_ELEMENTWISE_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// out = a + b.
absl::Status Add(ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream);
// out = a * b.
absl::Status Multiply(ConstTensorView a, ConstTensorView b, TensorView out, Stream& stream);
// y += alpha * x; the product is rounded before the sum. y may be f32 where x is bf16 or f16.
absl::Status Axpy(double alpha, ConstTensorView x, TensorView y, Stream& stream);
// out = alpha * x.
absl::Status Scale(double alpha, ConstTensorView x, TensorView out, Stream& stream);
// Every element of out = value, converted to its dtype.
absl::Status FillElements(double value, TensorView out, Stream& stream);
// out = x converted to out's dtype (any two of f32, f64, bf16, f16; equal ones copy). Rounds to nearest even, once:
// f64 to 16 bits goes straight, not by way of f32. Beyond the range of f16: infinity.
absl::Status Cast(ConstTensorView x, TensorView out, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_ELEMENTWISE_H_
