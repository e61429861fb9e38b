// Optimizer steps and whole-tensor reductions.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/ops/op_test_util.h"
#include "evenkeel/runtime/ops/optimizer.h"
#include "evenkeel/runtime/ops/reduce.h"
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
using ::evenkeel::testutil::View;
using ::testing::HasSubstr;

template <typename T>
class OptimizerTest : public OpTest {};
using MasterTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(OptimizerTest, MasterTypes);

TYPED_TEST(OptimizerTest, SgdFollowsItsFormula) {
  const int64_t n = 37;
  const auto gradient = RandomVector<TypeParam>(n, 1);
  for (double momentum : {0.0, 0.9}) {
    auto parameter = RandomVector<TypeParam>(n, 2), state = RandomVector<TypeParam>(n, 3);
    const auto p0 = parameter, m0 = state;
    const SgdOptions options{.learning_rate = 0.1, .momentum = momentum, .weight_decay = 0.01, .gradient_scale = 0.5};
    ASSERT_OK(SgdStep(options, View(gradient, {n}), momentum == 0 ? TensorView() : View(state, {n}),
                      View(parameter, {n}), this->stream_));
    for (int64_t i = 0; i < n; ++i) {
      const double m = momentum * m0[i] + 0.5 * gradient[i] + 0.01 * p0[i];
      if (momentum != 0) {
        ASSERT_NEAR(state[i], m, 4 * kEpsilon<TypeParam>);
      }
      ASSERT_NEAR(parameter[i], p0[i] - 0.1 * m, 4 * kEpsilon<TypeParam>);
    }
  }
}

TYPED_TEST(OptimizerTest, AdamWFollowsItsAlgorithmOverManySteps) {
  const int64_t n = 21;
  auto parameter = RandomVector<TypeParam>(n, 2);
  std::vector<TypeParam> first(n, TypeParam{0}), second(n, TypeParam{0});
  std::vector<double> p(parameter.begin(), parameter.end()), m(n, 0.0), v(n, 0.0);
  AdamWOptions options{.learning_rate = 0.01, .weight_decay = 0.1, .gradient_scale = 2};
  for (int64_t step = 1; step <= 20; ++step) {
    options.step = step;
    const auto gradient = RandomVector<TypeParam>(n, 100 + step);
    ASSERT_OK(AdamWStep(options, View(gradient, {n}), View(first, {n}), View(second, {n}), View(parameter, {n}),
                        this->stream_));
    for (int64_t i = 0; i < n; ++i) {
      const double g = 2 * static_cast<double>(gradient[i]);
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.999 * v[i] + 0.001 * g * g;
      const double m_hat = m[i] / (1 - std::pow(0.9, step)), v_hat = v[i] / (1 - std::pow(0.999, step));
      p[i] = p[i] - 0.01 * 0.1 * p[i] - 0.01 * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
  }
  // Each step moves by about 0.01 and errs by a few roundings of that and one of the parameter; small second
  // moments lose relative accuracy in 1 - beta2 (0.001 from 0.999: 2^-24 / 0.001).
  for (int64_t i = 0; i < n; ++i) ASSERT_NEAR(parameter[i], p[i], 20 * 0.01 * 1000 * kEpsilon<TypeParam>);
}

// The same parameters in other shards: same bits.
TYPED_TEST(OptimizerTest, ShardingChangesNoBit) {
  const int64_t n = 101;
  const auto gradient = RandomVector<TypeParam>(n, 1);
  auto whole = RandomVector<TypeParam>(n, 2);
  auto parts = whole;
  std::vector<TypeParam> m(n, TypeParam{0}), v(n, TypeParam{0}), pm(n, TypeParam{0}), pv(n, TypeParam{0});
  const AdamWOptions options{.learning_rate = 0.01, .weight_decay = 0.1, .step = 3};
  ASSERT_OK(AdamWStep(options, View(gradient, {n}), View(m, {n}), View(v, {n}), View(whole, {n}), this->stream_));
  for (int64_t begin = 0; begin < n; begin += 17) {
    const int64_t count = std::min<int64_t>(17, n - begin);
    ASSERT_OK(AdamWStep(options, View(gradient, {n}).Rows(begin, count), View(pm, {n}).Rows(begin, count),
                        View(pv, {n}).Rows(begin, count), View(parts, {n}).Rows(begin, count), this->stream_));
  }
  EXPECT_EQ(FirstDifference(whole.data(), parts.data(), n), -1);
  EXPECT_EQ(FirstDifference(v.data(), pv.data(), n), -1);
}

using OptimizerErrorTest = OpTest;

TEST_F(OptimizerErrorTest, BadArguments) {
  std::vector<float> p(4), g(4), m(4), small(3);
  std::vector<BF16> low(4);
  EXPECT_THAT(SgdStep({.learning_rate = 0.1}, View(small, {3}), {}, View(p, {4}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gradient is f32 [3], it must be f32 [4]")));
  EXPECT_THAT(SgdStep({.learning_rate = 0.1}, View(low, {4}), {}, View(low, {4}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be f32 or f64")));
  EXPECT_THAT(SgdStep({.learning_rate = 0.1, .momentum = 0.9}, View(g, {4}), {}, View(p, {4}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("momentum is f32 [0]")));
  EXPECT_THAT(SgdStep({.learning_rate = 0.1, .momentum = 1}, View(g, {4}), View(m, {4}), View(p, {4}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("momentum 1")));
  EXPECT_THAT(
      AdamWStep({.learning_rate = 0.1, .step = 0}, View(g, {4}), View(m, {4}), View(m, {4}), View(p, {4}), stream_),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("step 0")));
  std::vector<float> none;
  EXPECT_OK(SgdStep({.learning_rate = 0.1}, View(none, {0}), {}, View(none, {0}), stream_));
}

template <typename T>
class ReduceTest : public OpTest {
 protected:
  double SquaresOf(const std::vector<T>& x) {
    std::vector<double> out(1, std::nan(""));
    EXPECT_OK(SumOfSquares(View(x, {static_cast<int64_t>(x.size())}), View(out, {1}), this->stream_));
    return out[0];
  }
  int32_t FiniteOf(const std::vector<T>& x) {
    std::vector<int32_t> out(1, -1);
    EXPECT_OK(AllFinite(View(x, {static_cast<int64_t>(x.size())}), View(out, {1}), this->stream_));
    return out[0];
  }
};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(ReduceTest, Types);

TYPED_TEST(ReduceTest, SumOfSquaresAgreesAndIgnoresZerosBehind) {
  for (int64_t n : {0, 1, 7, 1023, 1024, 1025, 5000}) {
    auto x = RandomVector<TypeParam>(n, n + 1);
    double wanted = 0;
    for (TypeParam value : x) wanted += AsDouble(value) * AsDouble(value);
    const double got = this->SquaresOf(x);
    EXPECT_NEAR(got, wanted, 150 * kEpsilon<double> * wanted);  // depth: 128 in a lane, a few levels above
    for (int64_t behind : {1, 1000, 5000}) {
      x.resize(n + behind, TypeParam(0.0f));
      EXPECT_EQ(this->SquaresOf(x), got) << n << " " << behind;
      x.resize(n);
    }
  }
}

TYPED_TEST(ReduceTest, FindsEveryNonFiniteElement) {
  std::vector<TypeParam> x = RandomVector<TypeParam>(77, 1);
  EXPECT_EQ(this->FiniteOf(x), 1);
  EXPECT_EQ(this->FiniteOf({}), 1);
  for (int64_t i = 0; i < 77; ++i) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity()}) {
      const TypeParam kept = x[i];
      x[i] = static_cast<TypeParam>(bad);
      ASSERT_EQ(this->FiniteOf(x), 0) << i;
      x[i] = kept;
    }
  }
}

TYPED_TEST(ReduceTest, SumIsExactForSmallIntegers) {
  std::vector<TypeParam> x(3000);
  double wanted = 0;
  for (int i = 0; i < 3000; ++i) {
    x[i] = static_cast<TypeParam>(static_cast<float>(i % 200));
    wanted += i % 200;
  }
  std::vector<double> out(1);
  ASSERT_OK(Sum(View(x, {3, 1000}), View(out, {1}), this->stream_));
  EXPECT_EQ(out[0], wanted);
}

}  // namespace
}  // namespace evenkeel
