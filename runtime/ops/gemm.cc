#include "evenkeel/runtime/ops/gemm.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/canonical_sum.h"
#include "evenkeel/runtime/ops/matmul.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::AddCanonicalRowSum;
using ops_internal::BadArgument;
using ops_internal::CanonicalSum;
using ops_internal::CheckDType;
using ops_internal::CheckLike;
using ops_internal::CheckPositions;
using ops_internal::CheckRank;
using ops_internal::CheckShape;
using ops_internal::Describe;
using ops_internal::DispatchFloat;
using ops_internal::DispatchHalf;
using ops_internal::ForEachBlock;
using ops_internal::Load;
using ops_internal::Matmul;
using ops_internal::MatmulShape;
using ops_internal::OrderedMatmul;
using ops_internal::Store;
using ops_internal::Wide;

static_assert(kWeightGradientBlockRows == ops_internal::kBlockPositions);

enum ScratchRole { kScratchA, kScratchB, kScratchC, kNumScratchRoles };

// Memory of the calling thread for one role; grows, and is kept for its next call.
template <typename W>
W* Scratch(ScratchRole role, int64_t count) {
  static thread_local std::vector<W> memory[kNumScratchRoles];
  if (static_cast<int64_t>(memory[role].size()) < count) memory[role].resize(count);
  return memory[role].data();
}

// `data` itself, or for 16-bit elements a widened copy in the thread's scratch.
template <typename T>
const Wide<T>* Widen(const T* data, int64_t count, ScratchRole role) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return data;
  } else {
    Wide<T>* wide = Scratch<Wide<T>>(role, count);
    for (int64_t i = 0; i < count; ++i) wide[i] = Load(data[i]);
    return wide;
  }
}

// c = alpha * product + beta * c; c is not read when beta is 0.
template <typename C, typename W>
void Blend(W alpha, const W* product, W beta, C* c, int64_t count) {
  if (beta == 0) {
    EK_INDEPENDENT_LOOP
    for (int64_t i = 0; i < count; ++i) c[i] = Store<C>(alpha * product[i]);
  } else {
    EK_INDEPENDENT_LOOP
    for (int64_t i = 0; i < count; ++i) c[i] = Store<C>(alpha * product[i] + beta * Load(c[i]));
  }
}

// One product on host memory. T: elements of A and B, C: elements of C.
template <typename T, typename C>
absl::Status GemmKernel(const MatmulShape& shape, Wide<T> alpha, const T* a, const T* b, Wide<T> beta, C* c) {
  using W = Wide<T>;
  const int64_t count = shape.m * shape.n;
  if (count == 0) return absl::OkStatus();
  const bool direct = std::is_same_v<C, W> && alpha == 1 && beta == 0;
  W* product = direct ? reinterpret_cast<W*>(c) : Scratch<W>(kScratchC, count);
  if (shape.k == 0) {
    std::fill_n(product, count, W{0});
  } else {
    EK_RETURN_IF_ERROR(
        Matmul(shape, Widen(a, shape.m * shape.k, kScratchA), Widen(b, shape.k * shape.n, kScratchB), product));
  }
  if (!direct) Blend(alpha, product, beta, c, count);
  return absl::OkStatus();
}

template <typename T, typename D>
absl::Status WeightGradientKernel(const T* x, const T* dy, absl::Span<const int64_t> positions, int64_t rows, int64_t k,
                                  int64_t n, D* dw) {
  using W = Wide<T>;
  if (rows == 0 || k * n == 0) return absl::OkStatus();
  static thread_local CanonicalSum<W> tree;
  tree.Start(k * n);
  absl::Status status;
  ForEachBlock(positions, rows, [&](int64_t block, int64_t begin, int64_t end) {
    W* sum = tree.Next(block);
    if (!status.ok()) return;
    // Absent rows need no place: zero terms change nothing.
    const MatmulShape shape{.m = k, .n = n, .k = end - begin, .transpose_a = true};
    status = OrderedMatmul(shape, Widen(x + begin * k, shape.k * k, kScratchA),
                           Widen(dy + begin * n, shape.k * n, kScratchB), sum);
  });
  EK_RETURN_IF_ERROR(status);
  const W* total = tree.Finish();
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < k * n; ++i) {
    dw[i] = Store<D>(Load(dw[i]) + (total[i] + W{0}));  // + 0: a sum of nothing but -0 counts as none at all
  }
  return absl::OkStatus();
}

// Calls f(T(), C()) for the element types of A and C.
template <typename F>
absl::Status DispatchProduct(absl::string_view op, absl::string_view a_name, const ConstTensorView& a,
                             absl::string_view b_name, const ConstTensorView& b, absl::string_view c_name,
                             const ConstTensorView& c, F&& f) {
  if (a.dtype() != b.dtype()) {
    return BadArgument(op, absl::StrCat(a_name, " is ", Describe(a), " and ", b_name, " is ", Describe(b),
                                        ", their dtypes must be equal"));
  }
  if (IsHalf(a.dtype()) && c.dtype() == DType::kF32) return DispatchHalf(a, f);
  EK_RETURN_IF_ERROR(CheckDType(op, c_name, c, a.dtype()));
  return DispatchFloat(op, a, [&](auto tag) { return f(tag, tag); });
}

// Shape of the product of a [m, k] and b [k, n], each perhaps stored transposed; the last two extents of b count.
absl::StatusOr<MatmulShape> ProductShape(absl::string_view op, bool transpose_a, bool transpose_b,
                                         const ConstTensorView& a, const ConstTensorView& b) {
  const int last = b.shape().rank() - 1;
  MatmulShape shape{.m = a.shape().dim(transpose_a ? 1 : 0),
                    .n = b.shape().dim(transpose_b ? last - 1 : last),
                    .k = a.shape().dim(transpose_a ? 0 : 1),
                    .transpose_a = transpose_a,
                    .transpose_b = transpose_b};
  const int64_t b_depth = b.shape().dim(transpose_b ? last : last - 1);
  if (b_depth != shape.k) {
    return BadArgument(
        op, absl::StrCat("inner extents differ: A is ", Describe(a), transpose_a ? " transposed" : "", " with ",
                         shape.k, ", B is ", Describe(b), transpose_b ? " transposed" : "", " with ", b_depth));
  }
  return shape;
}

absl::Status CheckRowCounts(absl::string_view op, absl::Span<const int64_t> row_counts, int64_t groups, int64_t rows) {
  if (static_cast<int64_t>(row_counts.size()) != groups) {
    return BadArgument(op, absl::StrCat(row_counts.size(), " row counts for ", groups, " groups"));
  }
  int64_t left = rows;
  for (size_t g = 0; g < row_counts.size(); ++g) {
    if (row_counts[g] < 0 || row_counts[g] > left) {
      return BadArgument(op, absl::StrCat("row count of group ", g, " is ", row_counts[g], ", with ", left, " of ",
                                          rows, " rows left"));
    }
    left -= row_counts[g];
  }
  if (left != 0) return BadArgument(op, absl::StrCat("row counts leave ", left, " of ", rows, " rows out"));
  return absl::OkStatus();
}

// A copy that a queued operation can own.
std::vector<int64_t> Owned(absl::Span<const int64_t> values) { return {values.begin(), values.end()}; }

}  // namespace

absl::Status Gemm(bool transpose_a, bool transpose_b, double alpha, ConstTensorView a, ConstTensorView b, double beta,
                  TensorView c, Stream& stream) {
  static constexpr char kOp[] = "Gemm";
  EK_RETURN_IF_ERROR(CheckRank(kOp, "A", a, 2));
  EK_RETURN_IF_ERROR(CheckRank(kOp, "B", b, 2));
  EK_ASSIGN_OR_RETURN(const MatmulShape shape, ProductShape(kOp, transpose_a, transpose_b, a, b));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "C", c, {shape.m, shape.n}));
  return DispatchProduct(kOp, "A", a, "B", b, "C", c, [&](auto element, auto result) {
    using T = decltype(element);
    using C = decltype(result);
    return stream.Launch([shape, alpha = static_cast<Wide<T>>(alpha), beta = static_cast<Wide<T>>(beta),
                          a = a.data<T>(), b = b.data<T>(),
                          c = c.data<C>()] { return GemmKernel(shape, alpha, a, b, beta, c); });
  });
}

absl::Status GemmGrouped(bool transpose_b, double alpha, ConstTensorView a, ConstTensorView b,
                         absl::Span<const int64_t> row_counts, double beta, TensorView c, Stream& stream) {
  static constexpr char kOp[] = "GemmGrouped";
  EK_RETURN_IF_ERROR(CheckRank(kOp, "A", a, 2));
  EK_RETURN_IF_ERROR(CheckRank(kOp, "B", b, 3));
  EK_ASSIGN_OR_RETURN(const MatmulShape shape, ProductShape(kOp, false, transpose_b, a, b));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "C", c, {shape.m, shape.n}));
  EK_RETURN_IF_ERROR(CheckRowCounts(kOp, row_counts, b.shape().dim(0), shape.m));
  return DispatchProduct(kOp, "A", a, "B", b, "C", c, [&](auto element, auto result) {
    using T = decltype(element);
    using C = decltype(result);
    return stream.Launch([shape, counts = Owned(row_counts), alpha = static_cast<Wide<T>>(alpha),
                          beta = static_cast<Wide<T>>(beta), a = a.data<T>(), b = b.data<T>(), c = c.data<C>()] {
      MatmulShape block = shape;
      int64_t row = 0;
      for (size_t g = 0; g < counts.size(); ++g, row += block.m) {
        block.m = counts[g];
        EK_RETURN_IF_ERROR(GemmKernel(block, alpha, a + row * shape.k, b + static_cast<int64_t>(g) * shape.k * shape.n,
                                      beta, c + row * shape.n));
      }
      return absl::OkStatus();
    });
  });
}

absl::Status GemmWeightGradient(ConstTensorView x, ConstTensorView dy, absl::Span<const int64_t> positions,
                                TensorView dw, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckRank("GemmWeightGradient", "dw", dw, 2));
  EK_RETURN_IF_ERROR(CheckRank("GemmWeightGradient", "x", x, 2));
  const int64_t all_rows[] = {x.shape().dim(0)};
  return GemmGroupedWeightGradient(x, dy, all_rows, positions, dw.Reshaped({1, dw.shape().dim(0), dw.shape().dim(1)}),
                                   stream);
}

absl::Status GemmGroupedWeightGradient(ConstTensorView x, ConstTensorView dy, absl::Span<const int64_t> row_counts,
                                       absl::Span<const int64_t> positions, TensorView dw, Stream& stream) {
  static constexpr char kOp[] = "GemmWeightGradient";
  EK_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  EK_RETURN_IF_ERROR(CheckRank(kOp, "dy", dy, 2));
  EK_RETURN_IF_ERROR(CheckRank(kOp, "dw", dw, 3));
  const int64_t rows = x.shape().dim(0), k = x.shape().dim(1), n = dy.shape().dim(1);
  EK_RETURN_IF_ERROR(CheckShape(kOp, "dy", dy, {rows, n}));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "dw", dw, {dw.shape().dim(0), k, n}));
  EK_RETURN_IF_ERROR(CheckRowCounts(kOp, row_counts, dw.shape().dim(0), rows));
  if (!positions.empty() && static_cast<int64_t>(positions.size()) != rows) {
    return BadArgument(kOp, absl::StrCat(positions.size(), " positions for ", rows, " rows"));
  }
  int64_t first = 0;
  for (int64_t count : row_counts) {
    if (!positions.empty()) EK_RETURN_IF_ERROR(CheckPositions(kOp, positions.subspan(first, count), count));
    first += count;
  }
  return DispatchProduct(kOp, "x", x, "dy", dy, "dw", dw, [&](auto element, auto result) {
    using T = decltype(element);
    using D = decltype(result);
    return stream.Launch([counts = Owned(row_counts), positions = Owned(positions), x = x.data<T>(), dy = dy.data<T>(),
                          dw = dw.data<D>(), k, n]() -> absl::Status {
      int64_t row = 0;
      for (size_t g = 0; g < counts.size(); row += counts[g], ++g) {
        const auto own =
            positions.empty() ? absl::Span<const int64_t>() : absl::MakeConstSpan(positions).subspan(row, counts[g]);
        EK_RETURN_IF_ERROR(WeightGradientKernel(x + row * k, dy + row * n, own, counts[g], k, n,
                                                dw + static_cast<int64_t>(g) * k * n));
      }
      return absl::OkStatus();
    });
  });
}

absl::Status AddBias(ConstTensorView x, ConstTensorView bias, TensorView y, Stream& stream) {
  static constexpr char kOp[] = "AddBias";
  EK_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 2));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "y", y, x));
  EK_RETURN_IF_ERROR(CheckDType(kOp, "bias", bias, x.dtype()));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "bias", bias, {x.shape().dim(1)}));
  return DispatchFloat(kOp, x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch(
        [x = x.data<T>(), bias = bias.data<T>(), y = y.data<T>(), rows = x.shape().dim(0), n = x.shape().dim(1)] {
          for (int64_t i = 0; i < rows; ++i) {
            EK_INDEPENDENT_LOOP
            for (int64_t j = 0; j < n; ++j) y[i * n + j] = Store<T>(Load(x[i * n + j]) + Load(bias[j]));
          }
          return absl::OkStatus();
        });
  });
}

absl::Status BiasGradient(ConstTensorView dy, absl::Span<const int64_t> positions, TensorView dbias, Stream& stream) {
  static constexpr char kOp[] = "BiasGradient";
  EK_RETURN_IF_ERROR(CheckRank(kOp, "dy", dy, 2));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "dbias", dbias, {dy.shape().dim(1)}));
  EK_RETURN_IF_ERROR(CheckPositions(kOp, positions, dy.shape().dim(0)));
  return DispatchProduct(kOp, "dy", dy, "dy", dy, "dbias", dbias, [&](auto element, auto result) {
    using T = decltype(element);
    using D = decltype(result);
    return stream.Launch([dy = dy.data<T>(), positions = Owned(positions), dbias = dbias.data<D>(),
                          rows = dy.shape().dim(0), n = dy.shape().dim(1)] {
      AddCanonicalRowSum(rows, n, positions, dbias, [=](int64_t i, int64_t j) { return Load(dy[i * n + j]); });
      return absl::OkStatus();
    });
  });
}

}  // namespace evenkeel
