#include "evenkeel/runtime/ops/activation.h"

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "evenkeel/runtime/ops/op_test_util.h"
#include "evenkeel/runtime/ops/vector_math.h"
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

// Distance in units of the last place of the wanted float.
double Ulps(float got, double wanted) {
  const float nearest = static_cast<float>(wanted);
  if (std::isinf(nearest) || std::isinf(got)) return got == nearest ? 0 : 1e9;
  int exponent = 0;
  std::frexp(nearest, &exponent);
  return std::fabs(static_cast<double>(got) - wanted) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

TEST(VectorMathTest, ExpIsWithinTwoUlpOfDoubleOverAllFloats) {
  double worst = 0;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 509) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(x)) continue;
    worst = std::max(worst, Ulps(ops_internal::Exp(x), std::exp(static_cast<double>(x))));
  }
  EXPECT_LE(worst, 2.0);
}

TEST(VectorMathTest, ExpAtTheEdges) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(ops_internal::Exp(0.0f), 1.0f);
  EXPECT_EQ(ops_internal::Exp(-0.0f), 1.0f);
  EXPECT_EQ(ops_internal::Exp(infinity), infinity);
  EXPECT_EQ(ops_internal::Exp(-infinity), 0.0f);
  EXPECT_EQ(ops_internal::Exp(89.0f), infinity);
  EXPECT_EQ(ops_internal::Exp(-104.0f), 0.0f);
  EXPECT_TRUE(std::isnan(ops_internal::Exp(std::numeric_limits<float>::quiet_NaN())));
}

// The textbook forms in double; nothing shared with the kernels.
double GeluReference(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double SiluReference(double x) { return x / (1 + std::exp(-x)); }
double Slope(const std::function<double(double)>& f, double x) { return (f(x + 1e-6) - f(x - 1e-6)) / 2e-6; }

template <typename T>
class ActivationTest : public OpTest {
 protected:
  // Rounding of the result, and of the few operations before it (in f32 for 16-bit elements).
  static double Bound(double wanted, double magnitude) {
    const double wide = sizeof(T) == 2 ? kEpsilon<float> : kEpsilon<T>;
    return StoreError<T>(wanted) + 16 * wide * magnitude;
  }
  std::vector<T> Inputs() const {
    std::vector<T> x = RandomVector<T>(1003, 5, 6.0);
    x[0] = T(0.0f);
    x[1] = T(40.0f);
    x[2] = T(-40.0f);
    return x;
  }
};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(ActivationTest, Types);

TYPED_TEST(ActivationTest, ForwardAgreesWithDouble) {
  const auto x = this->Inputs();
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<TypeParam> gelu(n), silu(n);
  ASSERT_OK(GeluForward(View(x, {n}), View(gelu, {n}), this->stream_));
  ASSERT_OK(SiluForward(View(x, {n}), View(silu, {n}), this->stream_));
  for (int64_t i = 0; i < n; ++i) {
    const double v = AsDouble(x[i]), size = std::max(1.0, std::fabs(v));
    ASSERT_NEAR(AsDouble(gelu[i]), GeluReference(v), this->Bound(GeluReference(v), size)) << v;
    ASSERT_NEAR(AsDouble(silu[i]), SiluReference(v), this->Bound(SiluReference(v), size)) << v;
  }
}

TYPED_TEST(ActivationTest, BackwardIsTheSlope) {
  const auto x = this->Inputs();
  const int64_t n = static_cast<int64_t>(x.size());
  const auto dy = RandomVector<TypeParam>(n, 6);
  std::vector<TypeParam> gelu(n), silu(n);
  ASSERT_OK(GeluBackward(View(x, {n}), View(dy, {n}), View(gelu, {n}), this->stream_));
  ASSERT_OK(SiluBackward(View(x, {n}), View(dy, {n}), View(silu, {n}), this->stream_));
  for (int64_t i = 0; i < n; ++i) {
    const double v = AsDouble(x[i]), d = AsDouble(dy[i]), size = std::max(1.0, std::fabs(v));
    const double difference_error = 1e-8 * size;  // of the quotient: 2^-53 * |f| / 1e-6 and the third derivative
    ASSERT_NEAR(AsDouble(gelu[i]), d * Slope(GeluReference, v), this->Bound(2 * d, 4 * size) + difference_error) << v;
    ASSERT_NEAR(AsDouble(silu[i]), d * Slope(SiluReference, v), this->Bound(2 * d, 4 * size) + difference_error) << v;
  }
}

TYPED_TEST(ActivationTest, SwiGluForwardAndBackward) {
  const auto gate = this->Inputs();
  const int64_t n = static_cast<int64_t>(gate.size());
  const auto up = RandomVector<TypeParam>(n, 7), dy = RandomVector<TypeParam>(n, 8);
  std::vector<TypeParam> y(n), dgate(n), dup(n);
  ASSERT_OK(SwiGluForward(View(gate, {n}), View(up, {n}), View(y, {n}), this->stream_));
  ASSERT_OK(
      SwiGluBackward(View(gate, {n}), View(up, {n}), View(dy, {n}), View(dgate, {n}), View(dup, {n}), this->stream_));
  for (int64_t i = 0; i < n; ++i) {
    const double g = AsDouble(gate[i]), u = AsDouble(up[i]), d = AsDouble(dy[i]), size = std::max(1.0, std::fabs(g));
    ASSERT_NEAR(AsDouble(y[i]), SiluReference(g) * u, this->Bound(size * u, size));
    ASSERT_NEAR(AsDouble(dup[i]), SiluReference(g) * d, this->Bound(size * d, size));
    ASSERT_NEAR(AsDouble(dgate[i]), d * u * Slope(SiluReference, g), this->Bound(2 * d * u, 4 * size) + 1e-8 * size);
  }
}

TYPED_TEST(ActivationTest, InPlaceGivesTheSameBitsAndElementsAreIndependent) {
  const auto x = this->Inputs();
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<TypeParam> y(n);
  ASSERT_OK(GeluForward(View(x, {n}), View(y, {n}), this->stream_));
  auto in_place = x;
  ASSERT_OK(GeluForward(View(in_place, {n}), View(in_place, {n}), this->stream_));
  EXPECT_EQ(FirstDifference(y.data(), in_place.data(), n), -1);
  // Vectorized middle and scalar rest must agree: element by element, alone.
  for (int64_t i = 0; i < n; ++i) {
    std::vector<TypeParam> one = {x[i]};
    ASSERT_OK(GeluForward(View(one, {1}), View(one, {1}), this->stream_));
    ASSERT_EQ(FirstDifference(one.data(), y.data() + i, 1), -1) << i;
  }
  auto dy = RandomVector<TypeParam>(n, 6);
  std::vector<TypeParam> dx(n);
  ASSERT_OK(SiluBackward(View(x, {n}), View(dy, {n}), View(dx, {n}), this->stream_));
  ASSERT_OK(SiluBackward(View(x, {n}), View(dy, {n}), View(dy, {n}), this->stream_));
  EXPECT_EQ(FirstDifference(dx.data(), dy.data(), n), -1);
}

using ActivationErrorTest = OpTest;

TEST_F(ActivationErrorTest, NanStaysAndBadArgumentsAreRefused) {
  std::vector<float> x = {std::numeric_limits<float>::quiet_NaN()}, y(1), two(2);
  ASSERT_OK(GeluForward(View(x, {1}), View(y, {1}), stream_));
  EXPECT_TRUE(std::isnan(y[0]));
  EXPECT_THAT(GeluForward(View(x, {1}), View(two, {2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("y is f32 [2], it must be f32 [1]")));
  std::vector<int32_t> ints(1);
  EXPECT_THAT(SiluForward(View(ints, {1}), View(ints, {1}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not i32")));
  EXPECT_THAT(SwiGluBackward(View(x, {1}), View(x, {1}), View(x, {1}), View(y, {1}), View(y, {1}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("same memory")));
  std::vector<float> none;
  EXPECT_OK(GeluForward(View(none, {0}), View(none, {0}), stream_));
}

}  // namespace
}  // namespace evenkeel
