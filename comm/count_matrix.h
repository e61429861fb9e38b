// The counts of the v-collectives: totals with checked arithmetic, and row against column before bytes move.
//
// In all_to_all_v rank i tells rows [send_counts | recv_counts] of 2 * size numbers. The matrix of all rows is
// consistent when what i sends to j is what j expects from i, for all i and j.
#ifndef EVENKEEL_COMM_COUNT_MATRIX_H_
#define EVENKEEL_COMM_COUNT_MATRIX_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/fingerprint.h"

namespace evenkeel::comm {

// Offsets of blocks laid back to back: size() + 1 numbers, the last one is the total. InvalidArgument naming the index
// when a count is negative or a sum passes 2^63 - 1.
absl::StatusOr<std::vector<int64_t>> OffsetsOf(absl::Span<const int64_t> counts);

// Compares the all_to_all_v rows of `size` ranks: rows has size * 2 * size numbers, rank-major, send_counts first.
// Nothing when consistent, else the first pairs (at most 8) with both numbers. Pure.
std::optional<Disagreement> FindCountMismatch(absl::Span<const int64_t> rows, int size);

// Compares counts vectors that must be equal on all ranks: the first `size` numbers of each row of `stride` numbers.
// Nothing when equal, else the first index that differs and what each rank has.
std::optional<Disagreement> FindCountsDifference(absl::Span<const int64_t> rows, int stride, int size);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_COUNT_MATRIX_H_
