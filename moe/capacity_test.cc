#include "evenkeel/moe/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

Rational Fraction(int64_t numerator, int64_t denominator) { return *Rational::Create(numerator, denominator); }

// One source on its own: what it needs is what is agreed.
absl::StatusOr<int64_t> Alone(const CapacityOptions& options, const CapacityInput& input, int multiple_of) {
  return ComputeCapacity(options, input, multiple_of, [](int64_t need) { return need; });
}

TEST(RationalTest, ParsesDecimalsExactly) {
  const struct {
    const char* text;
    Rational value;
  } cases[] = {{"1.25", Fraction(5, 4)},
               {"2", Fraction(2, 1)},
               {"0", Fraction(0, 1)},
               {".5", Fraction(1, 2)},
               {"3.", Fraction(3, 1)},
               {"0.1", Fraction(1, 10)},
               {"1e-1", Fraction(1, 10)},
               {"12.5E1", Fraction(125, 1)},
               {"0.50000000000000000000000000000", Fraction(1, 2)},
               {"000000000000000000000000001.0", Fraction(1, 1)},
               {"100.001", Fraction(100001, 1000)},
               {"1.1000", Fraction(11, 10)},
               {"9223372036854775807", Fraction(9223372036854775807, 1)},
               {"0e9", Fraction(0, 1)}};
  for (const auto& c : cases) {
    ASSERT_OK_AND_ASSIGN(const Rational value, Rational::Parse(c.text));
    EXPECT_EQ(value, c.value) << c.text << " -> " << value.ToString();
  }
}

TEST(RationalTest, RefusesWhatIsNoPlainNumber) {
  for (const char* text : {"", ".", "-1", "+1", "nan", "inf", "1.2.3", "1e", "1e+", "1e99", "0x10", " 1", "1 ", "1,5",
                           "9223372036854775808", "0.00000000000000000001", "1e40"}) {
    EXPECT_THAT(Rational::Parse(text), StatusIs(kInvalid, HasSubstr(std::string("\"") + text + "\""))) << text;
  }
  EXPECT_THAT(Rational::Create(1, 0), StatusIs(kInvalid, HasSubstr("1/0")));
  EXPECT_THAT(Rational::Create(-1, 2), StatusIs(kInvalid, HasSubstr("-1/2")));
}

TEST(RationalTest, TakesADoubleForTheDecimalThatWasMeant) {
  EXPECT_EQ(*Rational::FromDouble(0.1), Fraction(1, 10));
  EXPECT_EQ(*Rational::FromDouble(1.25), Fraction(5, 4));
  EXPECT_EQ(*Rational::FromDouble(1.0 / 3.0), *Rational::Parse("0.3333333333333333"));
  EXPECT_EQ(*Rational::FromDouble(0.0), Fraction(0, 1));
  for (const double bad : {-1.0, -0.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(Rational::FromDouble(bad), StatusIs(kInvalid, HasSubstr("not a non-negative finite number")));
  }
}

TEST(CapacityTest, IsExactWhereFloatingPointIsNot) {
  // 50 / 11 * 1.1 is 5.000000000000001 in double: its ceiling would be 6.
  ASSERT_EQ(std::ceil(50.0 / 11.0 * 1.1), 6.0);
  const CapacityOptions options{.factor = Fraction(11, 10), .min_capacity = 0};
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 50, .experts = 11}), 5);
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 51, .experts = 11}), 6);
}

TEST(CapacityTest, FollowsTheFormula) {
  CapacityOptions options{.factor = Fraction(5, 4), .min_capacity = 0};
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 4096, .experts = 8, .top_k = 2}), 1280);
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 0, .experts = 8, .top_k = 2}), 0);
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 1, .experts = 8, .top_k = 2}), 1);
  options.min_capacity = 4;
  EXPECT_EQ(*LocalCapacityNeed(options, {.tokens = 1, .experts = 8, .top_k = 2}), 4);
  // Every ceiling, against a search in integers.
  for (int64_t tokens = 0; tokens < 40; ++tokens) {
    for (int64_t k = 1; k <= 3; ++k) {
      const CapacityOptions odd{.factor = Fraction(7, 3), .min_capacity = 0};
      int64_t expected = 0;
      while (expected * 5 * 3 < tokens * k * 7) ++expected;
      EXPECT_EQ(*LocalCapacityNeed(odd, {.tokens = tokens, .experts = 5, .top_k = k}), expected);
    }
  }
}

// Upstream rounds only in one mode, or clamps after rounding: here it is a multiple of T in every mode.
TEST(CapacityTest, Trail1_Trail2_MultipleOfTInEveryMode) {
  for (int t = 1; t <= 8; ++t) {
    for (int64_t tokens = 0; tokens <= 2 * t + 1; ++tokens) {
      for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop}) {
        const CapacityOptions options{.mode = mode, .factor = Fraction(5, 4), .min_capacity = 3};
        const CapacityInput input{.tokens = tokens, .experts = 4, .top_k = 2, .fullest_expert = tokens};
        ASSERT_OK_AND_ASSIGN(const int64_t capacity, Alone(options, input, t));
        const int64_t need = *LocalCapacityNeed(options, input);
        EXPECT_EQ(capacity % t, 0);
        EXPECT_GE(capacity, need);
        EXPECT_LT(capacity, need + t);
      }
    }
  }
}

// Sources with different token counts, also far below the minimum: one capacity, and nothing clamps it afterwards.
TEST(CapacityTest, Trail3_Trail4_EqualOnAllSources) {
  const std::vector<int64_t> tokens = {3, 0, 17, 4};
  for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop}) {
    const CapacityOptions options{.mode = mode, .min_capacity = 1};
    std::vector<CapacityInput> inputs;
    int64_t largest = 0;
    for (const int64_t n : tokens) {
      inputs.push_back({.tokens = n, .experts = 4, .top_k = 1, .fullest_expert = n});
      largest = std::max(largest, *LocalCapacityNeed(options, inputs.back()));
    }
    for (const CapacityInput& input : inputs) {
      int calls = 0;
      const auto agree = [&](int64_t need) -> absl::StatusOr<int64_t> {
        ++calls;
        EXPECT_EQ(need, *LocalCapacityNeed(options, input));
        return largest;
      };
      ASSERT_OK_AND_ASSIGN(const int64_t capacity, ComputeCapacity(options, input, 4, agree));
      EXPECT_EQ(capacity, mode == CapacityMode::kFactor ? 8 : 20);  // needs 5 and 17, rounded up to multiples of 4
      EXPECT_EQ(calls, 1);
    }
  }
}

TEST(CapacityTest, AsksThePeersOnlyByConfiguration) {
  const auto never = [](int64_t) -> absl::StatusOr<int64_t> {
    ADD_FAILURE() << "no agreement is needed";
    return 0;
  };
  const CapacityInput input{.tokens = 9, .experts = 2, .fullest_expert = 9};
  const CapacityOptions dropless{.mode = CapacityMode::kDropless};
  EXPECT_FALSE(CapacityNeedsAgreement(dropless));
  EXPECT_EQ(*ComputeCapacity(dropless, input, 4, never), 0);
  const CapacityOptions equal{.equal_tokens = true};
  EXPECT_FALSE(CapacityNeedsAgreement(equal));
  EXPECT_EQ(*ComputeCapacity(equal, input, 4, never), 8);
  EXPECT_TRUE(CapacityNeedsAgreement({}));
  EXPECT_TRUE(CapacityNeedsAgreement({.mode = CapacityMode::kNoDrop, .equal_tokens = true}));
}

TEST(CapacityTest, RefusesNonsense) {
  const CapacityInput good{.tokens = 8, .experts = 2};
  EXPECT_THAT(Alone({.factor = Rational()}, good, 1), StatusIs(kInvalid, HasSubstr("capacity factor of 0")));
  EXPECT_THAT(Alone({}, {.tokens = -1, .experts = 2}, 1), StatusIs(kInvalid, HasSubstr("tokens -1")));
  EXPECT_THAT(Alone({}, {.tokens = 1, .experts = 2, .top_k = 3}, 1), StatusIs(kInvalid, HasSubstr("k 3")));
  EXPECT_THAT(Alone({}, good, 0), StatusIs(kInvalid, HasSubstr("multiple of 0")));
  EXPECT_THAT(Alone({.min_capacity = -1}, good, 1), StatusIs(kInvalid, HasSubstr("minimum -1")));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(Alone({}, {.tokens = huge, .experts = 4, .top_k = 4}, 1), StatusIs(kInvalid, HasSubstr("overflow")));
  EXPECT_THAT(Alone({.factor = Fraction(huge, 1)}, {.tokens = 8, .experts = 2}, 1),
              StatusIs(kInvalid, HasSubstr("overflows")));
  EXPECT_THAT(Alone({.mode = CapacityMode::kNoDrop}, {.tokens = 1, .experts = 1, .fullest_expert = huge}, 2),
              StatusIs(kInvalid, HasSubstr("overflow")));
  EXPECT_THAT(ComputeCapacity({}, good, 1, [](int64_t) { return 1; }),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("below this source's need")));
}

}  // namespace
}  // namespace evenkeel::moe
