#include "evenkeel/testing/reference_optimizer.h"

#include <cmath>

#include "evenkeel/testing/reference_math.h"

namespace evenkeel::testutil {

using reference::Matrix;

void ReferenceSgd(double learning_rate, double weight_decay, const ReferenceTensors& gradients,
                  ReferenceTensors* parameters) {
  for (auto& [name, parameter] : *parameters) {
    const Matrix& gradient = gradients.at(name);
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      parameter.value[i] -= learning_rate * (gradient.value[i] + weight_decay * parameter.value[i]);
    }
  }
}

void ReferenceAdamW(const ReferenceAdamWOptions& options, const ReferenceTensors& gradients, ReferenceAdamWState* state,
                    ReferenceTensors* parameters) {
  ++state->step;
  const double correction1 = 1 - std::pow(options.beta1, static_cast<double>(state->step));
  const double correction2 = 1 - std::pow(options.beta2, static_cast<double>(state->step));
  for (auto& [name, parameter] : *parameters) {
    const Matrix& gradient = gradients.at(name);
    Matrix& first = state->first.try_emplace(name, parameter.rows, parameter.cols).first->second;
    Matrix& second = state->second.try_emplace(name, parameter.rows, parameter.cols).first->second;
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      const double g = gradient.value[i];
      first.value[i] = options.beta1 * first.value[i] + (1 - options.beta1) * g;
      second.value[i] = options.beta2 * second.value[i] + (1 - options.beta2) * g * g;
      const double step = (first.value[i] / correction1) / (std::sqrt(second.value[i] / correction2) + options.epsilon);
      parameter.value[i] -= options.learning_rate * (step + options.weight_decay * parameter.value[i]);
    }
  }
}

double ReferenceGlobalNorm(const ReferenceTensors& gradients) {
  double sum = 0;
  for (const auto& [name, gradient] : gradients) {
    for (double g : gradient.value) sum += g * g;
  }
  return std::sqrt(sum);
}

}  // namespace evenkeel::testutil
