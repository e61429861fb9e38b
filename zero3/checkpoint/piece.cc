#include "evenkeel/zero3/checkpoint/piece.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

// One dimension of two boxes side by side.
struct Extent {
  int64_t source_offset, source_size;
  int64_t target_offset, target_size;
  int64_t begin, end;  // the intersection, global

  bool is_full_in_both() const {
    return begin == source_offset && begin == target_offset && end - begin == source_size && end - begin == target_size;
  }
};

// The dimensions of the intersection, with trailing dimensions that both boxes hold whole folded into the one before:
// what is contiguous in both becomes one run. Empty `extents` stands for one element.
bool Intersect(const Piece& source, const Piece& target, std::vector<Extent>* extents) {
  for (size_t i = 0; i < source.offset.size(); ++i) {
    const int64_t begin = std::max(source.offset[i], target.offset[i]);
    const int64_t end = std::min(source.offset[i] + source.shape[i], target.offset[i] + target.shape[i]);
    if (begin >= end) return false;
    extents->push_back({source.offset[i], source.shape[i], target.offset[i], target.shape[i], begin, end});
  }
  while (extents->size() >= 2 && extents->back().is_full_in_both()) {
    const int64_t size = extents->back().source_size;
    extents->pop_back();
    Extent& outer = extents->back();
    for (int64_t* value : {&outer.source_offset, &outer.source_size, &outer.target_offset, &outer.target_size,
                           &outer.begin, &outer.end}) {
      *value *= size;
    }
  }
  return true;
}

// Clips a run to both ranges and hands it on.
void EmitRun(const Piece& source, const Piece& target, int64_t from, int64_t to, int64_t count,
             absl::FunctionRef<void(int64_t, int64_t, int64_t)> fn) {
  const int64_t skip = std::max({int64_t{0}, source.begin - from, target.begin - to});
  const int64_t stop = std::min({count, source.end - from, target.end - to});
  if (skip < stop) fn(from + skip - source.begin, to + skip - target.begin, stop - skip);
}

}  // namespace

Piece WholePiece(absl::Span<const int64_t> shape) {
  Piece piece;
  piece.offset.assign(shape.size(), 0);
  piece.shape.assign(shape.begin(), shape.end());
  piece.end = 1;
  for (int64_t extent : shape) piece.end *= extent;
  return piece;
}

absl::Status ValidatePiece(const Piece& piece, absl::Span<const int64_t> global_shape, const std::string& what) {
  auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": piece ", PieceName(piece), " of a tensor of shape [",
                                                   absl::StrJoin(global_shape, ", "), "]: ", why));
  };
  if (piece.offset.size() != global_shape.size() || piece.shape.size() != global_shape.size()) {
    return bad("another number of dimensions");
  }
  int64_t elements = 1;
  for (size_t i = 0; i < global_shape.size(); ++i) {
    if (global_shape[i] < 0 || piece.offset[i] < 0 || piece.shape[i] < 0) return bad("a negative number");
    if (piece.offset[i] > global_shape[i] || piece.shape[i] > global_shape[i] - piece.offset[i]) {
      return bad("outside the tensor");
    }
    const absl::StatusOr<int64_t> product = CheckedMul(elements, piece.shape[i]);
    if (!product.ok()) return bad("overflow");
    elements = *product;
  }
  if (piece.begin < 0 || piece.begin > piece.end || piece.end > elements) return bad("range outside the box");
  return absl::OkStatus();
}

void ForEachCommonRun(const Piece& source, const Piece& target,
                      absl::FunctionRef<void(int64_t from, int64_t to, int64_t count)> fn) {
  if (source.num_elements() == 0 || target.num_elements() == 0) return;
  std::vector<Extent> extents;
  if (!Intersect(source, target, &extents)) return;
  if (extents.empty()) return EmitRun(source, target, 0, 0, 1, fn);
  const Extent inner = extents.back();
  extents.pop_back();
  std::vector<int64_t> at;  // global index of the current row in each outer dimension
  for (const Extent& extent : extents) at.push_back(extent.begin);
  while (true) {
    int64_t from = 0, to = 0;
    for (size_t i = 0; i < extents.size(); ++i) {
      from = from * extents[i].source_size + at[i] - extents[i].source_offset;
      to = to * extents[i].target_size + at[i] - extents[i].target_offset;
    }
    from = from * inner.source_size + inner.begin - inner.source_offset;
    to = to * inner.target_size + inner.begin - inner.target_offset;
    EmitRun(source, target, from, to, inner.end - inner.begin, fn);
    int i = static_cast<int>(extents.size()) - 1;
    while (i >= 0 && ++at[i] == extents[i].end) {
      at[i] = extents[i].begin;
      --i;
    }
    if (i < 0) return;
  }
}

absl::Status CheckCover(absl::Span<const int64_t> global_shape, absl::Span<const Piece> pieces,
                        const std::string& what) {
  const Piece whole = WholePiece(global_shape);
  std::vector<std::pair<int64_t, int64_t>> runs;  // global [begin, end)
  for (const Piece& piece : pieces) {
    ForEachCommonRun(piece, whole, [&runs](int64_t, int64_t to, int64_t count) { runs.push_back({to, to + count}); });
  }
  std::sort(runs.begin(), runs.end());
  int64_t at = 0;
  for (const auto& [begin, end] : runs) {
    if (begin != at) {
      return absl::DataLossError(
          absl::StrCat(what, ": element ", std::min(begin, at), begin > at ? " is in no shard" : " is in two shards"));
    }
    at = end;
  }
  if (at != whole.end) return absl::DataLossError(absl::StrCat(what, ": element ", at, " is in no shard"));
  return absl::OkStatus();
}

std::string PieceName(const Piece& piece) {
  // Names pieces that were refused, too: no number here may be trusted.
  std::string text = "[";
  int64_t elements = 1;
  bool overflow = false;
  for (size_t i = 0; i < piece.shape.size(); ++i) {
    const int64_t offset = i < piece.offset.size() ? piece.offset[i] : 0;
    int64_t end = 0;
    absl::StrAppend(&text, i == 0 ? "" : ", ", offset, ":");
    if (__builtin_add_overflow(offset, piece.shape[i], &end)) {
      absl::StrAppend(&text, offset, "+", piece.shape[i]);
    } else {
      absl::StrAppend(&text, end);
    }
    overflow = __builtin_mul_overflow(elements, piece.shape[i], &elements) || overflow;
  }
  text += "]";
  if (overflow || piece.begin != 0 || piece.end != elements) absl::StrAppend(&text, "@", piece.begin, ":", piece.end);
  return text;
}

}  // namespace evenkeel::zero3
