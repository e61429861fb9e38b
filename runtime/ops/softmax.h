// Row softmax and cross entropy.
//
//   EK_RETURN_IF_ERROR(CrossEntropyForward(logits, targets, num_tokens, probabilities, loss, stream));
//   EK_RETURN_IF_ERROR(CrossEntropyBackward(probabilities, targets, num_tokens, dlogits, stream));
//
// Matrices are [rows, n], one dtype per call: f32, f64, bf16 or f16 (16-bit ones computed in f32). A row's result
// depends on that row alone; sums have one fixed order. Outputs may coincide with an input of the same shape.
// InvalidArgument when shapes or dtypes do not fit.
#ifndef EVENKEEL_RUNTIME_OPS_SOFTMAX_H_
#define EVENKEEL_RUNTIME_OPS_SOFTMAX_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// y[i, j] = exp(x[i, j] - max_i) / sum_j exp(x[i, j] - max_i). n >= 1 unless there are no rows. A row that holds
// NaN or +infinity becomes NaN.
absl::Status SoftmaxForward(ConstTensorView x, TensorView y, Stream& stream);
// dx[i, j] = y[i, j] * (dy[i, j] - sum_j dy[i, j] * y[i, j]), y being the forward's output.
absl::Status SoftmaxBackward(ConstTensorView y, ConstTensorView dy, TensorView dx, Stream& stream);

// probabilities = softmax(logits); loss[0] = sum over rows of -log probabilities[i, targets[i]], divided by
// `denominator` (> 0). The rows are added in order in double; loss: [1] f64. targets: [rows] i32; -1 leaves the row
// out. A target outside -1..n-1 is an InvalidArgument of the stream, naming the row.
absl::Status CrossEntropyForward(ConstTensorView logits, ConstTensorView targets, double denominator,
                                 TensorView probabilities, TensorView loss, Stream& stream);
// dlogits[i, j] = (probabilities[i, j] - [j == targets[i]]) / denominator, zero in rows whose target is -1.
absl::Status CrossEntropyBackward(ConstTensorView probabilities, ConstTensorView targets, double denominator,
                                  TensorView dlogits, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_SOFTMAX_H_
