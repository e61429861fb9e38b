// Sums of rows by key in one fixed binary tree, so that a sum may be split over ranks without changing a bit.
//
//   TreeSumRows(rows, lists, out, stream);    // out[i] = sum over lists' entries of weight * rows[entry], tree over
//   keys
#ifndef EVENKEEL_MOE_TREE_SUM_H_
#define EVENKEEL_MOE_TREE_SUM_H_

#include "absl/status/status.h"
#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// out[i, :] = sum of weights[i, j] * source[rows[i, j], :] (weights of 1 where there are none). A key range splits at
// the largest power of two below its length, empty halves are skipped, so the sum over a subrange that is a node of
// the tree may be taken first, elsewhere. No entry: exactly zero.
// source: [m, n] f32, f64, bf16 or f16; out: [lists.outputs(), n] of the same dtype, or f32 where the source has 16
// bits, or 16 bits where it is f32. Sums are in f32 (f64 for f64), rounded once. `lists` outlives the work. Outputs
// must not overlap inputs. InvalidArgument when shapes or dtypes do not fit or an entry is out of range.
absl::Status TreeSumRows(ConstTensorView source, const RowLists& lists, TensorView out, Stream& stream);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_TREE_SUM_H_
