#include "evenkeel/testing/tensor_difference.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

ConstTensorView View(const std::vector<float>& x) {
  return ConstTensorView(x.data(), DType::kF32, {static_cast<int64_t>(x.size())});
}

TEST(TensorDifferenceTest, EqualBitsAreNoDifference) {
  const std::vector<float> a = {1, -0.0f, std::nanf("")}, b = a;
  EXPECT_FALSE(CompareBits(View(a), View(b)).has_value());
  EXPECT_FALSE(CompareBits(View({}), View({})).has_value());
}

TEST(TensorDifferenceTest, TheFirstDifferenceIsLocatedAndTheLargestMeasured) {
  const std::vector<float> a = {1, 2, 3, 4}, b = {1, std::nextafter(2.0f, 3.0f), 3, 4.5f};
  const auto difference = CompareBits(View(a), View(b));
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->index, 1);
  EXPECT_EQ(difference->reference, 2);
  EXPECT_EQ(difference->ulps, 1);
  EXPECT_EQ(difference->max_abs_diff, 0.5);
}

TEST(TensorDifferenceTest, SignedZerosAndNansDiffer) {
  const std::vector<float> zero = {0.0f}, minus = {-0.0f}, nan = {std::nanf("")};
  ASSERT_TRUE(CompareBits(View(zero), View(minus)).has_value());
  EXPECT_EQ(CompareBits(View(zero), View(minus))->ulps, 1);
  ASSERT_TRUE(CompareBits(View(zero), View(nan)).has_value());
  EXPECT_EQ(CompareBits(View(zero), View(nan))->max_abs_diff, std::numeric_limits<double>::infinity());
  EXPECT_GT(CompareBits(View(zero), View(nan))->ulps, 1e18);
}

TEST(TensorDifferenceTest, OtherExtentsAreADifference) {
  const std::vector<float> a = {1, 2}, b = {1};
  ASSERT_TRUE(CompareBits(View(a), View(b)).has_value());
  EXPECT_EQ(CompareBits(View(a), View(b))->index, -1);
}

TEST(TensorDifferenceTest, UlpsCountStepsOnEachTypesGrid) {
  EXPECT_EQ(UlpsBetween(DType::kF32, 1.0, 1.0 + std::ldexp(1.0, -23)), 1);
  EXPECT_EQ(UlpsBetween(DType::kBF16, 1.0, 1.0 + std::ldexp(1.0, -7)), 1);
  EXPECT_EQ(UlpsBetween(DType::kF16, 1.0, 1.0 + std::ldexp(1.0, -10)), 1);
  EXPECT_EQ(UlpsBetween(DType::kF16, 0.0, std::ldexp(1.0, -24)), 1);
  EXPECT_EQ(UlpsBetween(DType::kF64, 1.0, std::nextafter(1.0, 2.0)), 1);
  EXPECT_EQ(UlpsBetween(DType::kF32, -std::ldexp(1.0, -149), std::ldexp(1.0, -149)), 3);  // by way of -0 and +0
  const std::vector<BF16> a = {BF16(1.5f)}, b = {BF16(-3.0f)};
  const auto difference =
      CompareBits(ConstTensorView(a.data(), DType::kBF16, {1}), ConstTensorView(b.data(), DType::kBF16, {1}));
  ASSERT_TRUE(difference.has_value());
  EXPECT_EQ(difference->max_abs_diff, 4.5);
}

}  // namespace
}  // namespace evenkeel::testutil
