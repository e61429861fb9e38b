// How the rows of a value lie in memory.
//
// Rows of a padded value nest lanes, sources, experts and slots in some order, outermost first. Most steps only change
// that nesting, not the bytes: an all-gather over TP puts lanes outermost, an exchange turns the outermost experts into
// sources, a slice is a view of the own lane where lanes are outermost. Rows of a ragged value follow the same tags,
// with as many slots as there are rows. Half way through an exchange by levels a nesting says how the rows of one block
// lie; blocks are ordered by (node of the source, local index of the destination).
#ifndef EVENKEEL_MOE_ROW_NESTING_H_
#define EVENKEEL_MOE_ROW_NESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_sizes.h"

namespace evenkeel::moe {

enum class RowTag : uint8_t { kLane, kSource, kExpert, kSlot, kChunk };
// Outermost first; without kLane when the value is sliced over TP, without kSource at the source; with kChunk where all
// chunks of an order with chunks lie together.
using RowNesting = std::vector<RowTag>;

// Whether, without, and behind the given level.
bool Holds(const RowNesting& nesting, RowTag tag);
RowNesting Without(RowNesting nesting, RowTag tag);
RowNesting InFront(RowTag tag, RowNesting nesting);
// The nesting in which each expert's rows are contiguous.
RowNesting Grouped(const RowNesting& nesting);
// How a value lies that enters or leaves a program as rows: by expert at the source, as it arrived at the experts.
RowNesting Customary(const ValueType& type);
// "lane,source,expert,slot".
std::string NestingName(const RowNesting& nesting);

// Extents of the tags of a padded value.
struct RowExtents {
  int64_t lanes = 1, sources = 1;
  int64_t experts = 1;  // of one chunk, the largest where they differ; local ones at the experts
  int64_t slots = 1;    // c / T
  int64_t chunks = 1;
  // With kChunk: experts of a rank in each chunk, where they differ. An expert's place in its rank and chunk is its
  // number modulo the largest of them.
  std::vector<int64_t> chunk_experts = {};

  int64_t of(RowTag tag) const;
};

// Of one chunk's value, or of all chunks together.
RowExtents ExtentsOf(const ValueType& type, const OrderSizes& sizes, int chunk);

// True when only tags of extent 1 change their place.
bool SameRows(const RowNesting& from, const RowNesting& to, const RowExtents& extents);

// For each row in nesting `to`, its number in nesting `from`. Both hold the same tags.
std::vector<int32_t> PermutationIndex(const RowNesting& from, const RowNesting& to, const RowExtents& extents);

// Blocks of `counts` rows, [outer][inner]: for each row in the order [inner][outer] its number in the order
// [outer][inner]; with `back`, the inverse.
std::vector<int32_t> BlockTransposeIndex(absl::Span<const int64_t> counts, int64_t inner, bool back);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROW_NESTING_H_
