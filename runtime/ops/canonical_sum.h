// Sums over positions in the canonical order: blocks of 128 positions, then the canonical binary tree over block
// numbers (a range splits at the largest power of two below its length). Private to runtime/ops.
//
// The tree is the one over all block numbers 0, 1, 2, .. with empty branches left out, so neither how many blocks
// there are nor which of them are empty changes a bit. (Zeros could only change -0 to +0: users add the total to
// something, or add +0 to it.)
#ifndef EVENKEEL_RUNTIME_OPS_CANONICAL_SUM_H_
#define EVENKEEL_RUNTIME_OPS_CANONICAL_SUM_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/ops/op_support.h"

namespace evenkeel::ops_internal {

inline constexpr int64_t kBlockPositions = 128;

// Positions of `rows` rows: as many as rows (or none at all), strictly increasing, not negative.
absl::Status CheckPositions(absl::string_view op, absl::Span<const int64_t> positions, int64_t rows);

// Position of row i; an empty list means i.
inline int64_t PositionOf(absl::Span<const int64_t> positions, int64_t i) {
  return positions.empty() ? i : positions[i];
}

// Calls f(block, begin, end) for each block number that has rows, with its rows [begin, end), in rising order.
template <typename F>
void ForEachBlock(absl::Span<const int64_t> positions, int64_t rows, F&& f) {
  for (int64_t begin = 0, end = 0; begin < rows; begin = end) {
    const int64_t block = PositionOf(positions, begin) / kBlockPositions;
    while (end < rows && PositionOf(positions, end) / kBlockPositions == block) ++end;
    f(block, begin, end);
  }
}

// The tree sum of vectors, one per block number, handed in with rising numbers. Keeps its memory for the next sum.
// Not thread-safe.
template <typename W>
class CanonicalSum {
 public:
  void Start(int64_t size) {
    size_ = size;
    depth_ = 0;
  }
  // Room for the vector of the next block; the caller fills all of it. `block` is above all earlier ones.
  W* Next(int64_t block) {
    while (depth_ >= 2 && Level(depth_ - 2, nodes_[depth_ - 1].block) < Level(depth_ - 1, block)) Merge();
    if (depth_ == static_cast<int64_t>(nodes_.size())) nodes_.emplace_back();
    Node& node = nodes_[depth_++];
    node.block = block;
    if (static_cast<int64_t>(node.sum.size()) < size_) node.sum.resize(size_);
    return node.sum.data();
  }
  // The total, valid until the next Start; null when no block was handed in.
  const W* Finish() {
    while (depth_ >= 2) Merge();
    return depth_ == 0 ? nullptr : nodes_[0].sum.data();
  }

 private:
  struct Node {
    int64_t block = 0;  // the latest block in it
    std::vector<W> sum;
  };

  // How far up the tree the node and a later block meet.
  int Level(int64_t node, int64_t block) const {
    return std::bit_width(static_cast<uint64_t>(nodes_[node].block ^ block));
  }
  void Merge() {
    Node& left = nodes_[depth_ - 2];
    const Node& right = nodes_[depth_ - 1];
    for (int64_t i = 0; i < size_; ++i) left.sum[i] += right.sum[i];
    left.block = right.block;
    --depth_;
  }

  int64_t size_ = 0;
  int64_t depth_ = 0;
  std::vector<Node> nodes_;
};

// total[j] += sum over rows i of term(i, j), rows in canonical order, j < n. Each term is a Wide<D>.
template <typename D, typename Term>
void AddCanonicalRowSum(int64_t rows, int64_t n, absl::Span<const int64_t> positions, D* total, Term&& term) {
  using W = Wide<D>;
  static thread_local CanonicalSum<W> tree;
  tree.Start(n);
  ForEachBlock(positions, rows, [&](int64_t block, int64_t begin, int64_t end) {
    W* sum = tree.Next(block);
    for (int64_t j = 0; j < n; ++j) sum[j] = 0;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) sum[j] += term(i, j);
    }
  });
  const W* sum = tree.Finish();
  if (sum == nullptr) return;
  for (int64_t j = 0; j < n; ++j) total[j] = Store<D>(Load(total[j]) + sum[j]);
}

}  // namespace evenkeel::ops_internal

#endif  // EVENKEEL_RUNTIME_OPS_CANONICAL_SUM_H_
