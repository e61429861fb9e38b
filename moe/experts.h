// The experts of one rank: two- or three-matrix MLPs over contiguous blocks of rows, whole or sliced over TP lanes.
//
//   gelu      y = gelu(x W_in + b_in) W_out + b_out
//   swiglu    y = (silu(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out       (arXiv 2002.05202)
//
// Expert TP slices the middle: lane t holds columns [t F/T, (t+1) F/T) of W_in, W_gate, b_in, b_gate and the same rows
// of W_out. Then y is a partial sum (P) that the order reduces, and dx likewise; nothing is communicated here. b_out
// is replicated and must be added once: `adds_output_bias` is true on lane 0 only. Its gradient, like dy, is the same
// on all lanes and needs no reduction.
//
// Layouts, all row-major, as the caller (such as zero3) holds them. le local experts, h hidden, f = F/T columns:
//   w_in, w_gate [le, h, f]   w_out [le, f, h]   b_in, b_gate [le, f]   b_out [le, h]
// Gradients have the same shapes and are added to (+=); f32 where the weights have 16 bits, else the weights' dtype.
//
//   EK_RETURN_IF_ERROR(ExpertsForward(shape, weights, x, rows, work, y, stream));
//   EK_RETURN_IF_ERROR(ExpertsBackward(shape, weights, x, rows, {}, work, dy, dx, gradients, stream));
#ifndef EVENKEEL_MOE_EXPERTS_H_
#define EVENKEEL_MOE_EXPERTS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

enum class ExpertActivation : uint8_t { kGelu = 0, kSwiGlu = 1 };

// kCanonical: the same bits for every TP and EP size up to kCanonicalBlocks; slower, see experts_canonical.h.
enum class ExpertNumerics : uint8_t { kFast = 0, kCanonical = 1 };

// What one rank's experts are. A value.
struct ExpertShape {
  int64_t local_experts = 0;
  int64_t hidden = 0;
  int64_t ffn = 0;  // this rank's columns: F/T with expert TP, F without
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = false;
  bool adds_output_bias = true;  // with expert TP: on lane 0 only
  DType dtype = DType::kF32;     // of rows and weights: f32, f64, or bf16 and f16 with f32 accumulation

  ExpertNumerics numerics = ExpertNumerics::kFast;
  int tp = 1;  // expert TP size; canonical numerics only

  bool canonical() const { return numerics == ExpertNumerics::kCanonical; }
  bool gated() const { return activation == ExpertActivation::kSwiGlu; }
  DType gradient_dtype() const { return WideDType(dtype); }
};

// Views of the caller's parameters. Matrices that the shape does not have stay empty.
template <typename View>
struct ExpertTensors {
  View w_in, w_gate, w_out, b_in, b_gate, b_out;
};
using ExpertWeights = ExpertTensors<ConstTensorView>;
using ExpertGradients = ExpertTensors<TensorView>;

// Memory of one call, from the caller. [rows, f] each; `gate` and `dgate` only where gated.
struct ExpertWork {
  TensorView pre;     // x W_in + b_in: written by forward, read by backward
  TensorView gate;    // x W_gate + b_gate: likewise
  TensorView hidden;  // the activated middle: scratch of both
  TensorView dpre;    // scratch of backward
  TensorView dgate;   // scratch of backward
  // Canonical numerics: an expert's rows come from this many sources, each with so many positions, and sums wait in
  // `scratch`: as many elements of the rows' dtype as canonical_blocks.h says, InvalidArgument where there are fewer.
  int64_t sources = 1;
  int64_t positions_per_source = 1;
  TensorView scratch = {};
  // Canonical numerics: false leaves the gradients untouched, for a rank whose rows another one counts.
  bool adds_gradients = true;
};

// InvalidArgument when a view of `weights` (or of gradients) does not have the shape or dtype above.
absl::Status CheckExpertTensors(const ExpertShape& shape, const ExpertWeights& weights);
absl::Status CheckExpertTensors(const ExpertShape& shape, const ExpertGradients& gradients);

// x, y: [rows, h]; row_counts: [le], the rows of each expert, in order; they sum to rows. An expert without rows does
// nothing. A row's result depends on that row alone, bit by bit. y must not overlap x.
// InvalidArgument when shapes or dtypes do not fit.
absl::Status ExpertsForward(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                            absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView y, Stream& stream);

// Writes `pre` and `gate` of `work` again, with the forward's bits: for a backward whose forward did not keep them.
absl::Status ExpertsRecompute(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                              absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream);

// dx is overwritten; gradients are added to, rows in the canonical order of GemmWeightGradient, `positions` as there
// (empty: the rows of an expert stand at 0, 1, 2, ..). An expert without rows leaves its gradients untouched, and so
// exactly zero in a zeroed buffer. x and the `pre` and `gate` of `work` are those of the forward call.
absl::Status ExpertsBackward(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                             absl::Span<const int64_t> row_counts, absl::Span<const int64_t> positions,
                             const ExpertWork& work, ConstTensorView dy, TensorView dx,
                             const ExpertGradients& gradients, Stream& stream);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXPERTS_H_
