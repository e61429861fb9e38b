// The router's three matrix products, in one fixed order of summation.
//
// Unlike a GEMM library's, their bits depend on nothing but the inputs: not on the number of tokens, not on the CPU's
// instruction set, not on the compiler. A routing decision may hang on the last bit of a logit, so this matters here
// and nowhere else. Single-threaded.
//
//   logits[t, e] : 16 partial sums over hidden index mod 16, combined 8+8, 4+4, 2+2, 1+1
//   dx[t, i]     : over experts 0, 1, ..
//   dgate[e, i]  : over tokens in blocks of 128, token order inside a block, blocks combined by the canonical tree
#ifndef EVENKEEL_MOE_GATE_KERNELS_H_
#define EVENKEEL_MOE_GATE_KERNELS_H_

#include <cstdint>

#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// Multiplies element i of x (flat index) by a uniform number in [1 - width, 1 + width]. width 0: no jitter.
struct Jitter {
  float width = 0;
  PhiloxStream stream{PhiloxKey(0)};
};

// x: [s, h], gate: [e, h], each f32, bf16, f16 or f64 (rounded to f32 first); logits: [s, e], overwritten.
void GateLogits(ConstTensorView x, ConstTensorView gate, const Jitter& jitter, float* logits);

// dx [s, h] += dlogits * gate (times the jitter factors); dgate [e, h] += dlogits^T * x (x with jitter). dlogits: [s,
// e]. dx and dgate: f32, bf16, f16 or f64; each element is rounded once, after the sum.
void GateBackward(ConstTensorView x, ConstTensorView gate, const Jitter& jitter, const float* dlogits, TensorView dx,
                  TensorView dgate);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_GATE_KERNELS_H_
