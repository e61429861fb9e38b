#include "evenkeel/moe/slot_assignment.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "evenkeel/moe/token_choice.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::testing::ElementsAre;

RouterConfig Config(int experts, int top_k, DropPolicy drop = DropPolicy::kByTopK) {
  RouterConfig config;
  config.layer = "moe";
  config.hidden = 1;
  config.experts = experts;
  config.top_k = top_k;
  config.drop = drop;
  return config;
}

RoutingDecision Route(const RouterConfig& config, const std::vector<float>& logits, int64_t capacity,
                      std::vector<uint8_t> mask = {}, const RouterStep& step = {}) {
  RoutingDecision d;
  d.num_tokens = static_cast<int64_t>(logits.size()) / config.experts;
  d.num_experts = config.experts;
  d.top_k = config.top_k;
  d.token_mask = std::move(mask);
  d.dropless = capacity == 0;
  d.capacity = capacity;
  EXPECT_OK(ScoreTokens(config, logits.data(), &d));
  EXPECT_OK(ChooseExperts(config, step, logits.data(), nullptr, &d));
  EXPECT_OK(AssignSlots(config, step, &d));
  ComputeWeights(config, &d);
  ComputeLosses(config, &d);
  EXPECT_OK(d.Validate());
  return d;
}

std::vector<float> RandomLogits(int64_t tokens, int experts, uint64_t seed) {
  const PhiloxStream stream(PhiloxKey(seed).Add("logits"));
  std::vector<float> logits(tokens * experts);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(stream.Normal(i));
  return logits;
}

// Top-1, capacity 2: expert 0 is asked by tokens 0, 1, 3. The first ones in token order stay.
TEST(SlotAssignmentTest, Trail7_TopOneExactSlots) {
  const std::vector<float> logits = {2, 0, 5, 0, 0, 1, 9, 0};
  const RoutingDecision d = Route(Config(2, 1), logits, 2);
  EXPECT_THAT(d.expert, ElementsAre(0, 0, 1, 0));
  EXPECT_THAT(d.slot, ElementsAre(0, 1, 0, -1));
  EXPECT_THAT(d.assigned, ElementsAre(3, 1));
  EXPECT_THAT(d.kept, ElementsAre(2, 1));
  EXPECT_EQ(d.slot_classes, 1);
  EXPECT_EQ(d.weight[0], d.score[0]);  // the raw probability
  EXPECT_EQ(d.weight[3], 0.0f);
}

// Top-2: first choices are numbered before all second ones, and second slots start behind every first choice that was
// asked for, dropped or not.
TEST(SlotAssignmentTest, Trail7_TopTwoFirstChoicesHavePriority) {
  const std::vector<float> logits = {
      3, 2, 0,  // 0: experts 0, 1
      2, 3, 0,  // 1: experts 1, 0
      3, 2, 0,  // 2: experts 0, 1
      2, 0, 3,  // 3: experts 2, 0
  };
  const RoutingDecision roomy = Route(Config(3, 2), logits, 4);
  EXPECT_EQ(roomy.slot_classes, 2);
  EXPECT_THAT(roomy.slot, ElementsAre(0, 1, 0, 2, 1, 2, 0, 3));
  const RoutingDecision tight = Route(Config(3, 2), logits, 2);
  EXPECT_THAT(tight.slot, ElementsAre(0, 1, 0, -1, 1, -1, 0, -1));
  EXPECT_THAT(tight.assigned, ElementsAre(4, 3, 1));
  EXPECT_THAT(tight.kept, ElementsAre(2, 2, 1));
  // Renormalised over kept routes: a token with one kept route weighs 1.
  EXPECT_EQ(tight.weight[2], 1.0f);
  EXPECT_FLOAT_EQ(tight.weight[0] + tight.weight[1], 1.0f);
  const RoutingDecision one = Route(Config(3, 2), logits, 1);
  EXPECT_THAT(one.slot, ElementsAre(0, -1, 0, -1, -1, -1, 0, -1));
}

// Top-3 with policy probs keeps the most probable members only; negative logits are no disadvantage against experts
// that were not chosen (upstream compared logits with zeros).
TEST(SlotAssignmentTest, Trail7_TopKProbsKeepsTheMostProbableMembers) {
  const std::vector<float> logits = {
      -1, -2, -9,   -9,  // 0: experts 0, 1, 2
      -1, -9, -1.5, -9,  // 1: experts 0, 2, 1
      -5, -1, -1,   -9,  // 2: experts 1, 2, 0
  };
  const RoutingDecision d = Route(Config(4, 3), logits, 2);
  EXPECT_THAT(d.expert, ElementsAre(0, 1, 2, 0, 2, 1, 1, 2, 0));
  // Expert 0: tokens 0, 1 beat 2. Expert 1: tokens 2, 0 beat 1. Expert 2: tokens 2, 1 beat 0. Slots in token order.
  EXPECT_THAT(d.slot, ElementsAre(0, 0, -1, 1, 0, -1, 1, 1, -1));
  const RoutingDecision by_position = Route(Config(4, 3, DropPolicy::kPosition), logits, 2);
  EXPECT_THAT(by_position.slot, ElementsAre(0, 0, 0, 1, 1, 1, -1, -1, -1));
}

TEST(SlotAssignmentTest, Trail7_EqualProbabilitiesKeepTheLowestTokens) {
  const std::vector<float> logits(5 * 4, 1.0f);
  const RoutingDecision d = Route(Config(4, 3), logits, 2);
  for (int64_t t = 0; t < 5; ++t) {
    for (int j = 0; j < 3; ++j) EXPECT_EQ(d.slot[t * 3 + j], t < 2 ? t : -1);
  }
}

// Random routing, every policy: the kept set is the best `capacity` by the policy's rule, checked by brute force.
TEST(SlotAssignmentTest, C43_KeepsTheBestAndCountsTheDropped) {
  for (const DropPolicy policy :
       {DropPolicy::kProbs, DropPolicy::kPosition, DropPolicy::kChoiceThenPosition, DropPolicy::kRandom}) {
    for (uint64_t seed = 1; seed <= 12; ++seed) {
      const int64_t tokens = 5 + static_cast<int64_t>(seed * 7 % 40);
      const RouterConfig config = Config(6, 3, policy);
      const RouterStep step{.seed = seed};
      const int64_t capacity = 1 + static_cast<int64_t>(seed % 9);
      const RoutingDecision d = Route(config, RandomLogits(tokens, 6, seed), capacity, {}, step);
      const PhiloxStream stream(RouterKey(config, step, "drop"));
      for (int e = 0; e < 6; ++e) {
        // Sort keys, smallest stays: (class or -worth, token).
        std::vector<std::pair<double, int64_t>> candidates;
        for (int64_t r = 0; r < d.num_routes(); ++r) {
          if (d.expert[r] != e) continue;
          const int64_t token = r / 3;
          double key = 0;
          if (policy == DropPolicy::kProbs) key = -d.score[token * 6 + e];
          if (policy == DropPolicy::kRandom) key = -stream.Uniform(token * 6 + e);
          if (policy == DropPolicy::kChoiceThenPosition) key = static_cast<double>(r % 3);
          candidates.push_back({key, r});
        }
        std::sort(candidates.begin(), candidates.end());
        EXPECT_EQ(d.assigned[e], static_cast<int64_t>(candidates.size()));
        EXPECT_EQ(d.kept[e], std::min<int64_t>(capacity, static_cast<int64_t>(candidates.size())));
        for (size_t i = 0; i < candidates.size(); ++i) {
          EXPECT_EQ(d.slot[candidates[i].second] >= 0, static_cast<int64_t>(i) < capacity)
              << "policy " << static_cast<int>(policy) << " seed " << seed;
        }
      }
    }
  }
}

TEST(SlotAssignmentTest, RandomDropIsOffAtEvaluation) {
  const std::vector<float> logits(20 * 2, 0.0f);
  const RouterConfig config = Config(2, 1, DropPolicy::kRandom);
  const RoutingDecision trained = Route(config, logits, 5, {}, {.training = true, .seed = 1});
  const RoutingDecision evaluated = Route(config, logits, 5, {}, {.training = false, .seed = 1});
  std::set<int64_t> kept;
  for (int64_t t = 0; t < 20; ++t) {
    if (trained.slot[t] >= 0) kept.insert(t);
    EXPECT_EQ(evaluated.slot[t], t < 5 ? t : -1);
  }
  EXPECT_EQ(kept.size(), 5u);
  EXPECT_NE(kept, (std::set<int64_t>{0, 1, 2, 3, 4}));
}

TEST(SlotAssignmentTest, C40_AllTokensToOneExpert) {
  std::vector<float> logits(100 * 4, 0.0f);
  for (int64_t t = 0; t < 100; ++t) logits[t * 4 + 2] = 1.0f;
  const RoutingDecision d = Route(Config(4, 1), logits, 10);
  EXPECT_THAT(d.assigned, ElementsAre(0, 0, 100, 0));
  EXPECT_THAT(d.kept, ElementsAre(0, 0, 10, 0));
  const RoutingDecision all = Route(Config(4, 1), logits, 0);
  EXPECT_THAT(all.kept, ElementsAre(0, 0, 100, 0));
  // e * mean(g_2) * 1.
  EXPECT_NEAR(d.balance_loss, 4.0 * d.score[2], 1e-6);
}

TEST(SlotAssignmentTest, LargeCapacityEqualsDropless) {
  for (const int k : {1, 2, 4}) {
    const std::vector<float> logits = RandomLogits(33, 5, k);
    const RoutingDecision dropless = Route(Config(5, k), logits, 0);
    const RoutingDecision roomy = Route(Config(5, k), logits, 33);
    EXPECT_EQ(dropless.slot, roomy.slot);
    EXPECT_EQ(dropless.weight, roomy.weight);
    EXPECT_EQ(dropless.kept, dropless.assigned);
  }
}

TEST(SlotAssignmentTest, ATokenWithEveryRouteDroppedWeighsNothing) {
  const RoutingDecision d = Route(Config(2, 2), std::vector<float>(6, 0.0f), 1);
  EXPECT_THAT(d.weight, ElementsAre(.5f, .5f, 0, 0, 0, 0));
}

// A sum of kept scores below 2^-23 is raised to it, so weights stay finite and small.
TEST(SlotAssignmentTest, DenominatorIsFloored) {
  RouterConfig config = Config(2, 2);
  config.score = ScoreFunction::kSigmoid;
  const RoutingDecision d = Route(config, {-30, -30, 0, 0}, 0);
  EXPECT_FLOAT_EQ(d.weight[0], d.score[0] * 0x1p23f);
  EXPECT_LT(d.weight[0], 1e-5f);
  EXPECT_EQ(d.weight[2], 0.5f);
}

TEST(SlotAssignmentTest, ScaleAndNormalizationAreIndependent) {
  RouterConfig config = Config(3, 2);
  config.route_scale = 2.5;
  const std::vector<float> logits = {1, 2, 3};
  const RoutingDecision normalized = Route(config, logits, 0);
  EXPECT_FLOAT_EQ(normalized.weight[0] + normalized.weight[1], 2.5f);
  config.normalization = WeightNormalization::kNone;
  const RoutingDecision raw = Route(config, logits, 0);
  EXPECT_FLOAT_EQ(raw.weight[0], 2.5f * raw.score[2]);
}

// The losses of deepspeed's formulas, written out for four tokens and two experts.
TEST(SlotAssignmentTest, Trail2_BalanceLossFormulas) {
  const std::vector<float> logits = {1, 0, 1, 0, 1, 0, 0, 1};
  const double p = 1 / (1 + std::exp(-1.0));
  const double mean0 = (3 * p + (1 - p)) / 4;
  const double mean1 = 1 - mean0;
  // top-1: e * sum_j mean(g_j) * mean(mask_j); capacity 1 drops two tokens, which must not matter.
  EXPECT_NEAR(Route(Config(2, 1), logits, 1).balance_loss, 2 * (mean0 * 0.75 + mean1 * 0.25), 1e-6);
  // top-2 counts first choices only: the same value.
  EXPECT_NEAR(Route(Config(2, 2), logits, 0).balance_loss, 2 * (mean0 * 0.75 + mean1 * 0.25), 1e-6);
  // Counting all choices, both experts are chosen always: e / k * (mean0 + mean1) = 1.
  RouterConfig all = Config(2, 2);
  all.balance = BalanceChoices::kAll;
  EXPECT_NEAR(Route(all, logits, 0).balance_loss, 1.0, 1e-6);
  const double log_sum = std::log(std::exp(1.0) + 1);
  EXPECT_NEAR(Route(all, logits, 0).z_loss, log_sum * log_sum, 1e-6);
  // Sigmoid scores are divided by their sum first.
  RouterConfig sigmoid = Config(2, 1);
  sigmoid.score = ScoreFunction::kSigmoid;
  const double share = p / (p + 0.5);
  EXPECT_NEAR(Route(sigmoid, {1, 0}, 0).balance_loss, 2 * share, 1e-6);
}

TEST(SlotAssignmentTest, Trail22_NoTokens) {
  const RoutingDecision d = Route(Config(3, 2), {}, 4);
  EXPECT_EQ(d.balance_loss, 0);
  EXPECT_EQ(d.z_loss, 0);
  EXPECT_THAT(d.kept, ElementsAre(0, 0, 0));
  const RoutingDecision masked = Route(Config(3, 2), RandomLogits(4, 3, 1), 4, {0, 0, 0, 0});
  EXPECT_EQ(masked.balance_loss, 0);
  EXPECT_THAT(masked.assigned, ElementsAre(0, 0, 0));
}

// Masked tokens behave as if they were not there.
TEST(SlotAssignmentTest, MaskedTokensAreAbsentTokens) {
  for (const int k : {1, 2, 3}) {
    const std::vector<float> logits = RandomLogits(12, 4, 9);
    std::vector<uint8_t> mask(12);
    std::vector<float> active;
    for (int64_t t = 0; t < 12; ++t) {
      mask[t] = t % 3 != 1;
      if (mask[t]) active.insert(active.end(), logits.begin() + t * 4, logits.begin() + (t + 1) * 4);
    }
    const RoutingDecision with = Route(Config(4, k), logits, 3, mask);
    const RoutingDecision without = Route(Config(4, k), active, 3);
    int64_t at = 0;
    for (int64_t t = 0; t < 12; ++t) {
      for (int j = 0; j < k; ++j) {
        if (!mask[t]) {
          EXPECT_EQ(with.slot[t * k + j], -1);
          continue;
        }
        EXPECT_EQ(with.slot[t * k + j], without.slot[at * k + j]);
        EXPECT_EQ(with.weight[t * k + j], without.weight[at * k + j]);
      }
      at += mask[t];
    }
    EXPECT_EQ(with.balance_loss, without.balance_loss);
    EXPECT_EQ(with.z_loss, without.z_loss);
    EXPECT_EQ(with.kept, without.kept);
  }
}

}  // namespace
}  // namespace evenkeel::moe
