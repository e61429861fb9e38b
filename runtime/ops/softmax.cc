#include "evenkeel/runtime/ops/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/softmax_rows.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckDType;
using ops_internal::CheckLike;
using ops_internal::CheckRank;
using ops_internal::CheckShape;
using ops_internal::DispatchFloat;
using ops_internal::Load;
using ops_internal::SoftmaxRow;
using ops_internal::SoftmaxRowBackward;
using ops_internal::Store;
using ops_internal::Wide;

template <typename T>
EK_VECTOR_CLONES absl::Status CrossEntropyKernel(const T* logits, const int32_t* targets, double denominator,
                                                 T* probabilities, double* loss, int64_t rows, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t target = targets[i];
    if (target < -1 || target >= n) {
      return BadArgument("CrossEntropyForward", absl::StrCat("target of row ", i, " is ", target, ", of ", n));
    }
    // Read before the row is written: the two may coincide.
    const double target_logit = target < 0 ? 0 : static_cast<double>(Load(logits[i * n + target]));
    const auto [max, total] = SoftmaxRow(logits + i * n, probabilities + i * n, n);
    if (target < 0) continue;
    // -log p = log(sum of exp(x - max)) - (x_target - max); no logarithm of a probability that has vanished.
    sum += std::log(static_cast<double>(total)) - (target_logit - static_cast<double>(max));
  }
  *loss = sum / denominator;
  return absl::OkStatus();
}

template <typename T>
absl::Status CrossEntropyBackwardKernel(const T* probabilities, const int32_t* targets, Wide<T> denominator, T* dlogits,
                                        int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t target = targets[i];
    if (target < -1 || target >= n) {
      return BadArgument("CrossEntropyBackward", absl::StrCat("target of row ", i, " is ", target, ", of ", n));
    }
    const T* p = probabilities + i * n;
    T* d = dlogits + i * n;
    if (target < 0) {
      std::fill_n(d, n, T{});
      continue;
    }
    const Wide<T> at_target = Load(p[target]) - Wide<T>{1};
    for (int64_t j = 0; j < n; ++j) d[j] = Store<T>(Load(p[j]) / denominator);
    d[target] = Store<T>(at_target / denominator);
  }
  return absl::OkStatus();
}

absl::Status CheckRows(absl::string_view op, ConstTensorView x) {
  EK_RETURN_IF_ERROR(CheckRank(op, "x", x, 2));
  if (x.shape().dim(1) < 1 && x.shape().dim(0) > 0) {
    return BadArgument(op, absl::StrCat("x is ", x.shape().ToString(), ", its rows are empty"));
  }
  return absl::OkStatus();
}

absl::Status CheckCrossEntropy(absl::string_view op, ConstTensorView x, ConstTensorView y, ConstTensorView targets,
                               double denominator) {
  EK_RETURN_IF_ERROR(CheckRows(op, x));
  EK_RETURN_IF_ERROR(CheckLike(op, "output", y, x));
  EK_RETURN_IF_ERROR(CheckDType(op, "targets", targets, DType::kI32));
  EK_RETURN_IF_ERROR(CheckShape(op, "targets", targets, {x.shape().dim(0)}));
  if (!(denominator > 0)) return BadArgument(op, absl::StrCat("denominator is ", denominator, ", it must be > 0"));
  return absl::OkStatus();
}

}  // namespace

absl::Status SoftmaxForward(ConstTensorView x, TensorView y, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckRows("SoftmaxForward", x));
  EK_RETURN_IF_ERROR(CheckLike("SoftmaxForward", "y", y, x));
  return DispatchFloat("SoftmaxForward", x, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([x = x.data<T>(), y = y.data<T>(), rows = x.shape().dim(0), n = x.shape().dim(1)] {
      for (int64_t i = 0; i < rows; ++i) SoftmaxRow(x + i * n, y + i * n, n);
      return absl::OkStatus();
    });
  });
}

absl::Status SoftmaxBackward(ConstTensorView y, ConstTensorView dy, TensorView dx, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckRows("SoftmaxBackward", y));
  EK_RETURN_IF_ERROR(CheckLike("SoftmaxBackward", "dy", dy, y));
  EK_RETURN_IF_ERROR(CheckLike("SoftmaxBackward", "dx", dx, y));
  return DispatchFloat("SoftmaxBackward", y, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch(
        [y = y.data<T>(), dy = dy.data<T>(), dx = dx.data<T>(), rows = y.shape().dim(0), n = y.shape().dim(1)] {
          for (int64_t i = 0; i < rows; ++i) SoftmaxRowBackward(y + i * n, dy + i * n, dx + i * n, n);
          return absl::OkStatus();
        });
  });
}

absl::Status CrossEntropyForward(ConstTensorView logits, ConstTensorView targets, double denominator,
                                 TensorView probabilities, TensorView loss, Stream& stream) {
  static constexpr char kOp[] = "CrossEntropyForward";
  EK_RETURN_IF_ERROR(CheckCrossEntropy(kOp, logits, probabilities, targets, denominator));
  EK_RETURN_IF_ERROR(CheckDType(kOp, "loss", loss, DType::kF64));
  EK_RETURN_IF_ERROR(CheckShape(kOp, "loss", loss, {1}));
  return DispatchFloat(kOp, logits, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([logits = logits.data<T>(), targets = targets.data<int32_t>(), denominator,
                          probabilities = probabilities.data<T>(), loss = loss.data<double>(),
                          rows = logits.shape().dim(0), n = logits.shape().dim(1)] {
      return CrossEntropyKernel(logits, targets, denominator, probabilities, loss, rows, n);
    });
  });
}

absl::Status CrossEntropyBackward(ConstTensorView probabilities, ConstTensorView targets, double denominator,
                                  TensorView dlogits, Stream& stream) {
  static constexpr char kOp[] = "CrossEntropyBackward";
  EK_RETURN_IF_ERROR(CheckCrossEntropy(kOp, probabilities, dlogits, targets, denominator));
  return DispatchFloat(kOp, probabilities, [&](auto tag) {
    using T = decltype(tag);
    return stream.Launch([probabilities = probabilities.data<T>(), targets = targets.data<int32_t>(),
                          denominator = static_cast<Wide<T>>(denominator), dlogits = dlogits.data<T>(),
                          rows = dlogits.shape().dim(0), n = dlogits.shape().dim(1)] {
      return CrossEntropyBackwardKernel(probabilities, targets, denominator, dlogits, rows, n);
    });
  });
}

}  // namespace evenkeel
