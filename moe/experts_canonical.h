// The experts in canonical numerics: the same bits for every TP and EP size.
//
// Two sums depend on the layout: over the middle columns (F is sliced over TP lanes) and over the sources of an
// expert's rows (EP). Here both are cut finer than any layout does, into kCanonicalBlocks column blocks and one block
// per source, and added up in the tree that the communicators continue over lanes and replicas. So the sums of a T, E
// run are the same tree for all powers of two, and products have one shape per block, whatever the layout. It costs
// copies of column blocks, smaller products, and ExpertWork::scratch (canonical_blocks.h has the formulas).
#ifndef EVENKEEL_MOE_EXPERTS_CANONICAL_H_
#define EVENKEEL_MOE_EXPERTS_CANONICAL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// InvalidArgument when `shape` cannot be canonical: 16 bits (partial sums would be rounded between lanes), columns that
// are not cut evenly, a TP size that does not divide kCanonicalBlocks.
absl::Status CheckCanonical(const ExpertShape& shape);

// As ExpertsRecompute, ExpertsForward and ExpertsBackward, which call these where the shape says so.
absl::Status CanonicalRecompute(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                                absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream);
// y from the activated middle.
absl::Status CanonicalOutput(const ExpertShape& shape, const ExpertWeights& weights,
                             absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView y,
                             Stream& stream);
// Adds in' * dout to dw, by column block and source. Which of the two is the middle: in [rows, h], dout [rows, f] give
// dw [le, h, f] (false) or dw [le, f, h] (true).
absl::Status CanonicalWeightGradient(const ExpertShape& shape, bool middle_is_in, ConstTensorView in,
                                     ConstTensorView dout, absl::Span<const int64_t> row_counts,
                                     absl::Span<const int64_t> positions, const ExpertWork& work, TensorView dw,
                                     Stream& stream);
// dbias [le, n] += sums of the rows of dy, by source.
absl::Status CanonicalBiasGradient(ConstTensorView dy, absl::Span<const int64_t> row_counts,
                                   absl::Span<const int64_t> positions, const ExpertWork& work, TensorView dbias,
                                   Stream& stream);
// The gradient of the middle: work.hidden = dy * w_out'.
absl::Status CanonicalMiddleGradient(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView dy,
                                     absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream);
// dx = work.dpre * w_in' (+ work.dgate * w_gate').
absl::Status CanonicalInputGradient(const ExpertShape& shape, const ExpertWeights& weights,
                                    absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView dx,
                                    Stream& stream);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXPERTS_CANONICAL_H_
