#include "evenkeel/runtime/ops/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckDType;
using ops_internal::CheckFloat;
using ops_internal::CheckLike;
using ops_internal::CheckRank;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::DispatchHalf;
using ops_internal::LaneSum;
using ops_internal::Load;
using ops_internal::Store;
using ops_internal::Wide;

// Indices as the kernels see them. -1 means none, unless it is not allowed.
struct IndexList {
  const int32_t* data;
  int64_t count;
  int64_t num_rows;  // what they index into
  int32_t lowest;    // -1, or 0 where every index must name a row

  absl::Status Check(absl::string_view op) const {
    for (int64_t i = 0; i < count; ++i) {
      if (data[i] < lowest || data[i] >= num_rows) {
        return BadArgument(op, absl::StrCat("index ", i, " is ", data[i], ", outside ", lowest, "..", num_rows - 1));
      }
    }
    return absl::OkStatus();
  }
};

void GatherKernel(const std::byte* source, const IndexList& indices, std::byte* out, int64_t row_bytes) {
  if (row_bytes == 0) return;
  for (int64_t i = 0; i < indices.count; ++i) {
    const int64_t row = indices.data[i];
    if (row < 0) {
      std::memset(out + i * row_bytes, 0, static_cast<size_t>(row_bytes));
    } else {
      std::memcpy(out + i * row_bytes, source + row * row_bytes, static_cast<size_t>(row_bytes));
    }
  }
}

template <typename S, typename D>
void ScatterAddKernel(const S* source, const IndexList& indices, D* destination, int64_t n) {
  for (int64_t i = 0; i < indices.count; ++i) {
    if (indices.data[i] < 0) continue;
    const S* from = source + i * n;
    D* to = destination + int64_t{indices.data[i]} * n;
    EK_INDEPENDENT_LOOP
    for (int64_t j = 0; j < n; ++j) to[j] = Store<D>(Load(to[j]) + Load(from[j]));
  }
}

// 16-bit destinations are summed in f32 and rounded once, not after each row.
template <typename T>
void ScatterAddHalf(const T* source, const IndexList& indices, T* destination, int64_t n) {
  std::vector<float> sum(indices.num_rows * n);
  std::vector<bool> hit(indices.num_rows);
  for (int64_t i = 0; i < indices.num_rows * n; ++i) sum[i] = Load(destination[i]);
  for (int64_t i = 0; i < indices.count; ++i) {
    if (indices.data[i] >= 0) hit[indices.data[i]] = true;
  }
  ScatterAddKernel(source, indices, sum.data(), n);
  for (int64_t row = 0; row < indices.num_rows; ++row) {
    if (!hit[row]) continue;
    for (int64_t j = 0; j < n; ++j) destination[row * n + j] = Store<T>(sum[row * n + j]);
  }
}

// out[t] = sum over j of weight * source[indices[t, j]]; weights may be null (all 1).
template <typename T, typename Weight>
void CombineKernel(const T* source, const IndexList& indices, const Weight* weights, T* out, int64_t k, int64_t n) {
  using W = Wide<T>;
  std::vector<W> sum(n);
  const int64_t tokens = k == 0 ? 0 : indices.count / k;
  for (int64_t t = 0; t < tokens; ++t) {
    std::fill(sum.begin(), sum.end(), W{0});
    for (int64_t route = t * k; route < (t + 1) * k; ++route) {
      if (indices.data[route] < 0) continue;
      const T* row = source + int64_t{indices.data[route]} * n;
      const W weight = weights == nullptr ? W{1} : static_cast<W>(weights[route]);
      for (int64_t j = 0; j < n; ++j) sum[j] += weight * Load(row[j]);
    }
    for (int64_t j = 0; j < n; ++j) out[t * n + j] = Store<T>(sum[j]);
  }
}

template <typename T, typename Weight>
void CombineBackwardKernel(const T* source, const IndexList& indices, const Weight* weights, const T* dout, T* dsource,
                           Weight* dweights, int64_t k, int64_t n) {
  using W = Wide<T>;
  std::vector<W> sum(indices.num_rows * n);
  for (int64_t route = 0; route < indices.count; ++route) {
    dweights[route] = 0;
    const int64_t row = indices.data[route];
    if (row < 0) continue;
    const T* gradient = dout + route / k * n;
    const T* value = source + row * n;
    const W weight = static_cast<W>(weights[route]);
    for (int64_t j = 0; j < n; ++j) sum[row * n + j] += weight * Load(gradient[j]);
    dweights[route] =
        static_cast<Weight>(LaneSum<W>(n, [gradient, value](int64_t j) { return Load(gradient[j]) * Load(value[j]); }));
  }
  for (int64_t i = 0; i < indices.num_rows * n; ++i) dsource[i] = Store<T>(sum[i]);
}

absl::Status CheckIndices(absl::string_view op, const ConstTensorView& indices, int rank) {
  EK_RETURN_IF_ERROR(CheckDType(op, "indices", indices, DType::kI32));
  return CheckRank(op, "indices", indices, rank);
}

IndexList Indices(const ConstTensorView& indices, const ConstTensorView& rows, int32_t lowest) {
  return {indices.data<int32_t>(), indices.num_elements(), rows.shape().dim(0), lowest};
}

absl::Status Gather(absl::string_view op, ConstTensorView source, ConstTensorView indices, int32_t lowest,
                    TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckRank(op, "source", source, 2));
  EK_RETURN_IF_ERROR(CheckIndices(op, indices, 1));
  EK_RETURN_IF_ERROR(CheckDType(op, "out", out, source.dtype()));
  EK_RETURN_IF_ERROR(CheckShape(op, "out", out, {indices.shape().dim(0), source.shape().dim(1)}));
  return stream.Launch([op = std::string(op), source = static_cast<const std::byte*>(source.raw()),
                        list = Indices(indices, source, lowest), out = static_cast<std::byte*>(out.raw()),
                        row_bytes = source.shape().dim(1) * SizeOf(source.dtype())] {
    EK_RETURN_IF_ERROR(list.Check(op));
    GatherKernel(source, list, out, row_bytes);
    return absl::OkStatus();
  });
}

absl::Status ScatterAdd(absl::string_view op, ConstTensorView source, ConstTensorView indices, int32_t lowest,
                        TensorView destination, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckRank(op, "source", source, 2));
  EK_RETURN_IF_ERROR(CheckIndices(op, indices, 1));
  EK_RETURN_IF_ERROR(CheckShape(op, "indices", indices, {source.shape().dim(0)}));
  EK_RETURN_IF_ERROR(CheckRank(op, "destination", destination, 2));
  const int64_t n = source.shape().dim(1);
  EK_RETURN_IF_ERROR(CheckShape(op, "destination", destination, {destination.shape().dim(0), n}));
  const IndexList list = Indices(indices, destination, lowest);
  auto launch = [&](auto from, auto to) {
    using S = decltype(from);
    using D = decltype(to);
    return stream.Launch(
        [op = std::string(op), source = source.data<S>(), list, destination = destination.data<D>(), n] {
          EK_RETURN_IF_ERROR(list.Check(op));
          if constexpr (sizeof(D) == 2) {
            ScatterAddHalf(source, list, destination, n);
          } else {
            ScatterAddKernel(source, list, destination, n);
          }
          return absl::OkStatus();
        });
  };
  if (IsHalf(source.dtype()) && destination.dtype() == DType::kF32) return DispatchHalf(source, launch);
  EK_RETURN_IF_ERROR(CheckDType(op, "destination", destination, source.dtype()));
  return DispatchFloat(op, source, [&](auto tag) { return launch(tag, tag); });
}

// Shapes of a weighted or plain sum of k rows per token: `rows` [n, h], indices [t, k], tokens [t, h].
absl::Status CheckCombine(absl::string_view op, const ConstTensorView& rows, const ConstTensorView& indices,
                          absl::string_view tokens_name, const ConstTensorView& tokens) {
  EK_RETURN_IF_ERROR(CheckRank(op, "source", rows, 2));
  EK_RETURN_IF_ERROR(CheckFloat(op, "source", rows));
  EK_RETURN_IF_ERROR(CheckIndices(op, indices, 2));
  if (indices.shape().dim(1) < 1) return BadArgument(op, absl::StrCat("indices are ", indices.shape().ToString()));
  EK_RETURN_IF_ERROR(CheckDType(op, tokens_name, tokens, rows.dtype()));
  return CheckShape(op, tokens_name, tokens, {indices.shape().dim(0), rows.shape().dim(1)});
}

absl::Status CheckWeights(absl::string_view op, absl::string_view name, const ConstTensorView& weights,
                          const ConstTensorView& rows, const ConstTensorView& indices) {
  EK_RETURN_IF_ERROR(CheckShape(op, name, weights, indices.shape()));
  if (rows.dtype() == DType::kF64 && weights.dtype() == DType::kF64) return absl::OkStatus();
  return CheckDType(op, name, weights, DType::kF32);
}

// Calls f(T(), Weight()).
template <typename F>
absl::Status DispatchCombine(absl::string_view op, const ConstTensorView& rows, DType weight_dtype, F&& f) {
  if (weight_dtype == DType::kF64) return f(double{}, double{});
  return DispatchFloat(op, rows, [&](auto tag) { return f(tag, float{}); });
}

}  // namespace

absl::Status GatherRows(ConstTensorView source, ConstTensorView indices, TensorView out, Stream& stream) {
  return Gather("GatherRows", source, indices, -1, out, stream);
}

absl::Status ScatterAddRows(ConstTensorView source, ConstTensorView indices, TensorView destination, Stream& stream) {
  return ScatterAdd("ScatterAddRows", source, indices, -1, destination, stream);
}

absl::Status EmbeddingForward(ConstTensorView table, ConstTensorView ids, TensorView out, Stream& stream) {
  return Gather("EmbeddingForward", table, ids, 0, out, stream);
}

absl::Status EmbeddingBackward(ConstTensorView ids, ConstTensorView dout, TensorView dtable, Stream& stream) {
  return ScatterAdd("EmbeddingBackward", dout, ids, 0, dtable, stream);
}

absl::Status GatherSumRows(ConstTensorView source, ConstTensorView indices, TensorView out, Stream& stream) {
  static constexpr char kOp[] = "GatherSumRows";
  EK_RETURN_IF_ERROR(CheckCombine(kOp, source, indices, "out", out));
  return DispatchFloat(kOp, source, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([source = source.data<T>(), list = Indices(indices, source, -1), out = out.data<T>(),
                          k = indices.shape().dim(1), n = source.shape().dim(1)] {
      EK_RETURN_IF_ERROR(list.Check(kOp));
      CombineKernel(source, list, static_cast<const float*>(nullptr), out, k, n);
      return absl::OkStatus();
    });
  });
}

absl::Status CombineRows(ConstTensorView source, ConstTensorView indices, ConstTensorView weights, TensorView out,
                         Stream& stream) {
  static constexpr char kOp[] = "CombineRows";
  EK_RETURN_IF_ERROR(CheckCombine(kOp, source, indices, "out", out));
  EK_RETURN_IF_ERROR(CheckWeights(kOp, "weights", weights, source, indices));
  return DispatchCombine(kOp, source, weights.dtype(), [&](auto tag, auto weight) {
    using T = decltype(tag);
    using Weight = decltype(weight);
    return stream.Launch([source = source.data<T>(), list = Indices(indices, source, -1),
                          weights = weights.data<Weight>(), out = out.data<T>(), k = indices.shape().dim(1),
                          n = source.shape().dim(1)] {
      EK_RETURN_IF_ERROR(list.Check(kOp));
      CombineKernel(source, list, weights, out, k, n);
      return absl::OkStatus();
    });
  });
}

absl::Status CombineRowsBackward(ConstTensorView source, ConstTensorView indices, ConstTensorView weights,
                                 ConstTensorView dout, TensorView dsource, TensorView dweights, Stream& stream) {
  static constexpr char kOp[] = "CombineRowsBackward";
  EK_RETURN_IF_ERROR(CheckCombine(kOp, source, indices, "dout", dout));
  EK_RETURN_IF_ERROR(CheckWeights(kOp, "weights", weights, source, indices));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dsource", dsource, source));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "dweights", dweights, weights));
  return DispatchCombine(kOp, source, weights.dtype(), [&](auto tag, auto weight) {
    using T = decltype(tag);
    using Weight = decltype(weight);
    return stream.Launch([source = source.data<T>(), list = Indices(indices, source, -1),
                          weights = weights.data<Weight>(), dout = dout.data<T>(), dsource = dsource.data<T>(),
                          dweights = dweights.data<Weight>(), k = indices.shape().dim(1), n = source.shape().dim(1)] {
      EK_RETURN_IF_ERROR(list.Check(kOp));
      CombineBackwardKernel(source, list, weights, dout, dsource, dweights, k, n);
      return absl::OkStatus();
    });
  });
}

}  // namespace evenkeel
