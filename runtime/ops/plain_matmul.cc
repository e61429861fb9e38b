// The plain matrix product: tiles of 4 rows by 128 bytes of columns kept in registers, one sum per element in the
// order of k. Bits depend on nothing else, so any tiling and any vector width give the same.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "evenkeel/runtime/ops/matmul.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel::ops_internal {
namespace {

template <typename T>
struct Vector {
  typedef T Type __attribute__((vector_size(64), may_alias));
  static constexpr int64_t kLanes = 64 / sizeof(T);
  static constexpr int64_t kPanel = 2 * kLanes;  // columns of a tile
};

// op(a) row by row: element (i, p) is a[i * row + p * depth]; op(b): element (p, j) is b[p * depth + j * column].
template <typename T>
struct Strided {
  const T* data;
  int64_t outer;
  int64_t inner;
  const T& at(int64_t i, int64_t j) const { return data[i * outer + j * inner]; }
};

// Columns [begin, begin + width) of op(b), packed to k rows of kPanel elements, zero behind `width`.
template <typename T>
void PackPanel(const Strided<T>& b, int64_t k, int64_t begin, int64_t width, T* panel) {
  for (int64_t p = 0; p < k; ++p, panel += Vector<T>::kPanel) {
    for (int64_t j = 0; j < width; ++j) panel[j] = b.at(p, begin + j);
    for (int64_t j = width; j < Vector<T>::kPanel; ++j) panel[j] = 0;
  }
}

// Rows [i, i + kRows) of one panel of c.
template <int kRows, typename T>
__attribute__((always_inline)) inline void Tile(const Strided<T>& a, int64_t i, int64_t k, const T* panel,
                                                int64_t width, T* c, int64_t n) {
  using V = typename Vector<T>::Type;
  V sum[kRows][2];
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = V{};
  for (int64_t p = 0; p < k; ++p) {
    const V* b = reinterpret_cast<const V*>(panel + p * Vector<T>::kPanel);
    for (int r = 0; r < kRows; ++r) {
      const T factor = a.at(i + r, p);
      sum[r][0] += factor * b[0];
      sum[r][1] += factor * b[1];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(c + (i + r) * n, sum[r], static_cast<size_t>(width) * sizeof(T));
  }
}

template <typename T>
__attribute__((always_inline)) inline void Multiply(const MatmulShape& shape, const T* a_data, const T* b_data, T* c,
                                                    T* panel) {
  const int64_t m = shape.m, n = shape.n, k = shape.k;
  const Strided<T> a = shape.transpose_a ? Strided<T>{a_data, 1, m} : Strided<T>{a_data, k, 1};
  const Strided<T> b = shape.transpose_b ? Strided<T>{b_data, 1, k} : Strided<T>{b_data, n, 1};
  for (int64_t begin = 0; begin < n; begin += Vector<T>::kPanel) {
    const int64_t width = std::min(Vector<T>::kPanel, n - begin);
    PackPanel(b, k, begin, width, panel);
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) Tile<4>(a, i, k, panel, width, c + begin, n);
    for (; i < m; ++i) Tile<1>(a, i, k, panel, width, c + begin, n);
  }
}

// 64-byte aligned memory for one packed panel; kept by the thread for its next call.
template <typename T>
T* PanelScratch(int64_t k) {
  static thread_local std::vector<std::byte> memory;
  const size_t wanted = static_cast<size_t>(k * Vector<T>::kPanel) * sizeof(T) + 64;
  if (memory.size() < wanted) memory.resize(wanted);
  const uintptr_t address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63};
  return reinterpret_cast<T*>(address);
}

EK_VECTOR_CLONES void MultiplyF32(const MatmulShape& shape, const float* a, const float* b, float* c, float* panel) {
  Multiply(shape, a, b, c, panel);
}

EK_VECTOR_CLONES void MultiplyF64(const MatmulShape& shape, const double* a, const double* b, double* c,
                                  double* panel) {
  Multiply(shape, a, b, c, panel);
}

}  // namespace

void PlainMatmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
  MultiplyF32(shape, a, b, c, PanelScratch<float>(shape.k));
}

void PlainMatmul(const MatmulShape& shape, const double* a, const double* b, double* c) {
  MultiplyF64(shape, a, b, c, PanelScratch<double>(shape.k));
}

}  // namespace evenkeel::ops_internal
