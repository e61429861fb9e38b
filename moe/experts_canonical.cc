#include "evenkeel/moe/experts_canonical.h"

#include <algorithm>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/layout.h"

namespace evenkeel::moe {
namespace {

// The caller's scratch as a stack: what is taken inside a Frame is given back with it. Work runs in stream order, so
// memory may be taken again while earlier work on it is still queued.
class Scratch {
 public:
  explicit Scratch(const TensorView& memory) : memory_(memory) {}
  absl::StatusOr<TensorView> New(const Shape& shape) {
    const int64_t end = used_ + shape.num_elements();
    if (end > memory_.num_elements()) {
      return absl::InvalidArgumentError(
          absl::StrCat("experts: canonical scratch of ", memory_.num_elements(), " elements, wants at least ", end));
    }
    const TensorView view = memory_.Rows(used_, shape.num_elements()).Reshaped(shape);
    used_ = end;
    return view;
  }

  class Frame {
   public:
    explicit Frame(Scratch& scratch) : scratch_(scratch), mark_(scratch.used_) {}
    ~Frame() { scratch_.used_ = mark_; }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;

   private:
    Scratch& scratch_;
    const int64_t mark_;
  };

 private:
  const TensorView memory_;
  int64_t used_ = 0;
};

// out = the sum over leaves [begin, end), each written by `leaf`, in the canonical tree.
absl::Status TreeSum(int64_t begin, int64_t end, absl::FunctionRef<absl::Status(int64_t, TensorView)> leaf,
                     TensorView out, Scratch& scratch, Stream& stream) {
  const Scratch::Frame frame(scratch);
  if (end - begin == 1) return leaf(begin, out);
  int64_t split = 1;
  while (split * 2 < end - begin) split *= 2;
  EK_RETURN_IF_ERROR(TreeSum(begin, begin + split, leaf, out, scratch, stream));
  EK_ASSIGN_OR_RETURN(const TensorView right, scratch.New(out.shape()));
  EK_RETURN_IF_ERROR(TreeSum(begin + split, end, leaf, right, scratch, stream));
  return Add(out, right, out, stream);
}

// How the middle of one rank is cut.
struct Blocks {
  explicit Blocks(const ExpertShape& shape) : count(kCanonicalBlocks / shape.tp), width(shape.ffn / count) {}
  int64_t count, width;
  // [n, f] as [n, count, width].
  template <typename View>
  View Cut(const View& view) const {
    return view.Reshaped(Shape({view.shape().dim(0), count, width}));
  }
};

// Columns of block b as a dense [n, width].
absl::StatusOr<TensorView> CopyBlock(ConstTensorView matrix, const Blocks& blocks, int64_t b, Scratch& scratch,
                                     Stream& stream) {
  const int64_t n = matrix.shape().dim(0);
  EK_ASSIGN_OR_RETURN(const TensorView out, scratch.New(Shape({n, blocks.width})));
  EK_RETURN_IF_ERROR(SliceMiddle(blocks.Cut(matrix), b, out.Reshaped(Shape({n, 1, blocks.width})), stream));
  return out;
}

absl::Status PlaceBlock(ConstTensorView block, const Blocks& blocks, int64_t b, TensorView matrix, Stream& stream) {
  const int64_t n = block.shape().dim(0);
  return PlaceMiddle(block.Reshaped(Shape({n, 1, blocks.width})), b, blocks.Cut(matrix), stream);
}

template <typename View>
View Matrix(const View& stacked, int64_t g) {
  return stacked.Rows(g, 1).Reshaped(Shape({stacked.shape().dim(1), stacked.shape().dim(2)}));
}

// Calls fn(expert, first row, rows) for every expert that has rows.
absl::Status ForExperts(absl::Span<const int64_t> row_counts,
                        absl::FunctionRef<absl::Status(int64_t, int64_t, int64_t)> fn) {
  int64_t first = 0;
  for (size_t g = 0; g < row_counts.size(); ++g) {
    if (row_counts[g] > 0) EK_RETURN_IF_ERROR(fn(static_cast<int64_t>(g), first, row_counts[g]));
    first += row_counts[g];
  }
  return absl::OkStatus();
}

// One source's share of an expert's rows, and their positions within the source.
struct SourceRows {
  int64_t first = 0, rows = 0;
  std::vector<int64_t> positions;
};

std::vector<SourceRows> BySource(int64_t first, int64_t rows, absl::Span<const int64_t> positions,
                                 const ExpertWork& work) {
  std::vector<SourceRows> sources(work.sources);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t position = positions.empty() ? i : positions[first + i];
    SourceRows& source = sources[std::min<int64_t>(position / work.positions_per_source, work.sources - 1)];
    if (source.rows++ == 0) source.first = first + i;
    source.positions.push_back(position % work.positions_per_source);
  }
  return sources;
}

// matrix[:, block b] += product(x, weight block) for all experts: the products of the middle.
absl::Status MiddleProduct(const ExpertShape& shape, ConstTensorView x, ConstTensorView weight,
                           absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView middle,
                           Stream& stream) {
  const Blocks blocks(shape);
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    for (int64_t b = 0; b < blocks.count; ++b) {
      const Scratch::Frame frame(scratch);
      EK_ASSIGN_OR_RETURN(const TensorView w, CopyBlock(Matrix(weight, g), blocks, b, scratch, stream));
      EK_ASSIGN_OR_RETURN(const TensorView out, scratch.New(Shape({rows, blocks.width})));
      EK_RETURN_IF_ERROR(Gemm(false, false, 1.0, x.Rows(first, rows), w, 0.0, out, stream));
      EK_RETURN_IF_ERROR(PlaceBlock(out, blocks, b, middle.Rows(first, rows), stream));
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status CheckCanonical(const ExpertShape& shape) {
  if (IsHalf(shape.dtype)) {
    return absl::InvalidArgumentError(
        "canonical experts take f32 and f64 rows: 16-bit partial sums would be rounded lane by lane (the layer "
        "widens)");
  }
  if (shape.tp >= 1 && kCanonicalBlocks % shape.tp == 0 && shape.ffn % (kCanonicalBlocks / shape.tp) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("canonical numerics cut the middle into ", kCanonicalBlocks,
                                                 " blocks; tp ", shape.tp, " with ", shape.ffn,
                                                 " columns per lane does not fit"));
}

absl::Status CanonicalRecompute(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView x,
                                absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckCanonical(shape));
  EK_RETURN_IF_ERROR(MiddleProduct(shape, x, weights.w_in, row_counts, work, work.pre, stream));
  if (!shape.gated()) return absl::OkStatus();
  return MiddleProduct(shape, x, weights.w_gate, row_counts, work, work.gate, stream);
}

absl::Status CanonicalOutput(const ExpertShape& shape, const ExpertWeights& weights,
                             absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView y,
                             Stream& stream) {
  const Blocks blocks(shape);
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    const Scratch::Frame frame(scratch);
    const TensorView hidden = work.hidden.Rows(first, rows);
    const ConstTensorView w_out = Matrix(weights.w_out, g);
    const auto block = [&](int64_t b, TensorView out) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const TensorView in, CopyBlock(hidden, blocks, b, scratch, stream));
      EK_RETURN_IF_ERROR(Gemm(false, false, 1.0, in, w_out.Rows(b * blocks.width, blocks.width), 0.0, out, stream));
      // The bias belongs to the very first block, on whatever lane that is.
      if (b > 0 || !shape.bias || !shape.adds_output_bias) return absl::OkStatus();
      return AddBias(out, weights.b_out.Rows(g, 1).Reshaped(Shape({shape.hidden})), out, stream);
    };
    EK_RETURN_IF_ERROR(TreeSum(0, blocks.count, block, y.Rows(first, rows), scratch, stream));
    return absl::OkStatus();
  });
}

absl::Status CanonicalWeightGradient(const ExpertShape& shape, bool middle_is_in, ConstTensorView in,
                                     ConstTensorView dout, absl::Span<const int64_t> row_counts,
                                     absl::Span<const int64_t> positions, const ExpertWork& work, TensorView dw,
                                     Stream& stream) {
  const Blocks blocks(shape);
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    const std::vector<SourceRows> sources = BySource(first, rows, positions, work);
    for (int64_t b = 0; b < blocks.count; ++b) {
      const Scratch::Frame frame(scratch);
      const ConstTensorView middle = (middle_is_in ? in : dout).Rows(first, rows);
      EK_ASSIGN_OR_RETURN(const ConstTensorView block, CopyBlock(middle, blocks, b, scratch, stream));
      const auto of_source = [&](int64_t s, TensorView out) -> absl::Status {
        EK_RETURN_IF_ERROR(FillElements(0, out, stream));
        const SourceRows& source = sources[s];
        if (source.rows == 0) return absl::OkStatus();
        const ConstTensorView part = block.Rows(source.first - first, source.rows);
        const ConstTensorView other = (middle_is_in ? dout : in).Rows(source.first, source.rows);
        return GemmWeightGradient(middle_is_in ? part : other, middle_is_in ? other : part, source.positions, out,
                                  stream);
      };
      const Shape size = middle_is_in ? Shape({blocks.width, shape.hidden}) : Shape({shape.hidden, blocks.width});
      EK_ASSIGN_OR_RETURN(const TensorView sum, scratch.New(size));
      EK_RETURN_IF_ERROR(TreeSum(0, work.sources, of_source, sum, scratch, stream));
      if (middle_is_in) {
        const TensorView into = Matrix(dw, g).Rows(b * blocks.width, blocks.width);
        EK_RETURN_IF_ERROR(Add(into, sum, into, stream));
      } else {
        EK_ASSIGN_OR_RETURN(const TensorView old, CopyBlock(Matrix(dw, g), blocks, b, scratch, stream));
        EK_RETURN_IF_ERROR(Add(old, sum, old, stream));
        EK_RETURN_IF_ERROR(PlaceBlock(old, blocks, b, Matrix(dw, g), stream));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status CanonicalBiasGradient(ConstTensorView dy, absl::Span<const int64_t> row_counts,
                                   absl::Span<const int64_t> positions, const ExpertWork& work, TensorView dbias,
                                   Stream& stream) {
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    const Scratch::Frame frame(scratch);
    const std::vector<SourceRows> sources = BySource(first, rows, positions, work);
    const auto of_source = [&](int64_t s, TensorView out) -> absl::Status {
      EK_RETURN_IF_ERROR(FillElements(0, out, stream));
      if (sources[s].rows == 0) return absl::OkStatus();
      return BiasGradient(dy.Rows(sources[s].first, sources[s].rows), sources[s].positions, out, stream);
    };
    const Shape size({dbias.shape().dim(1)});
    EK_ASSIGN_OR_RETURN(const TensorView sum, scratch.New(size));
    EK_RETURN_IF_ERROR(TreeSum(0, work.sources, of_source, sum, scratch, stream));
    const TensorView into = dbias.Rows(g, 1).Reshaped(size);
    EK_RETURN_IF_ERROR(Add(into, sum, into, stream));
    return absl::OkStatus();
  });
}

absl::Status CanonicalMiddleGradient(const ExpertShape& shape, const ExpertWeights& weights, ConstTensorView dy,
                                     absl::Span<const int64_t> row_counts, const ExpertWork& work, Stream& stream) {
  const Blocks blocks(shape);
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    for (int64_t b = 0; b < blocks.count; ++b) {
      const Scratch::Frame frame(scratch);
      EK_ASSIGN_OR_RETURN(const TensorView out, scratch.New(Shape({rows, blocks.width})));
      const ConstTensorView w = Matrix(weights.w_out, g).Rows(b * blocks.width, blocks.width);
      EK_RETURN_IF_ERROR(Gemm(false, true, 1.0, dy.Rows(first, rows), w, 0.0, out, stream));
      EK_RETURN_IF_ERROR(PlaceBlock(out, blocks, b, work.hidden.Rows(first, rows), stream));
    }
    return absl::OkStatus();
  });
}

absl::Status CanonicalInputGradient(const ExpertShape& shape, const ExpertWeights& weights,
                                    absl::Span<const int64_t> row_counts, const ExpertWork& work, TensorView dx,
                                    Stream& stream) {
  const Blocks blocks(shape);
  Scratch scratch(work.scratch);
  return ForExperts(row_counts, [&](int64_t g, int64_t first, int64_t rows) -> absl::Status {
    const Scratch::Frame frame(scratch);
    const auto product = [&](ConstTensorView middle, ConstTensorView weight, int64_t b, double beta,
                             TensorView out) -> absl::Status {
      const Scratch::Frame inner(scratch);
      EK_ASSIGN_OR_RETURN(const TensorView in, CopyBlock(middle.Rows(first, rows), blocks, b, scratch, stream));
      EK_ASSIGN_OR_RETURN(const TensorView w, CopyBlock(Matrix(weight, g), blocks, b, scratch, stream));
      return Gemm(false, true, 1.0, in, w, beta, out, stream);
    };
    const auto block = [&](int64_t b, TensorView out) -> absl::Status {
      EK_RETURN_IF_ERROR(product(work.dpre, weights.w_in, b, 0.0, out));
      return shape.gated() ? product(work.dgate, weights.w_gate, b, 1.0, out) : absl::OkStatus();
    };
    EK_RETURN_IF_ERROR(TreeSum(0, blocks.count, block, dx.Rows(first, rows), scratch, stream));
    return absl::OkStatus();
  });
}

}  // namespace evenkeel::moe
