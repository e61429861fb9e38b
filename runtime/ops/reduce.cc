#include "evenkeel/runtime/ops/reduce.h"

#include <algorithm>
#include <cmath>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"

namespace evenkeel {
namespace {

using ops_internal::CanonicalSplit;
using ops_internal::CheckDType;
using ops_internal::CheckFloat;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::LaneSum;
using ops_internal::Load;

constexpr int64_t kBlockElements = 1024;

// Tree over the blocks [begin, begin + count) of `x`, count >= 1, `n` elements in all. term(value) is summed.
template <typename T, typename Term>
double TreeSum(const T* x, int64_t n, int64_t begin, int64_t count, const Term& term) {
  if (count == 1) {
    const T* block = x + begin * kBlockElements;
    const int64_t size = std::min(kBlockElements, n - begin * kBlockElements);
    return LaneSum<double>(size, [block, &term](int64_t i) { return term(static_cast<double>(Load(block[i]))); });
  }
  const int64_t half = CanonicalSplit(count);
  return TreeSum(x, n, begin, half, term) + TreeSum(x, n, begin + half, count - half, term);
}

template <typename Term>
absl::Status Reduce(absl::string_view op, ConstTensorView x, TensorView out, Stream& stream, Term term) {
  EK_RETURN_IF_ERROR(CheckDType(op, "out", out, DType::kF64));
  EK_RETURN_IF_ERROR(CheckShape(op, "out", out, {1}));
  return DispatchFloat(op, x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([x = x.data<T>(), n = x.num_elements(), out = out.data<double>(), term] {
      *out = n == 0 ? 0.0 : TreeSum(x, n, 0, (n + kBlockElements - 1) / kBlockElements, term);
      return absl::OkStatus();
    });
  });
}

}  // namespace

absl::Status SumOfSquares(ConstTensorView x, TensorView out, Stream& stream) {
  return Reduce("SumOfSquares", x, out, stream, [](double value) { return value * value; });
}

absl::Status Sum(ConstTensorView x, TensorView out, Stream& stream) {
  return Reduce("Sum", x, out, stream, [](double value) { return value; });
}

absl::Status AllFinite(ConstTensorView x, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckFloat("AllFinite", "x", x));
  EK_RETURN_IF_ERROR(CheckDType("AllFinite", "out", out, DType::kI32));
  EK_RETURN_IF_ERROR(CheckShape("AllFinite", "out", out, {1}));
  return DispatchFloat("AllFinite", x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([x = x.data<T>(), n = x.num_elements(), out = out.data<int32_t>()] {
      bool finite = true;
      for (int64_t i = 0; i < n; ++i) finite &= std::isfinite(Load(x[i]));
      *out = finite ? 1 : 0;
      return absl::OkStatus();
    });
  });
}

}  // namespace evenkeel
