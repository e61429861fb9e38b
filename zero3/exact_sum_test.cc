#include "evenkeel/zero3/exact_sum.h"

#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/base/philox.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

std::vector<float> Wild(int64_t count) {
  const PhiloxStream stream(PhiloxKey(3).Add("wild"));
  std::vector<float> x;
  for (int64_t i = 0; i < count; ++i) {
    const int exponent = static_cast<int>(stream.Below(static_cast<uint64_t>(2 * i), 120)) - 60;
    x.push_back(static_cast<float>(std::ldexp(stream.Uniform(static_cast<uint64_t>(2 * i + 1)) - 0.5, exponent)));
  }
  return x;
}

TEST(ExactSumTest, SimpleNorms) {
  const std::vector<float> x = {3, 4};
  ExactSumOfSquares sum;
  EXPECT_EQ(sum.Norm(), 0.0);
  EXPECT_TRUE(sum.is_zero());
  EXPECT_EQ(sum.Add(x.data(), 2), 0);
  EXPECT_EQ(sum.Norm(), 5.0);
  const std::vector<double> y = {12};
  sum.Add(y.data(), 1);
  EXPECT_EQ(sum.Norm(), 13.0);
}

// Any cut into shards, any order, f32 or the same values as f64: the same words.
TEST(ExactSumTest, Trail42_CutsDoNotMatter) {
  const std::vector<float> x = Wild(70001);
  ExactSumOfSquares whole;
  whole.Add(x.data(), static_cast<int64_t>(x.size()));
  for (int64_t pieces : {2, 3, 7, 100}) {
    ExactSumOfSquares total;
    for (int64_t p = pieces; p-- > 0;) {
      const int64_t begin = p * static_cast<int64_t>(x.size()) / pieces;
      const int64_t end = (p + 1) * static_cast<int64_t>(x.size()) / pieces;
      ExactSumOfSquares part;
      part.Add(x.data() + begin, end - begin);
      for (int i = 0; i < ExactSumOfSquares::kWords; ++i) {
        total.words()[static_cast<size_t>(i)] += part.words()[static_cast<size_t>(i)];
      }
    }
    total.Normalize();
    EXPECT_EQ(total.words(), whole.words());
    EXPECT_EQ(total.Norm(), whole.Norm());
  }
  const std::vector<double> wide(x.begin(), x.end());
  ExactSumOfSquares doubles;
  doubles.Add(wide.data(), static_cast<int64_t>(wide.size()));
  EXPECT_EQ(doubles.words(), whole.words());
  long double plain = 0;
  for (float v : x) plain += static_cast<long double>(v) * v;
  EXPECT_NEAR(whole.Norm(), static_cast<double>(std::sqrt(plain)), 1e-14 * whole.Norm());
}

TEST(ExactSumTest, ExtremesNeitherVanishNorOverflow) {
  const double tiny = std::numeric_limits<double>::denorm_min();
  ExactSumOfSquares sum;
  sum.Add(&tiny, 1);
  EXPECT_FALSE(sum.is_zero());
  EXPECT_EQ(sum.Norm(), tiny);
  const double huge = std::numeric_limits<double>::max();
  sum.Add(&huge, 1);
  EXPECT_EQ(sum.Norm(), huge);
  const std::vector<float> many(100000, std::numeric_limits<float>::max());
  ExactSumOfSquares floats;
  floats.Add(many.data(), static_cast<int64_t>(many.size()));
  EXPECT_NEAR(floats.Norm(), static_cast<double>(std::numeric_limits<float>::max()) * std::sqrt(1e5),
              1e-12 * floats.Norm());
  const float small = std::numeric_limits<float>::denorm_min();
  ExactSumOfSquares denormal;
  denormal.Add(&small, 1);
  EXPECT_EQ(denormal.Norm(), static_cast<double>(small));
}

TEST(ExactSumTest, NonFiniteIsCountedNotAdded) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x(40000, 1.0f);
  x[0] = inf;
  x[39999] = nan;
  x[20000] = -inf;
  ExactSumOfSquares sum;
  EXPECT_EQ(sum.Add(x.data(), static_cast<int64_t>(x.size())), 3);
  EXPECT_DOUBLE_EQ(sum.Norm(), std::sqrt(39997.0));
  const std::vector<double> y = {1.0, static_cast<double>(inf)};
  EXPECT_EQ(sum.Add(y.data(), 2), 1);
}

}  // namespace
}  // namespace evenkeel::zero3
