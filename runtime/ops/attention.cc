#include "evenkeel/runtime/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/softmax_rows.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckDType;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::LaneSum;
using ops_internal::Load;
using ops_internal::SoftmaxRow;
using ops_internal::SoftmaxRowBackward;
using ops_internal::Store;
using ops_internal::Wide;

// One head of one sequence within a [tokens, heads * head_dim] matrix.
template <typename T>
struct HeadView {
  T* data;
  int64_t stride;
  T* row(int64_t t) const { return data + t * stride; }
};

template <typename T>
HeadView<T> Head(T* data, const AttentionSizes& sizes, int64_t batch, int64_t head) {
  const int64_t stride = sizes.heads * sizes.head_dim;
  return {data + batch * sizes.sequence * stride + head * sizes.head_dim, stride};
}

template <typename T>
Wide<T> Dot(const T* a, const T* b, int64_t n) {
  return LaneSum<Wide<T>>(n, [a, b](int64_t i) { return Load(a[i]) * Load(b[i]); });
}

// sum += factor * row.
template <typename W, typename T>
void AddScaled(W factor, const T* row, W* sum, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) sum[i] += factor * Load(row[i]);
}

template <typename W, typename T>
void StoreRow(const W* row, W factor, T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = Store<T>(factor * row[i]);
}

template <typename T>
EK_VECTOR_CLONES void ForwardHead(const AttentionSizes& sizes, HeadView<const T> q, HeadView<const T> k,
                                  HeadView<const T> v, T* probabilities, HeadView<T> out) {
  using W = Wide<T>;
  const int64_t s = sizes.sequence, d = sizes.head_dim;
  const W scale = W{1} / std::sqrt(static_cast<W>(d));
  std::vector<W> scores(s), sum(d);
  for (int64_t t = 0; t < s; ++t, probabilities += s) {
    for (int64_t j = 0; j <= t; ++j) scores[j] = scale * Dot(q.row(t), k.row(j), d);
    SoftmaxRow(scores.data(), scores.data(), t + 1);
    std::fill(scores.begin() + t + 1, scores.end(), W{0});
    StoreRow(scores.data(), W{1}, probabilities, s);
    std::fill(sum.begin(), sum.end(), W{0});
    for (int64_t j = 0; j <= t; ++j) AddScaled(Load(probabilities[j]), v.row(j), sum.data(), d);
    StoreRow(sum.data(), W{1}, out.row(t), d);
  }
}

template <typename T>
struct HeadGradients {
  HeadView<T> dq, dk, dv;
};

template <typename T>
EK_VECTOR_CLONES void BackwardHead(const AttentionSizes& sizes, HeadView<const T> q, HeadView<const T> k,
                                   HeadView<const T> v, const T* probabilities, HeadView<const T> dout,
                                   const HeadGradients<T>& out) {
  using W = Wide<T>;
  const int64_t s = sizes.sequence, d = sizes.head_dim;
  const W scale = W{1} / std::sqrt(static_cast<W>(d));
  std::vector<W> p(s), slope(s), dq(d), dk(s * d), dv(s * d);
  for (int64_t t = 0; t < s; ++t, probabilities += s) {
    for (int64_t j = 0; j <= t; ++j) p[j] = Load(probabilities[j]);
    for (int64_t j = 0; j <= t; ++j) slope[j] = Dot(dout.row(t), v.row(j), d);
    SoftmaxRowBackward(p.data(), slope.data(), slope.data(), t + 1);
    std::fill(dq.begin(), dq.end(), W{0});
    for (int64_t j = 0; j <= t; ++j) {
      AddScaled(slope[j], k.row(j), dq.data(), d);
      AddScaled(slope[j], q.row(t), dk.data() + j * d, d);
      AddScaled(p[j], dout.row(t), dv.data() + j * d, d);
    }
    StoreRow(dq.data(), scale, out.dq.row(t), d);
  }
  for (int64_t j = 0; j < s; ++j) {
    StoreRow(dk.data() + j * d, scale, out.dk.row(j), d);
    StoreRow(dv.data() + j * d, W{1}, out.dv.row(j), d);
  }
}

absl::Status CheckSizes(absl::string_view op, const AttentionSizes& sizes) {
  const std::string text = absl::StrCat("batch ", sizes.batch, ", sequence ", sizes.sequence, ", heads ", sizes.heads,
                                        ", head_dim ", sizes.head_dim);
  if (sizes.batch < 0 || sizes.sequence < 0 || sizes.heads < 0 || sizes.head_dim < 1) {
    return BadArgument(op, absl::StrCat(text, ": must not be negative, head_dim at least 1"));
  }
  for (const auto& product : {CheckedMul(sizes.batch, sizes.sequence), CheckedMul(sizes.heads, sizes.head_dim),
                              CheckedMul(sizes.batch, sizes.heads)}) {
    if (!product.ok()) return BadArgument(op, absl::StrCat(text, ": ", product.status().message()));
  }
  return absl::OkStatus();
}

absl::Status CheckRows(absl::string_view op, const AttentionSizes& sizes, absl::string_view name,
                       const ConstTensorView& view, DType dtype) {
  EK_RETURN_IF_ERROR(CheckDType(op, name, view, dtype));
  return CheckShape(op, name, view, {sizes.batch * sizes.sequence, sizes.heads * sizes.head_dim});
}

absl::Status CheckProbabilities(absl::string_view op, const AttentionSizes& sizes, const ConstTensorView& view,
                                DType dtype) {
  EK_RETURN_IF_ERROR(CheckDType(op, "probabilities", view, dtype));
  return CheckShape(op, "probabilities", view, {sizes.batch * sizes.heads, sizes.sequence, sizes.sequence});
}

template <typename F>
void ForEachHead(const AttentionSizes& sizes, F&& f) {
  for (int64_t b = 0; b < sizes.batch; ++b) {
    for (int64_t a = 0; a < sizes.heads; ++a) f(b, a, (b * sizes.heads + a) * sizes.sequence * sizes.sequence);
  }
}

}  // namespace

absl::Status CausalAttentionForward(const AttentionSizes& sizes, ConstTensorView q, ConstTensorView k,
                                    ConstTensorView v, TensorView probabilities, TensorView out, Stream& stream) {
  static constexpr char kOp[] = "CausalAttentionForward";
  EK_RETURN_IF_ERROR(CheckSizes(kOp, sizes));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "q", q, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "k", k, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "v", v, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "out", out, q.dtype()));
  EK_RETURN_IF_ERROR(CheckProbabilities(kOp, sizes, probabilities, q.dtype()));
  return DispatchFloat(kOp, q, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([sizes, q = q.data<T>(), k = k.data<T>(), v = v.data<T>(),
                          probabilities = probabilities.data<T>(), out = out.data<T>()] {
      ForEachHead(sizes, [&](int64_t b, int64_t a, int64_t offset) {
        ForwardHead<T>(sizes, Head(q, sizes, b, a), Head(k, sizes, b, a), Head(v, sizes, b, a), probabilities + offset,
                       Head(out, sizes, b, a));
      });
      return absl::OkStatus();
    });
  });
}

absl::Status CausalAttentionBackward(const AttentionSizes& sizes, ConstTensorView q, ConstTensorView k,
                                     ConstTensorView v, ConstTensorView probabilities, ConstTensorView dout,
                                     TensorView dq, TensorView dk, TensorView dv, Stream& stream) {
  static constexpr char kOp[] = "CausalAttentionBackward";
  EK_RETURN_IF_ERROR(CheckSizes(kOp, sizes));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "q", q, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "k", k, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "v", v, q.dtype()));
  EK_RETURN_IF_ERROR(CheckProbabilities(kOp, sizes, probabilities, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "dout", dout, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "dq", dq, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "dk", dk, q.dtype()));
  EK_RETURN_IF_ERROR(CheckRows(kOp, sizes, "dv", dv, q.dtype()));
  return DispatchFloat(kOp, q, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([sizes, q = q.data<T>(), k = k.data<T>(), v = v.data<T>(),
                          probabilities = probabilities.data<T>(), dout = dout.data<T>(), dq = dq.data<T>(),
                          dk = dk.data<T>(), dv = dv.data<T>()] {
      ForEachHead(sizes, [&](int64_t b, int64_t a, int64_t offset) {
        BackwardHead<T>(sizes, Head(q, sizes, b, a), Head(k, sizes, b, a), Head(v, sizes, b, a), probabilities + offset,
                        Head(dout, sizes, b, a), {Head(dq, sizes, b, a), Head(dk, sizes, b, a), Head(dv, sizes, b, a)});
      });
      return absl::OkStatus();
    });
  });
}

}  // namespace evenkeel
