// The one way ranks' values are combined: a fixed binary tree over the group rank.
//
// A range of ranks is split at the largest power of two below its length:
//   3 ranks: (0 1) 2      4: (0 1)(2 3)      5: ((0 1)(2 3)) 4      6: ((0 1)(2 3)) (4 5)      7: ((0 1)(2 3)) ((4 5)
//   6)
// 16-bit inputs are widened to f32, combined in f32 and rounded once at the root. kAvg divides at the root, before
// rounding. Integers wrap around. In max and min NaN wins, +0 is above -0. So the result depends on the inputs and
// their ranks only, never on backend, chunking or timing.
//
//   const void* sources[] = {a, b, c};
//   ReduceCanonical(DType::kF32, ReduceOp::kSum, sources, out, n);
#ifndef EVENKEEL_COMM_REDUCTION_H_
#define EVENKEEL_COMM_REDUCTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

// The largest power of two below `length`; length >= 2.
int CanonicalSplit(int length);

// InvalidArgument when `op` is unknown or not offered for `dtype` (kBitOr on floating types, kAvg on integers).
absl::Status CheckReduction(DType dtype, ReduceOp op);

// out[i] = op over sources[r][i], r in tree order; n elements each. `out` may be exactly one of the sources, any other
// overlap is undefined. Sources and out need the alignment of the dtype only by their use: any byte address works.
// At least one source; CheckReduction(dtype, op) must be OK. One source is copied (kAvg of one rank is the value).
void ReduceCanonical(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* out, int64_t n);

// The same in two steps, for trees whose subtrees are reduced in different places. Partial results are accumulators:
// f32 for 16-bit types, else the dtype itself, AccumulatorBytes each. kAvg sums in both and divides by `num_ranks`, the
// number of leaves of the whole tree, in the second.
int64_t AccumulatorBytes(DType dtype);
void ReduceToPartial(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* partial, int64_t n);
void ReducePartials(DType dtype, ReduceOp op, absl::Span<const void* const> partials, int num_ranks, void* out,
                    int64_t n);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_REDUCTION_H_
