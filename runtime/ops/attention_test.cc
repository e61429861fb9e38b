#include "evenkeel/runtime/ops/attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/ops/op_test_util.h"
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
struct Case {
  AttentionSizes sizes;
  std::vector<T> q, k, v, dout, probabilities, out, dq, dk, dv;

  explicit Case(const AttentionSizes& s) : sizes(s) {
    const int64_t count = s.batch * s.sequence * s.heads * s.head_dim;
    q = RandomVector<T>(count, 1, 2.0);
    k = RandomVector<T>(count, 2, 2.0);
    v = RandomVector<T>(count, 3);
    dout = RandomVector<T>(count, 4);
    const T nan = T(std::numeric_limits<float>::quiet_NaN());
    probabilities.assign(s.batch * s.heads * s.sequence * s.sequence, nan);
    out = dq = dk = dv = std::vector<T>(count, nan);
  }
  Shape Rows() const { return {sizes.batch * sizes.sequence, sizes.heads * sizes.head_dim}; }
  Shape Square() const { return {sizes.batch * sizes.heads, sizes.sequence, sizes.sequence}; }
  absl::Status Forward(Stream& stream) {
    return CausalAttentionForward(sizes, View(q, Rows()), View(k, Rows()), View(v, Rows()),
                                  View(probabilities, Square()), View(out, Rows()), stream);
  }
  absl::Status Backward(Stream& stream) {
    const auto& p = probabilities;
    return CausalAttentionBackward(sizes, View(q, Rows()), View(k, Rows()), View(v, Rows()), View(p, Square()),
                                   View(dout, Rows()), View(dq, Rows()), View(dk, Rows()), View(dv, Rows()), stream);
  }
  int64_t At(int64_t b, int64_t t, int64_t a, int64_t i) const {
    return ((b * sizes.sequence + t) * sizes.heads + a) * sizes.head_dim + i;
  }
};

template <typename T>
class AttentionTest : public OpTest {};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(AttentionTest, Types);

TYPED_TEST(AttentionTest, ForwardAgreesWithDouble) {
  for (const AttentionSizes& s :
       {AttentionSizes{2, 9, 3, 5}, AttentionSizes{1, 1, 1, 1}, AttentionSizes{1, 33, 2, 16}}) {
    Case<TypeParam> run(s);
    ASSERT_OK(run.Forward(this->stream_));
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t a = 0; a < s.heads; ++a) {
        for (int64_t t = 0; t < s.sequence; ++t) {
          std::vector<double> p(t + 1);
          double sum = 0;
          for (int64_t j = 0; j <= t; ++j) {
            double dot = 0;
            for (int64_t i = 0; i < s.head_dim; ++i) {
              dot += AsDouble(run.q[run.At(b, t, a, i)]) * AsDouble(run.k[run.At(b, j, a, i)]);
            }
            p[j] = std::exp(dot / std::sqrt(static_cast<double>(s.head_dim)));
            sum += p[j];
          }
          for (int64_t i = 0; i < s.head_dim; ++i) {
            double wanted = 0;
            for (int64_t j = 0; j <= t; ++j) wanted += p[j] / sum * AsDouble(run.v[run.At(b, j, a, i)]);
            // Scores below 4 * head_dim / sqrt(head_dim) <= 16, sums of at most 33 terms of weight 1 in all; for 16
            // bits the probabilities are rounded too.
            const double wide = sizeof(TypeParam) == 2 ? kEpsilon<float> : kEpsilon<TypeParam>;
            ASSERT_NEAR(AsDouble(run.out[run.At(b, t, a, i)]), wanted,
                        64 * wide + (sizeof(TypeParam) == 2 ? 0x1p-7 : 0));
          }
        }
      }
    }
  }
}

TYPED_TEST(AttentionTest, TheFutureAndOtherHeadsAndSequencesDoNotMatter) {
  const AttentionSizes s{2, 12, 2, 8};
  Case<TypeParam> run(s);
  ASSERT_OK(run.Forward(this->stream_));
  Case<TypeParam> changed(s);
  for (int64_t i = 0; i < s.head_dim; ++i) {
    changed.k[changed.At(1, 7, 0, i)] = TypeParam(9.0f);
    changed.v[changed.At(1, 7, 0, i)] = TypeParam(9.0f);
  }
  ASSERT_OK(changed.Forward(this->stream_));
  int64_t differing = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 12; ++t) {
      for (int64_t a = 0; a < 2; ++a) {
        const int64_t at = run.At(b, t, a, 0);
        const bool same = FirstDifference(run.out.data() + at, changed.out.data() + at, 8) == -1;
        if (!same) ++differing;
        ASSERT_TRUE(same || (b == 1 && a == 0 && t >= 7)) << b << " " << t << " " << a;
      }
    }
  }
  EXPECT_EQ(differing, 5);  // tokens 7..11 of that head
  for (int64_t t = 0; t < 12; ++t) {
    for (int64_t j = t + 1; j < 12; ++j) ASSERT_EQ(AsDouble(run.probabilities[t * 12 + j]), 0);
  }
}

using AttentionGradientTest = OpTest;

TEST_F(AttentionGradientTest, BackwardMatchesDifferenceQuotients) {
  Case<double> run({2, 5, 2, 3});
  ASSERT_OK(run.Forward(stream_));
  ASSERT_OK(run.Backward(stream_));
  const auto check = [&](std::vector<double> Case<double>::*input, const std::vector<double>& gradient) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      double sums[2] = {0, 0};
      for (int side : {0, 1}) {
        Case<double> moved({2, 5, 2, 3});
        (moved.*input)[i] += side == 0 ? 1e-6 : -1e-6;
        ASSERT_OK(moved.Forward(stream_));
        for (size_t j = 0; j < moved.out.size(); ++j) sums[side] += moved.out[j] * moved.dout[j];
      }
      ASSERT_NEAR(gradient[i], (sums[0] - sums[1]) / 2e-6, 1e-8) << i;
    }
  };
  check(&Case<double>::q, run.dq);
  check(&Case<double>::k, run.dk);
  check(&Case<double>::v, run.dv);
}

TEST_F(AttentionGradientTest, FloatBackwardIsCloseToDouble) {
  Case<float> low({1, 20, 2, 16});
  Case<double> high({1, 20, 2, 16});
  for (size_t i = 0; i < low.q.size(); ++i) {
    high.q[i] = low.q[i];
    high.k[i] = low.k[i];
    high.v[i] = low.v[i];
    high.dout[i] = low.dout[i];
  }
  ASSERT_OK(low.Forward(stream_));
  ASSERT_OK(low.Backward(stream_));
  ASSERT_OK(high.Forward(stream_));
  ASSERT_OK(high.Backward(stream_));
  for (size_t i = 0; i < low.q.size(); ++i) {  // sums of up to 20 terms below 16 in size, depth below 64
    ASSERT_NEAR(low.dq[i], high.dq[i], 64 * 16 * kEpsilon<float>);
    ASSERT_NEAR(low.dk[i], high.dk[i], 64 * 16 * kEpsilon<float>);
    ASSERT_NEAR(low.dv[i], high.dv[i], 64 * 16 * kEpsilon<float>);
  }
}

TEST_F(AttentionGradientTest, EmptyAndBadSizes) {
  Case<float> none({0, 4, 2, 3});
  EXPECT_OK(none.Forward(stream_));
  EXPECT_OK(none.Backward(stream_));
  Case<float> run({1, 4, 2, 3});
  run.sizes.head_dim = 0;
  EXPECT_THAT(CausalAttentionForward(run.sizes, View(run.q, {4, 6}), View(run.k, {4, 6}), View(run.v, {4, 6}),
                                     View(run.probabilities, {2, 4, 4}), View(run.out, {4, 6}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("head_dim 0")));
  run.sizes.head_dim = 3;
  EXPECT_THAT(CausalAttentionForward(run.sizes, View(run.q, {4, 6}), View(run.k, {6, 4}), View(run.v, {4, 6}),
                                     View(run.probabilities, {2, 4, 4}), View(run.out, {4, 6}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("k is f32 [6, 4], its shape must be [4, 6]")));
}

}  // namespace
}  // namespace evenkeel
