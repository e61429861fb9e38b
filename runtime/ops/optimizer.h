// Optimizer steps on flat shards: masters, gradients and states are all f32 or all f64.
//
//   SgdOptions sgd{.learning_rate = 0.1, .gradient_scale = clip};
//   EK_RETURN_IF_ERROR(SgdStep(sgd, gradient, /*momentum=*/{}, master, stream));
//
// All tensors of a call have one shape. An element's result depends on that element alone, so it does not matter how
// the parameters are sharded. Gradients are not changed. InvalidArgument when shapes, dtypes or options do not fit.
#ifndef EVENKEEL_RUNTIME_OPS_OPTIMIZER_H_
#define EVENKEEL_RUNTIME_OPS_OPTIMIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

struct SgdOptions {
  double learning_rate = 0;
  double momentum = 0;
  double weight_decay = 0;    // added to the gradient: g + weight_decay * p
  double gradient_scale = 1;  // the gradient is multiplied by this first (clipping, loss scale)
};

// g = gradient * gradient_scale + weight_decay * p; m = momentum * m + g; p -= learning_rate * m.
// With options.momentum == 0, `momentum` may be an empty view and m = g.
absl::Status SgdStep(const SgdOptions& options, ConstTensorView gradient, TensorView momentum, TensorView parameter,
                     Stream& stream);

struct AdamWOptions {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;  // decoupled: p -= learning_rate * weight_decay * p
  double gradient_scale = 1;
  int64_t step = 1;  // 1 in the first step
};

// AdamW (Loshchilov and Hutter, arXiv:1711.05101, algorithm 2, schedule multiplier folded into learning_rate).
// The bias corrections are computed in double and rounded once; all else in the tensors' dtype.
absl::Status AdamWStep(const AdamWOptions& options, ConstTensorView gradient, TensorView first_moment,
                       TensorView second_moment, TensorView parameter, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_OPTIMIZER_H_
