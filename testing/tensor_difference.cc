#include "evenkeel/testing/tensor_difference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace evenkeel::testutil {
namespace {

// Maps the bits of a floating number to integers in the order of the numbers.
int64_t Ordered(uint64_t bits, int width) {
  const uint64_t sign = uint64_t{1} << (width - 1);
  return (bits & sign) != 0 ? -static_cast<int64_t>(bits & (sign - 1)) - 1 : static_cast<int64_t>(bits);
}

int64_t OrderedOf(DType dtype, double x) {
  switch (dtype) {
    case DType::kF32:
      return Ordered(std::bit_cast<uint32_t>(static_cast<float>(x)), 32);
    case DType::kBF16:
      return Ordered(BF16(static_cast<float>(x)).bits, 16);
    case DType::kF16:
      return Ordered(F16(static_cast<float>(x)).bits, 16);
    default:
      return Ordered(std::bit_cast<uint64_t>(x), 64);
  }
}

double Distance(double a, double b) {
  const double distance = std::abs(a - b);
  return std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance;
}

}  // namespace

double ElementOf(ConstTensorView view, int64_t i) {
  switch (view.dtype()) {
    case DType::kF32:
      return static_cast<double>(view.data<float>()[i]);
    case DType::kBF16:
      return static_cast<double>(static_cast<float>(view.data<BF16>()[i]));
    case DType::kF16:
      return static_cast<double>(static_cast<float>(view.data<F16>()[i]));
    default:
      return view.data<double>()[i];
  }
}

double UlpsBetween(DType dtype, double a, double b) {
  constexpr double kFar = 4611686018427387904.0;  // 2^62
  if (std::isnan(a) || std::isnan(b)) return kFar;
  // Exact when both have one sign; else each is at most 2^63 away from zero, and the sum of two doubles will do.
  const int64_t to = OrderedOf(dtype, a), from = OrderedOf(dtype, b);
  const bool same_side = (to < 0) == (from < 0);
  const double steps = same_side ? static_cast<double>(to - from) : static_cast<double>(to) - static_cast<double>(from);
  return std::min(std::abs(steps), kFar);
}

std::optional<TensorDifference> CompareBits(ConstTensorView reference, ConstTensorView candidate) {
  TensorDifference difference;
  if (reference.dtype() != candidate.dtype() || reference.shape() != candidate.shape()) {
    difference.index = -1;
    difference.reference = static_cast<double>(reference.num_elements());
    difference.candidate = static_cast<double>(candidate.num_elements());
    difference.max_abs_diff = std::numeric_limits<double>::infinity();
    return difference;
  }
  if (reference.num_bytes() == 0 || std::memcmp(reference.raw(), candidate.raw(), reference.num_bytes()) == 0) {
    return std::nullopt;
  }
  const int64_t size = SizeOf(reference.dtype());
  bool found = false;
  for (int64_t i = 0; i < reference.num_elements(); ++i) {
    const auto* a = static_cast<const char*>(reference.raw()) + i * size;
    const auto* b = static_cast<const char*>(candidate.raw()) + i * size;
    if (std::memcmp(a, b, size) == 0) continue;
    const double wanted = ElementOf(reference, i), got = ElementOf(candidate, i);
    if (!found) difference = {i, wanted, got, UlpsBetween(reference.dtype(), wanted, got), 0};
    found = true;
    difference.max_abs_diff = std::max(difference.max_abs_diff, Distance(wanted, got));
  }
  return difference;
}

}  // namespace evenkeel::testutil
