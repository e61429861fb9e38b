// How canonical numerics cut sums, and the scratch memory that takes. Pure.
//
// The middle of an expert is cut into kCanonicalBlocks column blocks, whatever the TP size; an expert's rows into one
// piece per source (a data-parallel replica of the EP group). Each piece is summed on its own and the pieces by the
// canonical tree, which the communicators' tree continues over lanes and over EDP.
#ifndef EVENKEEL_MOE_CANONICAL_BLOCKS_H_
#define EVENKEEL_MOE_CANONICAL_BLOCKS_H_

#include <algorithm>
#include <cstdint>

namespace evenkeel::moe {

inline constexpr int kCanonicalBlocks = 8;

// Rows of ragged orders without a capacity stand at replica * kDroplessPositions + slot.
inline constexpr int64_t kDroplessPositions = int64_t{1} << 31;

// Sums that wait while `leaves` of them are added depth first along the tree: ceil(log2(leaves)).
constexpr int64_t TreeLevels(int64_t leaves) {
  int64_t levels = 0;
  while ((int64_t{1} << levels) < leaves) ++levels;
  return levels;
}

// The extents of one rank's experts that decide the scratch.
struct CanonicalExtents {
  int64_t rows = 0;  // the most rows that one expert may have
  int64_t hidden = 0;
  int64_t ffn = 0;      // this rank's columns
  int64_t blocks = 1;   // this rank's column blocks
  int64_t sources = 1;  // pieces of an expert's rows
};

// Elements of ExpertWork::scratch for a forward, and for a backward (recomputing the middle included).
constexpr int64_t CanonicalForwardScratch(const CanonicalExtents& x) {
  const int64_t width = x.ffn / x.blocks;
  const int64_t middle = x.hidden * width + x.rows * width;
  const int64_t output = x.rows * width + TreeLevels(x.blocks) * x.rows * x.hidden;
  return std::max(middle, output);
}
constexpr int64_t CanonicalBackwardScratch(const CanonicalExtents& x) {
  const int64_t width = x.ffn / x.blocks;
  const int64_t matrix = x.hidden * width;
  const int64_t middle = matrix + x.rows * width;
  const int64_t weights = x.rows * width + matrix * (1 + std::max<int64_t>(1, TreeLevels(x.sources)));
  const int64_t biases = std::max(x.hidden, x.ffn) * (1 + TreeLevels(x.sources));
  const int64_t input = x.rows * width + matrix + TreeLevels(x.blocks) * x.rows * x.hidden;
  return std::max({middle, weights, biases, input});
}

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_CANONICAL_BLOCKS_H_
