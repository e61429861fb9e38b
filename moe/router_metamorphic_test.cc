// Changes of the input whose effect on the routes is known without a reference.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/testing/router_bench.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

TEST(RouterMetamorphicTest, PermutingTokensPermutesRoutes) {
  constexpr int64_t kTokens = 37, kHidden = 12;
  for (const int k : {1, 2, 3}) {
    RouterBench bench;
    const std::vector<float> x = Values(kTokens * kHidden, "x");
    std::vector<int64_t> order(kTokens);
    for (int64_t t = 0; t < kTokens; ++t) order[t] = (t * 10 + 3) % kTokens;
    ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(Dropless(kHidden, 6, k), x));
    ASSERT_OK_AND_ASSIGN(const RoutingDecision p, bench.Route(Dropless(kHidden, 6, k), Rows(x, kHidden, order)));
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int j = 0; j < k; ++j) {
        EXPECT_EQ(p.expert[t * k + j], d.expert[order[t] * k + j]);
        EXPECT_EQ(p.weight[t * k + j], d.weight[order[t] * k + j]);
      }
    }
    EXPECT_EQ(p.assigned, d.assigned);
    EXPECT_NEAR(p.balance_loss, d.balance_loss, 1e-12);
  }
}

TEST(RouterMetamorphicTest, RenamingExpertsRenamesRoutes) {
  constexpr int64_t kTokens = 30, kHidden = 12;
  constexpr int kExperts = 7;
  RouterBench bench;
  const std::vector<float> x = Values(kTokens * kHidden, "x");
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(Dropless(kHidden, kExperts, 3), x));
  std::vector<int64_t> name_of(kExperts);  // new id of each expert
  std::vector<int64_t> old_of(kExperts);
  for (int e = 0; e < kExperts; ++e) {
    name_of[e] = (e * 3 + 1) % kExperts;
    old_of[name_of[e]] = e;
  }
  RouterBench renamed;
  renamed.gate = Rows(bench.gate, kHidden, old_of);
  ASSERT_OK_AND_ASSIGN(const RoutingDecision r, renamed.Route(Dropless(kHidden, kExperts, 3), x));
  for (int64_t i = 0; i < d.num_routes(); ++i) {
    EXPECT_EQ(r.expert[i], name_of[d.expert[i]]);
    // The sum over experts runs in another order: at most the last bit of a score moves.
    EXPECT_NEAR(r.weight[i], d.weight[i], 2e-7);
    EXPECT_EQ(r.slot[i], d.slot[i]);
  }
}

TEST(RouterMetamorphicTest, SplittingADroplessBatchChangesNothing) {
  constexpr int64_t kTokens = 40, kHidden = 10;
  RouterBench bench;
  const std::vector<float> x = Values(kTokens * kHidden, "x");
  const RouterConfig config = Dropless(kHidden, 5, 2);
  ASSERT_OK_AND_ASSIGN(const RoutingDecision whole, bench.Route(config, x));
  for (const int64_t cut : {0, 1, 17, 40}) {
    ASSERT_OK_AND_ASSIGN(const RoutingDecision head, bench.Route(config, {x.begin(), x.begin() + cut * kHidden}));
    ASSERT_OK_AND_ASSIGN(const RoutingDecision tail, bench.Route(config, {x.begin() + cut * kHidden, x.end()}));
    std::vector<int32_t> experts = head.expert;
    experts.insert(experts.end(), tail.expert.begin(), tail.expert.end());
    std::vector<float> weights = head.weight;
    weights.insert(weights.end(), tail.weight.begin(), tail.weight.end());
    EXPECT_EQ(experts, whole.expert);
    EXPECT_EQ(std::memcmp(weights.data(), whole.weight.data(), weights.size() * sizeof(float)), 0);
  }
}

TEST(RouterMetamorphicTest, EqualTokensGetEqualRoutes) {
  constexpr int64_t kHidden = 10;
  RouterBench bench;
  const std::vector<float> one = Values(kHidden, "x");
  std::vector<float> x;
  for (int i = 0; i < 9; ++i) x.insert(x.end(), one.begin(), one.end());
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(Dropless(kHidden, 5, 2), x));
  for (int64_t t = 1; t < 9; ++t) {
    for (int j = 0; j < 2; ++j) {
      EXPECT_EQ(d.expert[2 * t + j], d.expert[j]);
      EXPECT_EQ(d.weight[2 * t + j], d.weight[j]);
      EXPECT_EQ(d.slot[2 * t + j], t);
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
