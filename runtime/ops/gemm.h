// Matrix products on a stream. All matrices are dense, row-major, rank 2.
//
//   y[s, f] = x[s, h] * w[h, f]
//   EK_RETURN_IF_ERROR(Gemm(false, false, 1.0, x, w, 0.0, y, stream));
//   dx[s, h] = dy[s, f] * w[h, f]'
//   EK_RETURN_IF_ERROR(Gemm(false, true, 1.0, dy, w, 0.0, dx, stream));
//   dw[h, f] += x[s, h]' * dy[s, f], the sum over tokens in canonical order
//   EK_RETURN_IF_ERROR(GemmWeightGradient(x, dy, {}, dw, stream));
//
// Dtypes: A and B alike, f32, f64, bf16 or f16; C the same, or f32 where A and B have 16 bits. Such products are
// accumulated in f32 and rounded once.
//
// Two promises beyond the values, both tested bit by bit:
// * A row of C does not depend on how many other rows A has, nor on its place among them (Gemm and GemmGrouped
//   with transpose_a == false). Orders that hand an expert its rows in other batches give the same bits.
// * GemmWeightGradient does not change when empty (zero) positions are inserted or left out.
// One thread per call; the calling thread's OpenMP settings are left as they were.
#ifndef EVENKEEL_RUNTIME_OPS_GEMM_H_
#define EVENKEEL_RUNTIME_OPS_GEMM_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// C = alpha * op(A) * op(B) + beta * C, where op(X) is X or its transpose.
// op(A): [m, k], op(B): [k, n], C: [m, n]. C must not overlap A or B. With beta == 0, C is not read (it may hold
// NaN). Extents may be 0: k == 0 gives beta * C. InvalidArgument when shapes or dtypes do not fit.
absl::Status Gemm(bool transpose_a, bool transpose_b, double alpha, ConstTensorView a, ConstTensorView b, double beta,
                  TensorView c, Stream& stream);

// One product per block of consecutive rows: block g holds row_counts[g] rows of A and C and uses matrix g of B.
// A: [rows, k], B: [groups, k, n] (transpose_b: [groups, n, k]), C: [rows, n]; row_counts (copied) sums to `rows`.
// A block without rows does nothing. Otherwise as Gemm, and each row has the bits that Gemm would give it.
absl::Status GemmGrouped(bool transpose_b, double alpha, ConstTensorView a, ConstTensorView b,
                         absl::Span<const int64_t> row_counts, double beta, TensorView c, Stream& stream);

// Rows that are summed together before the tree; see GemmWeightGradient.
inline constexpr int64_t kWeightGradientBlockRows = 128;

// dw += x' * dy, summed over rows (tokens) in canonical order. x: [rows, k], dy: [rows, n], dw: [k, n].
// Row i stands at positions[i] (strictly increasing, >= 0, copied); empty `positions` means 0, 1, .., rows - 1.
// Positions that are not named count as zero rows. Positions [128 b, 128 b + 128) are summed first, then the block
// sums by the canonical binary tree (a range splits at the largest power of two below its length), then dw is
// added once. So a zero row, present or left out, before, between or behind the others, changes no bit.
absl::Status GemmWeightGradient(ConstTensorView x, ConstTensorView dy, absl::Span<const int64_t> positions,
                                TensorView dw, Stream& stream);

// GemmWeightGradient for each block of consecutive rows: dw[g] += x_g' * dy_g. dw: [groups, k, n].
// `positions` is empty or has one entry per row, strictly increasing within each block. A block without rows
// leaves dw[g] untouched.
absl::Status GemmGroupedWeightGradient(ConstTensorView x, ConstTensorView dy, absl::Span<const int64_t> row_counts,
                                       absl::Span<const int64_t> positions, TensorView dw, Stream& stream);

// y[i, :] = x[i, :] + bias. x, y: [rows, n] (may coincide), bias: [n]; one dtype.
absl::Status AddBias(ConstTensorView x, ConstTensorView bias, TensorView y, Stream& stream);

// dbias += sum of the rows of dy, in the canonical order of GemmWeightGradient. dy: [rows, n], dbias: [n] of the
// same dtype, or f32 where dy has 16 bits.
absl::Status BiasGradient(ConstTensorView dy, absl::Span<const int64_t> positions, TensorView dbias, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_GEMM_H_
