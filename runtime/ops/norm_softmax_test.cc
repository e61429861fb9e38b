// RMSNorm, softmax and cross entropy against double arithmetic; gradients against difference quotients in f64.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/ops/norm.h"
#include "evenkeel/runtime/ops/op_test_util.h"
#include "evenkeel/runtime/ops/softmax.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::AsDouble;
using ::evenkeel::testutil::FirstDifference;
using ::evenkeel::testutil::kEpsilon;
using ::evenkeel::testutil::OpTest;
using ::evenkeel::testutil::RandomVector;
using ::evenkeel::testutil::StatusIs;
using ::evenkeel::testutil::StoreError;
using ::evenkeel::testutil::View;
using ::testing::HasSubstr;

template <typename T>
class RowOpTest : public OpTest {
 public:
  using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(RowOpTest, Types);

TYPED_TEST(RowOpTest, RmsNormForwardAgreesWithDouble) {
  using W = typename TestFixture::W;
  for (int64_t n : {1, 7, 64, 100}) {
    const int64_t rows = 5;
    const auto x = RandomVector<TypeParam>(rows * n, 1), weight = RandomVector<TypeParam>(n, 2);
    std::vector<TypeParam> y(rows * n);
    std::vector<W> inverse(rows);
    ASSERT_OK(RmsNormForward(View(x, {rows, n}), View(weight, {n}), 1e-3, View(y, {rows, n}), View(inverse, {rows}),
                             this->stream_));
    for (int64_t i = 0; i < rows; ++i) {
      double squares = 0;
      for (int64_t j = 0; j < n; ++j) squares += AsDouble(x[i * n + j]) * AsDouble(x[i * n + j]);
      const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-3);
      for (int64_t j = 0; j < n; ++j) {
        const double wanted = AsDouble(x[i * n + j]) * scale * AsDouble(weight[j]);
        // The squares are all positive: their sum errs relatively by at most n / 8 + 5 roundings.
        const double bound =
            StoreError<TypeParam>(wanted) + (static_cast<double>(n) / 8 + 10) * kEpsilon<W> * std::fabs(wanted);
        ASSERT_NEAR(AsDouble(y[i * n + j]), wanted, bound);
      }
    }
  }
}

TYPED_TEST(RowOpTest, SoftmaxAgreesWithDoubleAndRowsAreIndependent) {
  for (int64_t n : {1, 3, 8, 65, 256}) {
    const int64_t rows = 6;
    const auto x = RandomVector<TypeParam>(rows * n, 1, 10.0);
    std::vector<TypeParam> y(rows * n);
    ASSERT_OK(SoftmaxForward(View(x, {rows, n}), View(y, {rows, n}), this->stream_));
    for (int64_t i = 0; i < rows; ++i) {
      double max = -1e300, sum = 0;
      for (int64_t j = 0; j < n; ++j) max = std::max(max, AsDouble(x[i * n + j]));
      for (int64_t j = 0; j < n; ++j) sum += std::exp(AsDouble(x[i * n + j]) - max);
      for (int64_t j = 0; j < n; ++j) {
        const double wanted = std::exp(AsDouble(x[i * n + j]) - max) / sum;
        const double wide = sizeof(TypeParam) == 2 ? kEpsilon<float> : kEpsilon<TypeParam>;
        // exp of a rounded difference up to 20, a sum of n positive terms, a division.
        const double bound = StoreError<TypeParam>(wanted) + (20 + static_cast<double>(n) / 8 + 10) * wide * wanted;
        ASSERT_NEAR(AsDouble(y[i * n + j]), wanted, bound + 1e-40);
      }
    }
    auto alone = std::vector<TypeParam>(x.begin() + 4 * n, x.begin() + 5 * n);
    ASSERT_OK(SoftmaxForward(View(alone, {1, n}), View(alone, {1, n}), this->stream_));  // in place
    EXPECT_EQ(FirstDifference(alone.data(), y.data() + 4 * n, n), -1);
  }
}

TYPED_TEST(RowOpTest, CrossEntropyAgreesWithDouble) {
  const int64_t rows = 9, n = 50;
  const auto logits = RandomVector<TypeParam>(rows * n, 3, 8.0);
  std::vector<int32_t> targets = {0, 49, 7, -1, 13, 21, -1, 5, 1};
  std::vector<TypeParam> probabilities(rows * n), dlogits(rows * n);
  std::vector<double> loss(1, std::nan(""));
  ASSERT_OK(CrossEntropyForward(View(logits, {rows, n}), View(targets, {rows}), 14, View(probabilities, {rows, n}),
                                View(loss, {1}), this->stream_));
  ASSERT_OK(CrossEntropyBackward(View(probabilities, {rows, n}), View(targets, {rows}), 14, View(dlogits, {rows, n}),
                                 this->stream_));
  double wanted = 0;
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += std::exp(AsDouble(logits[i * n + j]));
    if (targets[i] >= 0) wanted += std::log(sum) - AsDouble(logits[i * n + targets[i]]);
    for (int64_t j = 0; j < n; ++j) {
      const double p = std::exp(AsDouble(logits[i * n + j])) / sum;
      const double slope = targets[i] < 0 ? 0 : (p - (j == targets[i] ? 1 : 0)) / 14;
      ASSERT_NEAR(AsDouble(dlogits[i * n + j]), slope, 3 * kEpsilon<TypeParam> / 14 + 1e-6 * (p + 1e-3) / 14);
    }
  }
  const double wide = sizeof(TypeParam) == 2 ? kEpsilon<float> : kEpsilon<TypeParam>;
  EXPECT_NEAR(loss[0], wanted / 14, 40 * wide * 7);
}

// The gradient of sum(dy * f(x)) by central differences, in f64.
using GradientTest = OpTest;

TEST_F(GradientTest, RmsNormBackward) {
  const int64_t rows = 3, n = 10;
  auto x = RandomVector<double>(rows * n, 1), weight = RandomVector<double>(n, 2);
  const auto dy = RandomVector<double>(rows * n, 3);
  std::vector<double> y(rows * n), inverse(rows), dx(rows * n), dweight = RandomVector<double>(n, 4);
  const std::vector<double> before = dweight;
  auto value = [&] {
    EXPECT_OK(RmsNormForward(View(x, {rows, n}), View(weight, {n}), 1e-2, View(y, {rows, n}), View(inverse, {rows}),
                             stream_));
    double sum = 0;
    for (int64_t i = 0; i < rows * n; ++i) sum += y[i] * dy[i];
    return sum;
  };
  auto slope = [&](double& at) {
    const double old = at;
    at = old + 1e-6;
    const double high = value();
    at = old - 1e-6;
    const double low = value();
    at = old;
    return (high - low) / 2e-6;
  };
  value();
  ASSERT_OK(RmsNormBackward(View(x, {rows, n}), View(weight, {n}), View(inverse, {rows}), View(dy, {rows, n}),
                            View(dx, {rows, n}), View(dweight, {n}), stream_));
  for (int64_t i = 0; i < rows * n; ++i) ASSERT_NEAR(dx[i], slope(x[i]), 1e-7);
  for (int64_t j = 0; j < n; ++j) ASSERT_NEAR(dweight[j] - before[j], slope(weight[j]), 1e-7);
}

TEST_F(GradientTest, RmsNormBackwardInPlaceAndMixedDtypes) {
  const int64_t rows = 140, n = 16;
  const auto x = RandomVector<BF16>(rows * n, 1), weight = RandomVector<BF16>(n, 2);
  auto dy = RandomVector<BF16>(rows * n, 3);
  std::vector<BF16> y(rows * n), dx(rows * n);
  std::vector<float> inverse(rows), dweight(n, 0.0f), again(n, 0.0f);
  ASSERT_OK(
      RmsNormForward(View(x, {rows, n}), View(weight, {n}), 1e-2, View(y, {rows, n}), View(inverse, {rows}), stream_));
  ASSERT_OK(RmsNormBackward(View(x, {rows, n}), View(weight, {n}), View(inverse, {rows}), View(dy, {rows, n}),
                            View(dx, {rows, n}), View(dweight, {n}), stream_));
  double wanted = 0;
  for (int64_t i = 0; i < rows; ++i) wanted += AsDouble(dy[i * n]) * AsDouble(x[i * n]) * inverse[i];
  EXPECT_NEAR(dweight[0], wanted, 140 * kEpsilon<float> * 140);
  ASSERT_OK(RmsNormBackward(View(x, {rows, n}), View(weight, {n}), View(inverse, {rows}), View(dy, {rows, n}),
                            View(dy, {rows, n}), View(again, {n}), stream_));
  EXPECT_EQ(FirstDifference(dx.data(), dy.data(), rows * n), -1);
  EXPECT_EQ(FirstDifference(dweight.data(), again.data(), n), -1);
}

TEST_F(GradientTest, SoftmaxBackward) {
  const int64_t rows = 2, n = 13;
  auto x = RandomVector<double>(rows * n, 1, 3.0);
  auto dy = RandomVector<double>(rows * n, 3);
  std::vector<double> y(rows * n), shifted(rows * n), dx(rows * n);
  ASSERT_OK(SoftmaxForward(View(x, {rows, n}), View(y, {rows, n}), stream_));
  ASSERT_OK(SoftmaxBackward(View(y, {rows, n}), View(dy, {rows, n}), View(dx, {rows, n}), stream_));
  for (int64_t i = 0; i < rows * n; ++i) {
    double sums[2];
    for (int side : {0, 1}) {
      auto moved = x;
      moved[i] += side == 0 ? 1e-6 : -1e-6;
      ASSERT_OK(SoftmaxForward(View(moved, {rows, n}), View(shifted, {rows, n}), stream_));
      sums[side] = 0;
      for (int64_t j = 0; j < rows * n; ++j) sums[side] += shifted[j] * dy[j];
    }
    ASSERT_NEAR(dx[i], (sums[0] - sums[1]) / 2e-6, 1e-8);
  }
}

TEST_F(GradientTest, SpecialValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (int64_t place = 0; place < 11; ++place) {
    std::vector<float> row(11, 0.5f), out(11);
    row[place] = nan;
    ASSERT_OK(SoftmaxForward(View(row, {1, 11}), View(out, {1, 11}), stream_));
    for (float value : out) EXPECT_TRUE(std::isnan(value)) << place;
    row[place] = -infinity;
    ASSERT_OK(SoftmaxForward(View(row, {1, 11}), View(out, {1, 11}), stream_));
    EXPECT_EQ(out[place], 0.0f);
    EXPECT_NEAR(out[(place + 1) % 11], 0.1f, 1e-7);
    row[place] = 3e38f;  // far apart, no overflow
    ASSERT_OK(SoftmaxForward(View(row, {1, 11}), View(out, {1, 11}), stream_));
    EXPECT_EQ(out[place], 1.0f);
  }
}

TEST_F(GradientTest, LossIsFiniteWhenTheProbabilityVanishes) {
  std::vector<float> logits = {0, 200}, probabilities(2);
  std::vector<int32_t> targets = {0};
  std::vector<double> loss(1);
  ASSERT_OK(CrossEntropyForward(View(logits, {1, 2}), View(targets, {1}), 1, View(probabilities, {1, 2}),
                                View(loss, {1}), stream_));
  EXPECT_EQ(probabilities[0], 0.0f);
  EXPECT_DOUBLE_EQ(loss[0], 200);
}

TEST_F(GradientTest, BadArguments) {
  std::vector<float> x(6), y(6), probabilities(6), inverse(2), weight(3);
  std::vector<double> loss(1);
  std::vector<int32_t> targets = {0, 3};
  EXPECT_THAT(RmsNormForward(View(x, {2, 3}), View(inverse, {2}), 0, View(y, {2, 3}), View(inverse, {2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight is f32 [2], its shape must be [3]")));
  EXPECT_THAT(RmsNormForward(View(x, {2, 3}), View(weight, {3}), -1, View(y, {2, 3}), View(inverse, {2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("epsilon is -1")));
  std::vector<float> none;
  EXPECT_THAT(SoftmaxForward(View(none, {2, 0}), View(none, {2, 0}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[2, 0]")));
  EXPECT_OK(SoftmaxForward(View(none, {0, 5}), View(none, {0, 5}), stream_));
  EXPECT_THAT(CrossEntropyForward(View(x, {2, 3}), View(targets, {2}), 0, View(probabilities, {2, 3}), View(loss, {1}),
                                  stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("denominator is 0")));
  EXPECT_THAT(CrossEntropyForward(View(x, {2, 3}), View(targets, {2}), 2, View(probabilities, {2, 3}), View(loss, {1}),
                                  stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("target of row 1 is 3, of 3")));
}

}  // namespace
}  // namespace evenkeel
