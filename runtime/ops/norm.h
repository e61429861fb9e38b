// Root-mean-square normalisation of rows (Zhang and Sennrich, arXiv:1910.07467).
//
//   EK_RETURN_IF_ERROR(RmsNormForward(x, weight, 1e-5, y, inverse_rms, stream));
//   EK_RETURN_IF_ERROR(RmsNormBackward(x, weight, inverse_rms, dy, dx, dweight, stream));
//
// Dtypes: one for all of f32, f64, bf16, f16; but inverse_rms is f32 where x has 16 bits, and dweight may be. A row's
// result depends on that row alone; sums have one fixed order. InvalidArgument when shapes or dtypes do not fit.
#ifndef EVENKEEL_RUNTIME_OPS_NORM_H_
#define EVENKEEL_RUNTIME_OPS_NORM_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// inverse_rms[i] = 1 / sqrt(mean(x[i, :]^2) + epsilon); y[i, j] = x[i, j] * inverse_rms[i] * weight[j].
// x, y: [rows, n] (may coincide), weight: [n], inverse_rms: [rows]. epsilon >= 0; n >= 1 unless there are no rows.
absl::Status RmsNormForward(ConstTensorView x, ConstTensorView weight, double epsilon, TensorView y,
                            TensorView inverse_rms, Stream& stream);

// dx = the gradient of the input (overwritten; may coincide with dy); dweight[j] += sum over rows of
// dy[i, j] * x[i, j] * inverse_rms[i], rows in canonical order (see GemmWeightGradient).
absl::Status RmsNormBackward(ConstTensorView x, ConstTensorView weight, ConstTensorView inverse_rms, ConstTensorView dy,
                             TensorView dx, TensorView dweight, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_NORM_H_
