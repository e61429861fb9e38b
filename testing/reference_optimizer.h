// The optimizers of the naive run, by their formulas.
//
//   ReferenceSgd(0.1, /*weight_decay=*/0, step.gradients, &parameters);
#ifndef EVENKEEL_TESTING_REFERENCE_OPTIMIZER_H_
#define EVENKEEL_TESTING_REFERENCE_OPTIMIZER_H_

#include <cstdint>

#include "evenkeel/testing/reference_parameters.h"

namespace evenkeel::testutil {

// parameters -= learning_rate * (gradients + weight_decay * parameters).
void ReferenceSgd(double learning_rate, double weight_decay, const ReferenceTensors& gradients,
                  ReferenceTensors* parameters);

// Moments of AdamW by name; empty before the first step.
struct ReferenceAdamWState {
  int64_t step = 0;
  ReferenceTensors first;
  ReferenceTensors second;
};
struct ReferenceAdamWOptions {
  double learning_rate = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;
};
// AdamW (Loshchilov and Hutter, arXiv:1711.05101): decay acts on the parameter, not on the gradient.
void ReferenceAdamW(const ReferenceAdamWOptions& options, const ReferenceTensors& gradients, ReferenceAdamWState* state,
                    ReferenceTensors* parameters);

// sqrt of the sum of all squared gradients: what clipping compares with its limit.
double ReferenceGlobalNorm(const ReferenceTensors& gradients);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_OPTIMIZER_H_
