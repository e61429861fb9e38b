// Pieces of a global tensor, and the runs of elements that two pieces share: resharding as pure arithmetic.
//
// A piece is what one rank holds: a box of the global tensor (its TP lane's and EP rank's part), and of that box's
// elements in row-major order the range that the rank owns as a ZeRO shard. Any layout is a set of pieces, so loading
// at another layout is copying the common runs.
//
//   ForEachCommonRun(saved, wanted, [&](int64_t from, int64_t to, int64_t count) { ... });
//
// Everything here is a pure function. Extents are in elements.
#ifndef EVENKEEL_ZERO3_CHECKPOINT_PIECE_H_
#define EVENKEEL_ZERO3_CHECKPOINT_PIECE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"

namespace evenkeel::zero3 {

struct Piece {
  std::vector<int64_t> offset;  // of the box in the global tensor
  std::vector<int64_t> shape;   // of the box; as many extents as offset
  int64_t begin = 0;            // elements [begin, end) of the box, row-major
  int64_t end = 0;

  int64_t num_elements() const { return end - begin; }
  friend bool operator==(const Piece&, const Piece&) = default;
};

// The whole of a tensor of this shape.
Piece WholePiece(absl::Span<const int64_t> shape);

// InvalidArgument naming `what` and the numbers: a box outside the global shape, a range outside the box, overflow.
absl::Status ValidatePiece(const Piece& piece, absl::Span<const int64_t> global_shape, const std::string& what);

// Calls fn(from, to, count) for every maximal run that is contiguous in both pieces: elements from .. from + count - 1
// of `source` (counted from source.begin) are elements to .. of `target` (counted from target.begin). Both pieces are
// valid for the same global shape. Runs come in ascending order of `to`.
void ForEachCommonRun(const Piece& source, const Piece& target,
                      absl::FunctionRef<void(int64_t from, int64_t to, int64_t count)> fn);

// OK when the pieces cover every element of the global tensor exactly once; DataLoss naming `what`, the first element
// that is missing or doubled otherwise.
absl::Status CheckCover(absl::Span<const int64_t> global_shape, absl::Span<const Piece> pieces,
                        const std::string& what);

// "[2:4, 0:64]" of the box; with "@begin:end" when the range is not the whole box.
std::string PieceName(const Piece& piece);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_PIECE_H_
