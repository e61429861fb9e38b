#include "evenkeel/moe/token_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

RouterConfig Config(int experts, int top_k) {
  RouterConfig config;
  config.layer = "blocks.3.moe";
  config.hidden = 1;
  config.experts = experts;
  config.top_k = top_k;
  return config;
}

absl::StatusOr<RoutingDecision> Choose(const RouterConfig& config, const std::vector<float>& logits,
                                       const float* bias = nullptr, std::vector<uint8_t> mask = {},
                                       const RouterStep& step = {}) {
  RoutingDecision d;
  d.num_tokens = static_cast<int64_t>(logits.size()) / config.experts;
  d.num_experts = config.experts;
  d.top_k = config.top_k;
  d.token_mask = std::move(mask);
  EK_RETURN_IF_ERROR(ScoreTokens(config, logits.data(), &d));
  EK_RETURN_IF_ERROR(ChooseExperts(config, step, logits.data(), bias, &d));
  return d;
}

TEST(PortableExpTest, IsCloseToExpAndExactAtZero) {
  EXPECT_EQ(PortableExp(0.0), 1.0);
  EXPECT_EQ(PortableExp(-1e9), 0.0);
  EXPECT_EQ(PortableExp(-std::numeric_limits<double>::infinity()), 0.0);
  EXPECT_TRUE(std::isfinite(PortableExp(1e9)));
  const PhiloxStream stream(PhiloxKey(3));
  for (uint64_t i = 0; i < 20000; ++i) {
    const double x = (stream.Uniform(i) - 0.5) * 1390.0;
    EXPECT_NEAR(PortableExp(x) / std::exp(x), 1.0, 1e-14) << x;
  }
}

TEST(OrderedBitsTest, SortsLikeFloats) {
  const std::vector<float> sorted = {-kInf, -kMax, -1.0f, -1e-45f, 0.0f, 1e-45f, 1.0f, kMax, kInf};
  for (size_t i = 0; i + 1 < sorted.size(); ++i) EXPECT_LT(OrderedBits(sorted[i]), OrderedBits(sorted[i + 1]));
  EXPECT_EQ(OrderedBits(-0.0f), OrderedBits(0.0f));
}

TEST(ScoreTokensTest, SoftmaxAndSigmoid) {
  RouterConfig config = Config(3, 1);
  ASSERT_OK_AND_ASSIGN(RoutingDecision d, Choose(config, {1, 2, 4, -80, 80, 0}));
  for (int64_t t = 0; t < 2; ++t) {
    const std::vector<double> l = t == 0 ? std::vector<double>{1, 2, 4} : std::vector<double>{-80, 80, 0};
    const double sum = std::exp(l[0]) + std::exp(l[1]) + std::exp(l[2]);
    for (int e = 0; e < 3; ++e) EXPECT_FLOAT_EQ(d.score[t * 3 + e], static_cast<float>(std::exp(l[e]) / sum));
    EXPECT_FLOAT_EQ(d.log_sum_exp[t], static_cast<float>(std::log(sum)));
  }
  config.score = ScoreFunction::kSigmoid;
  ASSERT_OK_AND_ASSIGN(d, Choose(config, {1, 2, 4, -80, 80, 0}));
  EXPECT_FLOAT_EQ(d.score[0], static_cast<float>(1 / (1 + std::exp(-1.0))));
  EXPECT_FLOAT_EQ(d.score[3], static_cast<float>(std::exp(-80.0)));
  EXPECT_EQ(d.score[4], 1.0f);
  EXPECT_EQ(d.score[5], 0.5f);
  EXPECT_FLOAT_EQ(d.softmax[2], static_cast<float>(std::exp(4.0) / (std::exp(1.0) + std::exp(2.0) + std::exp(4.0))));
}

// Each class of non-finite float in each place: an error that names layer, token and expert, never a decision.
TEST(ScoreTokensTest, C38_NonFiniteLogitsAreRefused) {
  const RouterConfig config = Config(4, 2);
  for (const float bad : {kInf, -kInf, std::nanf(""), -std::nanf(""), std::nanf("77")}) {
    for (size_t at = 0; at < 12; ++at) {
      std::vector<float> logits(12, 0.5f);
      logits[at] = bad;
      EXPECT_THAT(Choose(config, logits),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           HasSubstr(absl::StrCat("router of layer \"blocks.3.moe\": the logit of token ", at / 4,
                                                  " for expert ", at % 4))));
      // A masked token's logits do not matter.
      std::vector<uint8_t> mask = {1, 1, 1};
      mask[at / 4] = 0;
      EXPECT_OK(Choose(config, logits, nullptr, mask).status());
    }
  }
}

TEST(ChooseExpertsTest, C38_TiesGoToTheLowestExpert) {
  ASSERT_OK_AND_ASSIGN(RoutingDecision d, Choose(Config(4, 2), {7, 7, 7, 7, 0, 3, 3, 3, -0.0f, 0.0f, -1, 0.0f}));
  EXPECT_THAT(d.expert, ElementsAre(0, 1, 1, 2, 0, 1));
  // Huge logits whose softmax is 1, 0, 0, 0: the logits still decide.
  ASSERT_OK_AND_ASSIGN(d, Choose(Config(4, 3), {-kMax, kMax, 0, 5}));
  EXPECT_THAT(d.expert, ElementsAre(1, 3, 2));
  ASSERT_OK_AND_ASSIGN(d, Choose(Config(4, 4), {1, 2, 4, 3}));
  EXPECT_THAT(d.expert, ElementsAre(2, 3, 1, 0));
}

// Random finite floats of every magnitude, many of them equal, against a plain sort; ids distinct and in range.
TEST(ChooseExpertsTest, C38_MatchesASortOnArbitraryFloats) {
  const PhiloxStream stream(PhiloxKey(1).Add("any float"));
  uint64_t draw = 0;
  for (int round = 0; round < 400; ++round) {
    const int experts = 1 + static_cast<int>(stream.Below(draw++, 70));
    const int k = 1 + static_cast<int>(stream.Below(draw++, experts));
    const bool few_values = round % 2 == 0;
    std::vector<float> logits(experts * 3);
    for (float& l : logits) {
      do {
        l = few_values ? static_cast<float>(stream.Below(draw++, 3)) - 1.0f
                       : std::bit_cast<float>(stream.Bits32(draw++));
      } while (!std::isfinite(l));
    }
    ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(Config(experts, k), logits));
    for (int64_t t = 0; t < 3; ++t) {
      std::vector<int> order(experts);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return logits[t * experts + a] > logits[t * experts + b]; });
      for (int j = 0; j < k; ++j) ASSERT_EQ(d.expert[t * k + j], order[j]) << "round " << round;
      double sum = 0;
      for (int e = 0; e < experts; ++e) sum += d.score[t * experts + e];
      EXPECT_NEAR(sum, 1.0, 1e-6);
    }
  }
}

TEST(ChooseExpertsTest, BiasSelectsButDoesNotScore) {
  const std::vector<float> logits = {3, 2, 1, 0};
  const float bias[] = {-1, 0, 0, 2};
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(Config(4, 2), logits, bias));
  EXPECT_THAT(d.expert, ElementsAre(3, 1));
  ASSERT_OK_AND_ASSIGN(const RoutingDecision plain, Choose(Config(4, 2), logits));
  EXPECT_EQ(d.score, plain.score);
  const float bad[] = {0, 0, kInf, 0};
  EXPECT_THAT(Choose(Config(4, 2), logits, bad),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("selection bias of expert 2")));
}

TEST(ChooseExpertsTest, GroupLimitKeepsTheBestGroups) {
  RouterConfig config = Config(6, 2);
  config.groups = 3;
  config.groups_kept = 1;
  config.score = ScoreFunction::kSigmoid;
  // Groups {0,1} {2,3} {4,5}; the best single expert is 0, the best pair is {2,3}.
  const std::vector<float> logits = {3, -9, 2, 2, 1, 1};
  ASSERT_OK_AND_ASSIGN(RoutingDecision d, Choose(config, logits));
  EXPECT_THAT(d.expert, ElementsAre(0, 1));
  config.group_score = GroupScore::kTopTwoSum;
  ASSERT_OK_AND_ASSIGN(d, Choose(config, logits));
  EXPECT_THAT(d.expert, ElementsAre(2, 3));
  config.groups_kept = 2;
  ASSERT_OK_AND_ASSIGN(d, Choose(config, logits));
  EXPECT_THAT(d.expert, ElementsAre(2, 3));
  config.top_k = 4;
  ASSERT_OK_AND_ASSIGN(d, Choose(config, logits));
  EXPECT_THAT(d.expert, ElementsAre(2, 3, 4, 5));
  // Equal groups: the lowest ones.
  ASSERT_OK_AND_ASSIGN(d, Choose(config, {1, 1, 1, 1, 1, 1}));
  EXPECT_THAT(d.expert, ElementsAre(0, 1, 2, 3));
}

TEST(ChooseExpertsTest, MaskedTokensCountNowhere) {
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(Config(3, 2), {0, 1, 2, 2, 1, 0, 0, 2, 1}, nullptr, {1, 0, 1}));
  EXPECT_THAT(d.expert, ElementsAre(2, 1, 0, 1, 1, 2));
  EXPECT_THAT(d.assigned, ElementsAre(0, 2, 2));
  EXPECT_THAT(d.balance_count, ElementsAre(0, 1, 1));
  EXPECT_EQ(d.active_tokens, 2);
  for (int e = 0; e < 3; ++e) EXPECT_EQ(d.score[3 + e], 0.0f);
}

// The stream is keyed by seed, step, layer and source. Nothing in the key is a lane, so lanes cannot differ.
TEST(ChooseExpertsTest, Trail21_NoiseIsKeyedByMeaning) {
  RouterConfig config = Config(16, 2);
  config.noise = SelectionNoise::kAllChoices;
  const std::vector<float> logits(16 * 40, 0.0f);
  const RouterStep step{.training = true, .seed = 3, .step = 5, .source = 2};
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(config, logits, nullptr, {}, step));
  ASSERT_OK_AND_ASSIGN(const RoutingDecision again, Choose(config, logits, nullptr, {}, step));
  EXPECT_EQ(d.expert, again.expert);
  std::set<std::vector<int32_t>> seen = {d.expert};
  for (const RouterStep& other : {RouterStep{.training = true, .seed = 4, .step = 5, .source = 2},
                                  RouterStep{.training = true, .seed = 3, .step = 6, .source = 2},
                                  RouterStep{.training = true, .seed = 3, .step = 5, .source = 1}}) {
    ASSERT_OK_AND_ASSIGN(const RoutingDecision o, Choose(config, logits, nullptr, {}, other));
    seen.insert(o.expert);
  }
  config.layer = "blocks.4.moe";
  ASSERT_OK_AND_ASSIGN(const RoutingDecision o, Choose(config, logits, nullptr, {}, step));
  seen.insert(o.expert);
  EXPECT_EQ(seen.size(), 5u);
  // Off at evaluation: equal logits go to experts 0 and 1.
  ASSERT_OK_AND_ASSIGN(const RoutingDecision eval, Choose(config, logits, nullptr, {}, {.training = false}));
  EXPECT_EQ(eval.assigned[0], 40);
  EXPECT_EQ(eval.assigned[1], 40);
}

TEST(ChooseExpertsTest, LaterChoiceNoiseLeavesTheFirstAlone) {
  RouterConfig config = Config(8, 2);
  config.noise = SelectionNoise::kLaterChoices;
  std::vector<float> logits(8 * 50, 0.0f);
  for (int64_t t = 0; t < 50; ++t) logits[t * 8 + t % 8] = 0.5f;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(config, logits));
  std::set<int32_t> seconds;
  for (int64_t t = 0; t < 50; ++t) {
    EXPECT_EQ(d.expert[2 * t], t % 8);
    EXPECT_NE(d.expert[2 * t + 1], d.expert[2 * t]);
    seconds.insert(d.expert[2 * t + 1]);
  }
  EXPECT_GT(seconds.size(), 4u);
}

// Gumbel noise draws experts with their softmax probability.
TEST(ChooseExpertsTest, GumbelNoiseSamplesTheSoftmax) {
  RouterConfig config = Config(3, 1);
  config.noise = SelectionNoise::kAllChoices;
  constexpr int64_t kTokens = 30000;
  std::vector<float> logits(3 * kTokens);
  for (int64_t t = 0; t < kTokens; ++t) logits[3 * t + 1] = 1.0f, logits[3 * t + 2] = 2.0f;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, Choose(config, logits));
  for (int e = 0; e < 3; ++e) {
    const double p = d.score[e];
    const double deviation = std::sqrt(p * (1 - p) / kTokens);
    EXPECT_NEAR(static_cast<double>(d.assigned[e]) / kTokens, p, 5 * deviation);
  }
}

}  // namespace
}  // namespace evenkeel::moe
