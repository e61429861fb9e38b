#include "evenkeel/testing/reference_pass.h"

#include "absl/strings/match.h"

namespace evenkeel::testutil {

using reference::Matrix;
using reference::Rounding;

PreparedWeights::PreparedWeights(const ReferenceConfig& config, const ReferenceTensors& parameters) {
  for (const auto& [name, parameter] : parameters) {
    const bool expert = absl::StrContains(name, ".moe.w_");
    if (!expert && (absl::StrContains(name, ".attention.w") || name == "output")) {
      transposed[name] = {Transpose(parameter)};
    }
    const int64_t rows = parameter.rows / config.router.experts;
    for (int64_t e = 0; expert && e < config.router.experts; ++e) {
      experts[name].push_back(Block(parameter, e * rows, rows, 0, parameter.cols));
      transposed[name].push_back(Transpose(experts[name].back()));
    }
  }
}

Matrix ReferencePass::LinearBackward(const std::string& name, const Matrix& x, const Matrix& dy,
                                     const Rounding& rounding) const {
  AddTransposedProduct(x, dy, depth, dense, &Gradient(name));
  return MatMul(dy, weights.transposed.at(name)[0], rounding);
}

Matrix ReferencePass::NormBackward(const std::string& name, const Matrix& x, const Matrix& dy) const {
  return RmsNormBackward(x, Parameter(name), config.norm_epsilon, dy, depth, dense, &Gradient(name));
}

Matrix ReferencePass::Stored(Matrix a) const {
  for (size_t i = 0; i < a.variance.size(); ++i) {
    a.variance[i] += static_cast<float>(dense.Written(a.value[i]));
    dense.Reach(a.value[i]);
  }
  return a;
}

}  // namespace evenkeel::testutil
