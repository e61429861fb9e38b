#include "evenkeel/moe/expert_choice.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::testing::ElementsAre;

RoutingDecision Scored(int experts, std::vector<float> score, std::vector<uint8_t> mask = {}) {
  RoutingDecision d;
  d.num_tokens = static_cast<int64_t>(score.size()) / experts;
  d.num_experts = experts;
  d.score = std::move(score);
  d.token_mask = std::move(mask);
  return d;
}

TEST(ExpertChoiceTest, EveryExpertTakesItsBestTokens) {
  RoutingDecision d = Scored(2, {.9f, .1f, .8f, .2f, .3f, .7f, .4f, .6f});
  ASSERT_OK(ChooseTokens(3, &d));
  // Expert 0 takes tokens 0, 1, 3; expert 1 takes 3, 2, 1. Token 1 and 3 have both, best first.
  EXPECT_EQ(d.top_k, 2);
  EXPECT_THAT(d.expert, ElementsAre(0, 1, 0, 1, 1, 0, 1, 0));
  EXPECT_THAT(d.slot, ElementsAre(0, -1, 1, 0, 1, -1, 2, 2));
  EXPECT_THAT(d.kept, ElementsAre(3, 3));
}

TEST(ExpertChoiceTest, TiesGoToTheLowestTokens) {
  RoutingDecision d = Scored(3, std::vector<float>(12, 0.25f));
  ASSERT_OK(ChooseTokens(2, &d));
  EXPECT_THAT(d.expert, ElementsAre(0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2));
  EXPECT_THAT(d.slot, ElementsAre(0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1, -1));
}

TEST(ExpertChoiceTest, Trail22_NoTokensFewTokensMaskedTokens) {
  RoutingDecision none = Scored(3, {});
  ASSERT_OK(ChooseTokens(2, &none));
  EXPECT_EQ(none.top_k, 1);
  EXPECT_THAT(none.kept, ElementsAre(0, 0, 0));
  RoutingDecision few = Scored(2, {.5f, .5f, .6f, .4f}, {1, 0});
  ASSERT_OK(ChooseTokens(7, &few));
  EXPECT_THAT(few.kept, ElementsAre(1, 1));
  EXPECT_THAT(few.slot, ElementsAre(0, 0, -1, -1));
}

TEST(ExpertChoiceTest, MatchesBruteForceOnRandomScores) {
  const PhiloxStream stream(PhiloxKey(4));
  uint64_t draw = 0;
  for (int round = 0; round < 60; ++round) {
    const int experts = 1 + static_cast<int>(stream.Below(draw++, 9));
    const int64_t tokens = static_cast<int64_t>(stream.Below(draw++, 30));
    const int64_t count = static_cast<int64_t>(stream.Below(draw++, 12));
    std::vector<float> score(tokens * experts);
    for (float& s : score) s = static_cast<float>(stream.Below(draw++, 8)) / 8.0f;
    RoutingDecision d = Scored(experts, score);
    ASSERT_OK(ChooseTokens(count, &d));
    d.capacity = count;
    d.weight.assign(d.num_routes(), 0.0f);
    ASSERT_OK(d.Validate()) << "round " << round;
    for (int e = 0; e < experts; ++e) {
      std::vector<std::pair<float, int64_t>> order;
      for (int64_t t = 0; t < tokens; ++t) order.push_back({-score[t * experts + e], t});
      std::sort(order.begin(), order.end());
      order.resize(std::min<int64_t>(count, tokens));
      std::set<int64_t> expected, actual;
      for (const auto& entry : order) expected.insert(entry.second);
      for (int64_t r = 0; r < d.num_routes(); ++r) {
        if (d.expert[r] == e && d.slot[r] >= 0) actual.insert(r / d.top_k);
      }
      ASSERT_EQ(actual, expected) << "round " << round << " expert " << e;
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
