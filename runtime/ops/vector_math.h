// exp and what follows from it, written in f32 so that a compiler vectorizes loops over them and every machine gives
// the same bits, which the C library's functions do not promise (f64 uses them). Private to runtime/ops.
#ifndef EVENKEEL_RUNTIME_OPS_VECTOR_MATH_H_
#define EVENKEEL_RUNTIME_OPS_VECTOR_MATH_H_

#include <bit>
#include <cmath>
#include <cstdint>

// Before a loop whose iterations touch distinct elements, though outputs may coincide with inputs.
#if defined(__clang__)
#define EK_INDEPENDENT_LOOP
#else
#define EK_INDEPENDENT_LOOP _Pragma("GCC ivdep")
#endif

// On a kernel: one version per vector width, chosen when the program starts. All give the same bits, because nothing
// is contracted or reordered. Sanitizers cannot be initialised that early, clang 14 lacks the attribute's values.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define EK_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EK_VECTOR_CLONES
#endif

namespace evenkeel::ops_internal {

// e^x within 2 ulp (tested against double). NaN stays NaN, overflow gives infinity, underflow goes through the
// subnormal numbers to zero.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7 (the next term is below 2^-27); the factor
// 2^n is applied as two factors, so that neither overflows nor vanishes alone.
inline float Exp(float x) {
  constexpr float kLog2E = 0x1.715476p+0f;
  constexpr float kLn2High = 0x1.62e4p-1f;      // few bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7f7d1cp-20f;    // ln 2 - kLn2High
  constexpr float kRound = 0x1.8p23f;           // adding it rounds to an integer, kept in the low bits
  const float low = x < -110.0f ? -110.0f : x;  // NaN passes
  const float clamped = low > 100.0f ? 100.0f : low;
  const float shifted = clamped * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  const int32_t exponent = static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const int32_t half = exponent >> 1;
  const float first = std::bit_cast<float>((static_cast<uint32_t>(half) + 127u) << 23);
  const float second = std::bit_cast<float>((static_cast<uint32_t>(exponent - half) + 127u) << 23);
  return (p + 1.0f) * first * second;
}
inline double Exp(double x) { return std::exp(x); }

// 1 / (1 + e^-x).
template <typename W>
inline W Sigmoid(W x) {
  return W{1} / (W{1} + Exp(-x));
}

}  // namespace evenkeel::ops_internal

#endif  // EVENKEEL_RUNTIME_OPS_VECTOR_MATH_H_
