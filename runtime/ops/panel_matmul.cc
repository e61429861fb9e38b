// The matrix product for few rows: B passes through memory once, and its trip is hidden behind the arithmetic.
//
// The library copies B, 64 columns at a time, before it multiplies. With few rows per matrix, as experts have them,
// that copy takes as long as the products. Here, while the rows are multiplied with one panel of 64 columns, the next
// panel is copied into the other of two buffers, a row of it every few steps; so the copy costs nearly nothing, and
// all tiles but the first read B from the second-level cache, whatever power of two its rows are apart.
//
// Bits: an element is the sum over blocks of k, in order, of one fused sum each in the order of k. Blocks are those of
// the library (oneDNN 2.6, "brg"), so that both give the same bits; library_matmul.cc tries that for each shape.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "evenkeel/runtime/ops/matmul.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace evenkeel::ops_internal {

#if defined(__x86_64__)
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kVectors = 4;                // of a panel's row
constexpr int64_t kPanel = kVectors * kLanes;  // columns
constexpr int64_t kTileRows = 6;               // 6 x 4 sums, a row of B and a factor fill the 32 registers
constexpr int64_t kShortBlock = 512;           // of k, where k is at most kShortest
constexpr int64_t kLongBlock = 1024;           // otherwise
constexpr int64_t kShortest = 1024;
constexpr int64_t kPrefetchRows = 8;

// A matrix part row by row; rows are `ld` elements apart.
struct Rows {
  const float* data = nullptr;
  int64_t ld = 0;
};

// Rows of the next panel to copy while a tile is multiplied.
struct CopyAhead {
  Rows from;
  float* to = nullptr;  // kPanel elements per row
  int64_t rows = 0;
};

// sum += a b over steps [begin, end).
template <int kRows>
__attribute__((target("avx512f"), always_inline)) inline void Steps(int64_t begin, int64_t end, const Rows& a,
                                                                    const Rows& b, __m512 (&sum)[kRows][kVectors]) {
  for (int64_t p = begin; p < end; ++p) {
    __m512 row[kVectors];
    for (int64_t j = 0; j < kVectors; ++j) row[j] = _mm512_loadu_ps(b.data + p * b.ld + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(a.data[r * a.ld + p]);
      for (int64_t j = 0; j < kVectors; ++j) sum[r][j] = _mm512_fmadd_ps(factor, row[j], sum[r][j]);
    }
  }
}

// c (+)= a b for kRows rows, `depth` steps and one panel of columns.
template <int kRows>
__attribute__((target("avx512f"))) void Tile(int64_t depth, const Rows& a, const Rows& b, const CopyAhead& ahead,
                                             float* c, int64_t ldc, bool add) {
  __m512 sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kVectors; ++j) sum[r][j] = _mm512_setzero_ps();
  }
  int64_t done = 0;
  for (int64_t i = 0; i < ahead.rows; ++i) {
    const float* from = ahead.from.data + i * ahead.from.ld;
    const float* soon = ahead.from.data + std::min(i + kPrefetchRows, ahead.rows - 1) * ahead.from.ld;
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      _mm_prefetch(soon + j, _MM_HINT_T0);
      _mm512_storeu_ps(ahead.to + i * kPanel + j, _mm512_loadu_ps(from + j));
    }
    const int64_t next = depth * (i + 1) / ahead.rows;
    Steps<kRows>(done, next, a, b, sum);
    done = next;
  }
  Steps<kRows>(done, depth, a, b, sum);
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kVectors; ++j) {
      float* out = c + r * ldc + j * kLanes;
      _mm512_storeu_ps(out, add ? _mm512_add_ps(_mm512_loadu_ps(out), sum[r][j]) : sum[r][j]);
    }
  }
}

void AnyTile(int64_t rows, int64_t depth, const Rows& a, const Rows& b, const CopyAhead& ahead, float* c, int64_t ldc,
             bool add) {
  constexpr decltype(&Tile<1>) kTiles[kTileRows] = {Tile<1>, Tile<2>, Tile<3>, Tile<4>, Tile<5>, Tile<6>};
  kTiles[rows - 1](depth, a, b, ahead, c, ldc, add);
}

// One block of k of one panel of columns.
struct Panel {
  int64_t first_column = 0;
  int64_t first_step = 0;
  int64_t depth = 0;
};

// Panels in the order in which they are multiplied: the blocks of k of the first columns, of the next, ...
class Panels {
 public:
  explicit Panels(const MatmulShape& shape)
      : k_(shape.k),
        block_(shape.k <= kShortest ? kShortBlock : kLongBlock),
        blocks_((shape.k + block_ - 1) / block_),
        count_(shape.n / kPanel * blocks_) {}
  int64_t count() const { return count_; }
  Panel operator[](int64_t i) const {
    const int64_t first_step = i % blocks_ * block_;
    return {i / blocks_ * kPanel, first_step, std::min(block_, k_ - first_step)};
  }

 private:
  const int64_t k_, block_, blocks_, count_;
};

// Two panels' room on a cache line's boundary; kept by the thread for its next call.
float* PanelBuffers() {
  constexpr size_t kBytes = 2 * kLongBlock * kPanel * sizeof(float);
  static thread_local std::unique_ptr<std::byte[]> memory;
  if (memory == nullptr) memory = std::make_unique<std::byte[]>(kBytes + 64);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
}

}  // namespace

bool PanelMultiplies(const MatmulShape& shape) {
  static const bool has_vectors = __builtin_cpu_supports("avx512f");
  return has_vectors && !shape.transpose_a && !shape.transpose_b && shape.n % kPanel == 0;
}

void PanelMatmul(const MatmulShape& shape, const float* a, const float* b, float* c) {
  const int64_t tiles = (shape.m + kTileRows - 1) / kTileRows;
  const bool copies = tiles > 1;  // a single tile reads each row of B once
  const Panels panels(shape);
  const auto source = [&](const Panel& panel) {
    return Rows{b + panel.first_step * shape.n + panel.first_column, shape.n};
  };
  float* current = PanelBuffers();
  float* next = current + kLongBlock * kPanel;
  if (copies) {
    const Rows first = source(panels[0]);
    for (int64_t p = 0; p < panels[0].depth; ++p) {
      std::memcpy(current + p * kPanel, first.data + p * first.ld, kPanel * sizeof(float));
    }
  }
  for (int64_t i = 0; i < panels.count(); ++i) {
    const Panel panel = panels[i];
    const Panel coming = copies && i + 1 < panels.count() ? panels[i + 1] : Panel{};
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = shape.m * t / tiles, end = shape.m * (t + 1) / tiles;
      const int64_t copied = coming.depth * t / tiles, copied_end = coming.depth * (t + 1) / tiles;
      CopyAhead ahead{source(coming), next + copied * kPanel, copied_end - copied};
      ahead.from.data += copied * shape.n;
      AnyTile(end - row, panel.depth, {a + row * shape.k + panel.first_step, shape.k},
              copies ? Rows{current, kPanel} : source(panel), ahead, c + row * shape.n + panel.first_column, shape.n,
              panel.first_step > 0);
    }
    std::swap(current, next);
  }
}

#else

bool PanelMultiplies(const MatmulShape&) { return false; }
void PanelMatmul(const MatmulShape& shape, const float* a, const float* b, float* c) { PlainMatmul(shape, a, b, c); }

#endif

}  // namespace evenkeel::ops_internal
