// Comparing two tensors bit by bit, and saying how far apart two numbers are.
#ifndef EVENKEEL_TESTING_TENSOR_DIFFERENCE_H_
#define EVENKEEL_TESTING_TENSOR_DIFFERENCE_H_

#include <cstdint>
#include <optional>

#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::testutil {

// Element `i` as a double; floating types only.
double ElementOf(ConstTensorView view, int64_t i);

// Steps between a and b on the grid of `dtype`'s values: 0 for equal bits, 1 for neighbours. -0 and +0 are one step
// apart, NaN is farther from everything than any number. Saturates at 2^62.
double UlpsBetween(DType dtype, double a, double b);

struct TensorDifference {
  int64_t index = 0;  // of the first element whose bits differ
  double reference = 0;
  double candidate = 0;
  double ulps = 0;
  double max_abs_diff = 0;  // over the whole tensor; infinity when a NaN is involved
};

// Nothing when the two have the same dtype, extents and bits. NaNs are equal when their bits are: a run that is all NaN
// must be caught elsewhere. Different extents give index -1.
std::optional<TensorDifference> CompareBits(ConstTensorView reference, ConstTensorView candidate);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_TENSOR_DIFFERENCE_H_
