// The core of causal self-attention, plain and deterministic: softmax(q k' / sqrt(head_dim)) v per head.
//
//   const AttentionSizes sizes{.batch = b, .sequence = s, .heads = local_heads, .head_dim = d};
//   EK_RETURN_IF_ERROR(CausalAttentionForward(sizes, q, k, v, probabilities, out, stream));
//
// Token t of sequence b is row b * sequence + t; head a owns columns [a * head_dim, (a + 1) * head_dim). So the
// projections' outputs go in as they are, and a rank that owns some heads passes only their columns.
#ifndef EVENKEEL_RUNTIME_OPS_ATTENTION_H_
#define EVENKEEL_RUNTIME_OPS_ATTENTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

struct AttentionSizes {
  int64_t batch = 0;
  int64_t sequence = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
};

// q, k, v, out: [batch * sequence, heads * head_dim]; probabilities: [batch * heads, sequence, sequence], zero above
// the diagonal, saved for the backward. One dtype: f32, f64, bf16 or f16 (16-bit ones computed in f32). A head's result
// depends on that head and sequence alone. InvalidArgument when shapes or dtypes do not fit.
absl::Status CausalAttentionForward(const AttentionSizes& sizes, ConstTensorView q, ConstTensorView k,
                                    ConstTensorView v, TensorView probabilities, TensorView out, Stream& stream);

// dq, dk, dv (overwritten, shapes of q, k, v; they may not coincide with any input).
absl::Status CausalAttentionBackward(const AttentionSizes& sizes, ConstTensorView q, ConstTensorView k,
                                     ConstTensorView v, ConstTensorView probabilities, ConstTensorView dout,
                                     TensorView dq, TensorView dk, TensorView dv, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_ATTENTION_H_
