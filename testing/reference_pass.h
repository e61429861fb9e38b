// What the blocks of the reference model share while one replica goes forward and backward. Internal to the model.
#ifndef EVENKEEL_TESTING_REFERENCE_PASS_H_
#define EVENKEEL_TESTING_REFERENCE_PASS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_parameters.h"

namespace evenkeel::testutil {

// Weights as the products want them, made once for all replicas of a step.
struct PreparedWeights {
  PreparedWeights(const ReferenceConfig& config, const ReferenceTensors& parameters);

  std::map<std::string, std::vector<reference::Matrix>> experts;     // [expert]
  std::map<std::string, std::vector<reference::Matrix>> transposed;  // [expert], or the one matrix
};

// One replica's pass; everything in it outlives the pass.
struct ReferencePass {
  const reference::Matrix& Parameter(const std::string& name) const { return parameters.at(name); }
  reference::Matrix& Gradient(const std::string& name) const { return gradients.at(name); }
  // For y = x w: adds the gradient of w and returns that of x.
  reference::Matrix LinearBackward(const std::string& name, const reference::Matrix& x, const reference::Matrix& dy,
                                   const reference::Rounding& rounding) const;
  // For y = RmsNorm(x): adds the gradient of the norm's weight and returns that of x.
  reference::Matrix NormBackward(const std::string& name, const reference::Matrix& x,
                                 const reference::Matrix& dy) const;
  // `a` with the rounding of being written once more.
  reference::Matrix Stored(reference::Matrix a) const;

  const ReferenceConfig& config;
  const ReferenceTensors& parameters;
  const PreparedWeights& weights;
  const reference::Rounding dense;
  const reference::Rounding split;  // of products whose sum is split over lanes
  const reference::Rounding router;
  const int64_t depth;  // tokens of all replicas: how many the judged run sums into one weight
  ReferenceTensors& gradients;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_PASS_H_
