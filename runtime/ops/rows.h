// Moving and summing rows by index: dispatch, combine, embedding and their adjoints.
//
//   EK_RETURN_IF_ERROR(GatherRows(x, token_of_slot, slots, stream));           // dispatch: -1 gives a zero row
//   EK_RETURN_IF_ERROR(CombineRows(slots, slot_of_route, weight, y, stream));  // y[t] = sum_j w[t, j] slots[.]
//   EK_RETURN_IF_ERROR(GatherSumRows(dslots, slot_of_route, dx, stream));      // adjoint of the dispatch
//
// Matrices are [rows, n] of one dtype per call: f32, f64, bf16 or f16 (16-bit ones summed in f32, rounded once per
// output). GatherRows takes every dtype. Indices are i32; -1 means "none". An index outside -1..rows-1 is an
// InvalidArgument of the stream, naming index and place. Sums run in the order of the index list. Outputs must not
// overlap inputs. InvalidArgument when shapes or dtypes do not fit.
#ifndef EVENKEEL_RUNTIME_OPS_ROWS_H_
#define EVENKEEL_RUNTIME_OPS_ROWS_H_

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// out[i, :] = source[indices[i], :], or zero where the index is -1. indices: [m], out: [m, n].
absl::Status GatherRows(ConstTensorView source, ConstTensorView indices, TensorView out, Stream& stream);

// destination[indices[i], :] += source[i, :] for i = 0, 1, ..; -1 is skipped. source: [m, n], indices: [m].
// destination may be f32 where source has 16 bits.
absl::Status ScatterAddRows(ConstTensorView source, ConstTensorView indices, TensorView destination, Stream& stream);

// out[t, :] = sum over j = 0, 1, .. of source[indices[t, j], :]; all -1 gives exactly zero. indices: [t, k].
absl::Status GatherSumRows(ConstTensorView source, ConstTensorView indices, TensorView out, Stream& stream);

// out[t, :] = sum over j = 0, 1, .. of weights[t, j] * source[indices[t, j], :]; all -1 gives exactly zero.
// indices, weights: [t, k]; weights are f32, or f64 where the rows are.
absl::Status CombineRows(ConstTensorView source, ConstTensorView indices, ConstTensorView weights, TensorView out,
                         Stream& stream);

// Adjoint of CombineRows. dsource (shape of source) is overwritten: zero, then weights[t, j] * dout[t, :] added at
// row indices[t, j] in the order of (t, j). dweights[t, j] (dtype of weights) = <source[indices[t, j], :],
// dout[t, :]>, zero where the index is -1.
absl::Status CombineRowsBackward(ConstTensorView source, ConstTensorView indices, ConstTensorView weights,
                                 ConstTensorView dout, TensorView dsource, TensorView dweights, Stream& stream);

// out[i, :] = table[ids[i], :]. table: [vocabulary, n], ids: [m] i32 in range (-1 is an error too), out: [m, n].
absl::Status EmbeddingForward(ConstTensorView table, ConstTensorView ids, TensorView out, Stream& stream);
// dtable[ids[i], :] += dout[i, :] for i = 0, 1, ... dtable may be f32 where dout has 16 bits.
absl::Status EmbeddingBackward(ConstTensorView ids, ConstTensorView dout, TensorView dtable, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_ROWS_H_
