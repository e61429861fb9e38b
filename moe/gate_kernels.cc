#include "evenkeel/moe/gate_kernels.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"

#define EK_ALWAYS_INLINE inline __attribute__((always_inline))

namespace evenkeel::moe {
namespace {

constexpr int64_t kLanes = 16;        // partial sums of a dot product, whatever the machine's vectors are
constexpr int64_t kTokenBlock = 128;  // the block of the canonical sum over tokens

// Sixteen floats; one, two or four machine vectors. Never passed by value between functions.
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

EK_ALWAYS_INLINE void Load(const float* from, Vector* to) { std::memcpy(to, from, sizeof(Vector)); }
EK_ALWAYS_INLINE void Store(const Vector& from, float* to) { std::memcpy(to, &from, sizeof(Vector)); }

EK_ALWAYS_INLINE float SumLanes(const Vector& v) {
  float lane[kLanes];
  Store(v, lane);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// out[r, c] = <a[r], b[c]> over n elements, n a multiple of kLanes. The tile size has no influence on the bits.
template <int kRows, int kColumns>
EK_ALWAYS_INLINE void DotTile(const float* a, const float* b, int64_t n, float* out, int64_t out_stride) {
  Vector sum[kRows][kColumns] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    Vector right[kColumns];
    for (int c = 0; c < kColumns; ++c) Load(b + c * n + i, &right[c]);
    for (int r = 0; r < kRows; ++r) {
      Vector left;
      Load(a + r * n + i, &left);
      for (int c = 0; c < kColumns; ++c) sum[r][c] += left * right[c];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) out[r * out_stride + c] = SumLanes(sum[r][c]);
  }
}

// All dot products of `rows` rows of a with `columns` rows of b.
template <int kRows, int kColumns>
EK_ALWAYS_INLINE void DotAll(const float* a, int64_t rows, const float* b, int64_t columns, int64_t n, float* out) {
  for (int64_t r = 0; r < rows;) {
    const bool full_rows = rows - r >= kRows;
    for (int64_t c = 0; c < columns;) {
      const bool full_columns = columns - c >= kColumns;
      float* tile = out + r * columns + c;
      if (full_rows && full_columns) {
        DotTile<kRows, kColumns>(a + r * n, b + c * n, n, tile, columns);
      } else if (full_columns) {
        DotTile<1, kColumns>(a + r * n, b + c * n, n, tile, columns);
      } else if (full_rows) {
        DotTile<kRows, 1>(a + r * n, b + c * n, n, tile, columns);
      } else {
        DotTile<1, 1>(a + r * n, b + c * n, n, tile, columns);
      }
      c += full_columns ? kColumns : 1;
    }
    r += full_rows ? kRows : 1;
  }
}

// Coefficients of a sum of rows: the one for output row r and step i is data[r * row_stride + i * step_stride].
struct Coefficients {
  const float* data;
  int64_t row_stride;
  int64_t step_stride;
};

// out[r, :] = sum over i = 0, 1, .. of coefficient(r, i) * b[i, :], for a tile of kRows rows and kColumns vectors.
template <int kRows, int kColumns>
EK_ALWAYS_INLINE void WeightedSumTile(const Coefficients& a, const float* b, int64_t steps, int64_t n, float* out) {
  Vector sum[kRows][kColumns] = {};
  for (int64_t i = 0; i < steps; ++i) {
    Vector right[kColumns];
    for (int c = 0; c < kColumns; ++c) Load(b + i * n + c * kLanes, &right[c]);
    for (int r = 0; r < kRows; ++r) {
      const float factor = a.data[r * a.row_stride + i * a.step_stride];
      for (int c = 0; c < kColumns; ++c) sum[r][c] += right[c] * factor;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) Store(sum[r][c], out + r * n + c * kLanes);
  }
}

template <int kRows, int kColumns>
EK_ALWAYS_INLINE void WeightedSumAll(const Coefficients& a, int64_t rows, const float* b, int64_t steps, int64_t n,
                                     float* out) {
  for (int64_t r = 0; r < rows;) {
    const bool full_rows = rows - r >= kRows;
    const Coefficients tile{a.data + r * a.row_stride, a.row_stride, a.step_stride};
    for (int64_t c = 0; c < n;) {
      const bool full_columns = n - c >= kColumns * kLanes;
      if (full_rows && full_columns) {
        WeightedSumTile<kRows, kColumns>(tile, b + c, steps, n, out + r * n + c);
      } else if (full_rows) {
        WeightedSumTile<kRows, 1>(tile, b + c, steps, n, out + r * n + c);
      } else if (full_columns) {
        WeightedSumTile<1, kColumns>(tile, b + c, steps, n, out + r * n + c);
      } else {
        WeightedSumTile<1, 1>(tile, b + c, steps, n, out + r * n + c);
      }
      c += full_columns ? kColumns * kLanes : kLanes;
    }
    r += full_rows ? kRows : 1;
  }
}

// The same source compiled for the widest vectors of the machine; tiles fill the registers there are.
#if defined(__x86_64__)
__attribute__((target("avx512f"))) void DotAvx512(const float* a, int64_t rows, const float* b, int64_t columns,
                                                  int64_t n, float* out) {
  DotAll<4, 4>(a, rows, b, columns, n, out);
}
__attribute__((target("avx2"))) void DotAvx2(const float* a, int64_t rows, const float* b, int64_t columns, int64_t n,
                                             float* out) {
  DotAll<2, 2>(a, rows, b, columns, n, out);
}
__attribute__((target("avx512f"))) void WeightedSumAvx512(const Coefficients& a, int64_t rows, const float* b,
                                                          int64_t steps, int64_t n, float* out) {
  WeightedSumAll<8, 2>(a, rows, b, steps, n, out);
}
__attribute__((target("avx2"))) void WeightedSumAvx2(const Coefficients& a, int64_t rows, const float* b, int64_t steps,
                                                     int64_t n, float* out) {
  WeightedSumAll<4, 1>(a, rows, b, steps, n, out);
}
#endif

void Dot(const float* a, int64_t rows, const float* b, int64_t columns, int64_t n, float* out) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return DotAvx512(a, rows, b, columns, n, out);
  if (__builtin_cpu_supports("avx2")) return DotAvx2(a, rows, b, columns, n, out);
#endif
  DotAll<1, 2>(a, rows, b, columns, n, out);
}

void WeightedSum(const Coefficients& a, int64_t rows, const float* b, int64_t steps, int64_t n, float* out) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return WeightedSumAvx512(a, rows, b, steps, n, out);
  if (__builtin_cpu_supports("avx2")) return WeightedSumAvx2(a, rows, b, steps, n, out);
#endif
  WeightedSumAll<2, 1>(a, rows, b, steps, n, out);
}

template <typename T>
void RowsToFloat(const T* from, int64_t rows, int64_t n, int64_t padded, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) to[r * padded + i] = static_cast<float>(from[r * n + i]);
    std::fill(to + r * padded + n, to + (r + 1) * padded, 0.0f);
  }
}

// Rows [begin, begin + rows) of a matrix as f32, each padded with zeros to `padded` elements.
void LoadRows(const ConstTensorView& matrix, int64_t begin, int64_t rows, int64_t padded, float* to) {
  const int64_t n = matrix.shape().dim(1);
  switch (matrix.dtype()) {
    case DType::kF32:
      return RowsToFloat(matrix.data<float>() + begin * n, rows, n, padded, to);
    case DType::kBF16:
      return RowsToFloat(matrix.data<BF16>() + begin * n, rows, n, padded, to);
    case DType::kF16:
      return RowsToFloat(matrix.data<F16>() + begin * n, rows, n, padded, to);
    case DType::kF64:
      return RowsToFloat(matrix.data<double>() + begin * n, rows, n, padded, to);
    default:
      EK_CHECK(false);
  }
}

template <typename T, typename Wide>
void AddFloatRows(const float* from, int64_t rows, int64_t n, int64_t padded, T* to) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      to[r * n + i] = static_cast<T>(static_cast<Wide>(to[r * n + i]) + static_cast<Wide>(from[r * padded + i]));
    }
  }
}

void AddRows(const float* from, int64_t begin, int64_t rows, int64_t padded, const TensorView& matrix) {
  const int64_t n = matrix.shape().dim(1);
  switch (matrix.dtype()) {
    case DType::kF32:
      return AddFloatRows<float, float>(from, rows, n, padded, matrix.data<float>() + begin * n);
    case DType::kBF16:
      return AddFloatRows<BF16, float>(from, rows, n, padded, matrix.data<BF16>() + begin * n);
    case DType::kF16:
      return AddFloatRows<F16, float>(from, rows, n, padded, matrix.data<F16>() + begin * n);
    case DType::kF64:
      return AddFloatRows<double, double>(from, rows, n, padded, matrix.data<double>() + begin * n);
    default:
      EK_CHECK(false);
  }
}

void ApplyJitter(const Jitter& jitter, int64_t begin, int64_t rows, int64_t n, int64_t padded, float* values) {
  if (jitter.width == 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const float u = jitter.stream.Uniform(static_cast<uint64_t>((begin + r) * n + i));
      values[r * padded + i] *= 1.0f + jitter.width * (2.0f * u - 1.0f);
    }
  }
}

int64_t PadToLanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Sums equally long vectors that come one by one along the canonical tree (split at the largest power of two below the
// length) while holding only one pending sum per tree level.
class TreeSum {
 public:
  void Add(std::vector<float> leaf) {
    ++count_;
    for (int64_t bit = count_; bit % 2 == 0; bit /= 2) {
      AddInto(pending_.back(), &leaf);
      pending_.pop_back();
    }
    pending_.push_back(std::move(leaf));
  }
  // Empty when nothing was added.
  std::vector<float> Finish() {
    if (pending_.empty()) return {};
    std::vector<float> total = std::move(pending_.back());
    pending_.pop_back();
    for (; !pending_.empty(); pending_.pop_back()) AddInto(pending_.back(), &total);
    return total;
  }

 private:
  // right = left + right
  static void AddInto(const std::vector<float>& left, std::vector<float>* right) {
    for (size_t i = 0; i < left.size(); ++i) (*right)[i] = left[i] + (*right)[i];
  }
  int64_t count_ = 0;
  std::vector<std::vector<float>> pending_;
};

}  // namespace

void GateLogits(ConstTensorView x, ConstTensorView gate, const Jitter& jitter, float* logits) {
  const int64_t tokens = x.shape().dim(0);
  const int64_t hidden = x.shape().dim(1);
  const int64_t experts = gate.shape().dim(0);
  const int64_t padded = PadToLanes(hidden);
  std::vector<float> gate_rows(experts * padded);
  LoadRows(gate, 0, experts, padded, gate_rows.data());
  std::vector<float> block(kTokenBlock * padded);
  for (int64_t begin = 0; begin < tokens; begin += kTokenBlock) {
    const int64_t rows = std::min(kTokenBlock, tokens - begin);
    LoadRows(x, begin, rows, padded, block.data());
    ApplyJitter(jitter, begin, rows, hidden, padded, block.data());
    Dot(block.data(), rows, gate_rows.data(), experts, padded, logits + begin * experts);
  }
}

void GateBackward(ConstTensorView x, ConstTensorView gate, const Jitter& jitter, const float* dlogits, TensorView dx,
                  TensorView dgate) {
  const int64_t tokens = x.shape().dim(0);
  const int64_t hidden = x.shape().dim(1);
  const int64_t experts = gate.shape().dim(0);
  const int64_t padded = PadToLanes(hidden);
  std::vector<float> gate_rows(experts * padded);
  LoadRows(gate, 0, experts, padded, gate_rows.data());
  std::vector<float> block(kTokenBlock * padded);
  TreeSum dgate_sum;
  for (int64_t begin = 0; begin < tokens; begin += kTokenBlock) {
    const int64_t rows = std::min(kTokenBlock, tokens - begin);
    const float* block_dlogits = dlogits + begin * experts;
    LoadRows(x, begin, rows, padded, block.data());
    ApplyJitter(jitter, begin, rows, hidden, padded, block.data());
    std::vector<float> partial(experts * padded);
    WeightedSum({block_dlogits, 1, experts}, experts, block.data(), rows, padded, partial.data());
    dgate_sum.Add(std::move(partial));

    WeightedSum({block_dlogits, experts, 1}, rows, gate_rows.data(), experts, padded, block.data());
    ApplyJitter(jitter, begin, rows, hidden, padded, block.data());
    AddRows(block.data(), begin, rows, padded, dx);
  }
  const std::vector<float> total = dgate_sum.Finish();
  if (!total.empty()) AddRows(total.data(), 0, experts, padded, dgate);
}

}  // namespace evenkeel::moe
