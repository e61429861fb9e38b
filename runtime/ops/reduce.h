// Whole-tensor reductions with one fixed order.
//
//   EK_RETURN_IF_ERROR(SumOfSquares(shard, norm_squared, stream));   // norm_squared: [1] f64
#ifndef EVENKEEL_RUNTIME_OPS_REDUCE_H_
#define EVENKEEL_RUNTIME_OPS_REDUCE_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// out[0] = sum of x^2 with double accumulators. x: any shape of f32, f64, bf16 or f16; out: [1] f64. Blocks of 1024
// elements are summed first (8 interleaved partial sums), then the block sums by the canonical binary tree (a range
// splits at the largest power of two below its length); zeros appended at the end change no bit.
absl::Status SumOfSquares(ConstTensorView x, TensorView out, Stream& stream);

// out[0] = sum of x, in the same order and precision.
absl::Status Sum(ConstTensorView x, TensorView out, Stream& stream);

// out[0] = 1 when every element is finite (true for no elements), else 0. out: [1] i32.
absl::Status AllFinite(ConstTensorView x, TensorView out, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_REDUCE_H_
