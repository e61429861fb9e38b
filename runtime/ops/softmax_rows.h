// Softmax of one row, forward and backward, for softmax.cc and attention.cc. Private to runtime/ops.
#ifndef EVENKEEL_RUNTIME_OPS_SOFTMAX_ROWS_H_
#define EVENKEEL_RUNTIME_OPS_SOFTMAX_ROWS_H_

#include <cstdint>

#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel::ops_internal {

// The maximum, in eight lanes like LaneSum; NaN wins. n >= 1.
template <typename T>
__attribute__((always_inline)) inline Wide<T> RowMax(const T* x, int64_t n) {
  using W = Wide<T>;
  auto larger = [](W a, W b) { return a > b || a != a ? a : b; };
  W lane[8];
  for (int64_t j = 0; j < 8; ++j) lane[j] = Load(x[0]);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t j = 0; j < 8; ++j) lane[j] = larger(lane[j], Load(x[i + j]));
  }
  for (int64_t j = 0; i < n; ++i, ++j) lane[j] = larger(lane[j], Load(x[i]));
  for (int64_t j = 1; j < 8; ++j) lane[0] = larger(lane[0], lane[j]);
  return lane[0];
}

template <typename W>
struct RowTotals {
  W max;
  W sum;  // of exp(x - max)
};

// y = softmax(x) for one row; x and y may coincide; n >= 1.
template <typename T>
__attribute__((always_inline)) inline RowTotals<Wide<T>> SoftmaxRow(const T* x, T* y, int64_t n) {
  using W = Wide<T>;
  const W max = RowMax(x, n);
  W sum = 0;
  if constexpr (std::is_same_v<T, W>) {
    EK_INDEPENDENT_LOOP
    for (int64_t j = 0; j < n; ++j) y[j] = Exp(x[j] - max);
    sum = LaneSum<W>(n, [y](int64_t j) { return y[j]; });
    const W scale = W{1} / sum;
    EK_INDEPENDENT_LOOP
    for (int64_t j = 0; j < n; ++j) y[j] = y[j] * scale;
  } else {  // rounded once, so the exponentials are computed twice
    sum = LaneSum<W>(n, [x, max](int64_t j) { return Exp(Load(x[j]) - max); });
    const W scale = W{1} / sum;
    for (int64_t j = 0; j < n; ++j) y[j] = Store<T>(Exp(Load(x[j]) - max) * scale);
  }
  return {max, sum};
}

// dx = y (dy - <dy, y>) for one row; dx may coincide with dy or y.
template <typename T>
__attribute__((always_inline)) inline void SoftmaxRowBackward(const T* y, const T* dy, T* dx, int64_t n) {
  using W = Wide<T>;
  const W dot = LaneSum<W>(n, [y, dy](int64_t j) { return Load(dy[j]) * Load(y[j]); });
  EK_INDEPENDENT_LOOP
  for (int64_t j = 0; j < n; ++j) dx[j] = Store<T>(Load(y[j]) * (Load(dy[j]) - dot));
}

}  // namespace evenkeel::ops_internal

#endif  // EVENKEEL_RUNTIME_OPS_SOFTMAX_ROWS_H_
