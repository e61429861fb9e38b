#include "evenkeel/runtime/ops/optimizer.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"
#include "evenkeel/runtime/ops/vector_math.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckLike;
using ops_internal::Describe;

// Options in the dtype of the tensors.
template <typename W>
struct SgdFactors {
  W rate, momentum, decay, scale;
};

// kMomentum: `momentum` is read and written; otherwise it is not touched.
template <bool kMomentum, typename W>
EK_VECTOR_CLONES void SgdKernel(const SgdFactors<W>& factors, const W* gradient, W* momentum, W* parameter, int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) {
    W g = gradient[i] * factors.scale + factors.decay * parameter[i];
    if constexpr (kMomentum) {
      g += factors.momentum * momentum[i];
      momentum[i] = g;
    }
    parameter[i] -= factors.rate * g;
  }
}

template <typename W>
struct AdamWFactors {
  W rate, decay, beta1, beta2, rest1, rest2, correction1, root_correction2, epsilon, scale;
};

template <typename W>
AdamWFactors<W> Factors(const AdamWOptions& options) {
  const double step = static_cast<double>(options.step);
  return {.rate = static_cast<W>(options.learning_rate),
          .decay = static_cast<W>(options.learning_rate * options.weight_decay),
          .beta1 = static_cast<W>(options.beta1),
          .beta2 = static_cast<W>(options.beta2),
          .rest1 = static_cast<W>(1 - options.beta1),
          .rest2 = static_cast<W>(1 - options.beta2),
          .correction1 = static_cast<W>(1 - std::pow(options.beta1, step)),
          .root_correction2 = static_cast<W>(std::sqrt(1 - std::pow(options.beta2, step))),
          .epsilon = static_cast<W>(options.epsilon),
          .scale = static_cast<W>(options.gradient_scale)};
}

template <typename W>
EK_VECTOR_CLONES void AdamWKernel(const AdamWFactors<W>& f, const W* gradient, W* first, W* second, W* parameter,
                                  int64_t n) {
  EK_INDEPENDENT_LOOP
  for (int64_t i = 0; i < n; ++i) {
    const W g = gradient[i] * f.scale;
    const W m = f.beta1 * first[i] + f.rest1 * g;
    const W v = f.beta2 * second[i] + f.rest2 * (g * g);
    first[i] = m;
    second[i] = v;
    const W update = (m / f.correction1) / (std::sqrt(v) / f.root_correction2 + f.epsilon);
    parameter[i] = (parameter[i] - f.decay * parameter[i]) - f.rate * update;
  }
}

absl::Status CheckMaster(absl::string_view op, const ConstTensorView& parameter) {
  if (parameter.dtype() == DType::kF32 || parameter.dtype() == DType::kF64) return absl::OkStatus();
  return BadArgument(op, absl::StrCat("parameter is ", Describe(parameter), ", it must be f32 or f64"));
}

template <typename W>
absl::Status LaunchSgd(const SgdOptions& options, ConstTensorView gradient, TensorView momentum, bool has_momentum,
                       TensorView parameter, Stream& stream) {
  const SgdFactors<W> factors{static_cast<W>(options.learning_rate), static_cast<W>(options.momentum),
                              static_cast<W>(options.weight_decay), static_cast<W>(options.gradient_scale)};
  return stream.Launch([factors, gradient = gradient.data<W>(), momentum = has_momentum ? momentum.data<W>() : nullptr,
                        has_momentum, parameter = parameter.data<W>(), n = parameter.num_elements()] {
    if (has_momentum) {
      SgdKernel<true>(factors, gradient, momentum, parameter, n);
    } else {
      SgdKernel<false>(factors, gradient, momentum, parameter, n);
    }
    return absl::OkStatus();
  });
}

template <typename W>
absl::Status LaunchAdamW(const AdamWOptions& options, ConstTensorView gradient, TensorView first, TensorView second,
                         TensorView parameter, Stream& stream) {
  return stream.Launch([factors = Factors<W>(options), gradient = gradient.data<W>(), first = first.data<W>(),
                        second = second.data<W>(), parameter = parameter.data<W>(), n = parameter.num_elements()] {
    AdamWKernel(factors, gradient, first, second, parameter, n);
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status SgdStep(const SgdOptions& options, ConstTensorView gradient, TensorView momentum, TensorView parameter,
                     Stream& stream) {
  static constexpr char kOp[] = "SgdStep";
  EK_RETURN_IF_ERROR(CheckMaster(kOp, parameter));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "gradient", gradient, parameter));
  const bool has_momentum = options.momentum != 0 || momentum.num_elements() > 0;
  if (has_momentum) EK_RETURN_IF_ERROR(CheckLike(kOp, "momentum", momentum, parameter));
  if (!std::isfinite(options.learning_rate) || !(options.momentum >= 0 && options.momentum < 1) ||
      !(options.weight_decay >= 0)) {
    return BadArgument(kOp, absl::StrCat("learning_rate ", options.learning_rate, ", momentum ", options.momentum,
                                         ", weight_decay ", options.weight_decay));
  }
  if (parameter.dtype() == DType::kF64) {
    return LaunchSgd<double>(options, gradient, momentum, has_momentum, parameter, stream);
  }
  return LaunchSgd<float>(options, gradient, momentum, has_momentum, parameter, stream);
}

absl::Status AdamWStep(const AdamWOptions& options, ConstTensorView gradient, TensorView first_moment,
                       TensorView second_moment, TensorView parameter, Stream& stream) {
  static constexpr char kOp[] = "AdamWStep";
  EK_RETURN_IF_ERROR(CheckMaster(kOp, parameter));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "gradient", gradient, parameter));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "first_moment", first_moment, parameter));
  EK_RETURN_IF_ERROR(CheckLike(kOp, "second_moment", second_moment, parameter));
  if (!std::isfinite(options.learning_rate) || !(options.beta1 >= 0 && options.beta1 < 1) ||
      !(options.beta2 >= 0 && options.beta2 < 1) || !(options.epsilon >= 0) || !(options.weight_decay >= 0) ||
      options.step < 1) {
    return BadArgument(kOp, absl::StrCat("learning_rate ", options.learning_rate, ", beta1 ", options.beta1, ", beta2 ",
                                         options.beta2, ", epsilon ", options.epsilon, ", weight_decay ",
                                         options.weight_decay, ", step ", options.step));
  }
  if (parameter.dtype() == DType::kF64) {
    return LaunchAdamW<double>(options, gradient, first_moment, second_moment, parameter, stream);
  }
  return LaunchAdamW<float>(options, gradient, first_moment, second_moment, parameter, stream);
}

}  // namespace evenkeel
