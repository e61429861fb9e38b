// Every kind of routing through every order: which rows an order moves must not depend on how they were chosen.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/moe/routing_replay.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

struct RoutingKind {
  const char* name;
  int top_k;
  CapacityMode mode;
  std::function<void(RouterConfig*)> change;
};

std::vector<RoutingKind> Kinds() {
  constexpr CapacityMode kFactor = CapacityMode::kFactor;
  return {
      {"sigmoid, scaled", 2, kFactor,
       [](RouterConfig* c) { c->score = ScoreFunction::kSigmoid, c->route_scale = 2.5; }},
      {"probs, k 3", 3, kFactor, [](RouterConfig* c) { c->drop = DropPolicy::kProbs; }},
      {"random tokens", 2, kFactor, [](RouterConfig* c) { c->drop = DropPolicy::kRandom; }},
      {"noise and jitter", 2, kFactor,
       [](RouterConfig* c) { c->noise = SelectionNoise::kLaterChoices, c->jitter = 0.2f; }},
      {"two of four groups", 2, kFactor,
       [](RouterConfig* c) { c->groups = 4, c->groups_kept = 2, c->group_score = GroupScore::kTopTwoSum; }},
      {"raw weights", 1, kFactor, [](RouterConfig* c) { c->normalization = WeightNormalization::kNone; }},
      {"expert choice", 2, kFactor, [](RouterConfig* c) { c->kind = kExpertChoice; }},
      {"no drop", 2, CapacityMode::kNoDrop, [](RouterConfig*) {}},
      {"k = e", 8, kFactor, [](RouterConfig*) {}},
  };
}

LayerCase CaseOf(const RoutingKind& kind, int tp, int ep, bool masked) {
  LayerCase c;
  c.tp = tp;
  c.ep = ep;
  c.experts = 8;
  c.top_k = kind.top_k;
  c.tokens = 7;
  c.dtype = DType::kF32;
  c.capacity_factor = 0.8;
  c.mode = kind.mode;
  c.router = kind.change;
  if (masked) {
    c.mask = [](int replica) {
      std::vector<uint8_t> mask(7);
      for (int t = 0; t < 7; ++t) mask[t] = t % 3 != replica % 3;
      return mask;
    };
  }
  return c;
}

void ExpectSameBits(const LayerRun& a, const LayerRun& b) {
  ASSERT_EQ(a.ranks.size(), b.ranks.size());
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    const Values& x = a.ranks[r].values;
    const Values& y = b.ranks[r].values;
    EXPECT_EQ(a.ranks[r].decision.Digest(), b.ranks[r].decision.Digest()) << "rank " << r;
    EXPECT_EQ(x.y, y.y) << "rank " << r;
    EXPECT_EQ(x.dx, y.dx) << "rank " << r;
    EXPECT_EQ(x.router, y.router) << "rank " << r;
    EXPECT_EQ(x.w_in, y.w_in) << "rank " << r;
    EXPECT_EQ(x.w_out, y.w_out) << "rank " << r;
  }
}

// Output and expert gradients against the dense layer in double, which takes routes and weights from the run.
void ExpectLikeDense(const LayerCase& c, const LayerRun& run) {
  const DenseResult dense = RunDense(c, run);
  for (const RankRun& rank : run.ranks) {
    const std::vector<double>& y = dense.y[rank.replica];
    EXPECT_LE(MaxDifference(rank.values.y, y), 2e-5 * (1 + MaxAbs(y)));
    const std::vector<double> w_in = ExpertShard(c, rank, "w_in", dense.sums.w_in);
    EXPECT_LE(MaxDifference(SumOverEdp(c, run, rank, &Values::w_in), w_in), 2e-5 * (1 + MaxAbs(w_in)));
  }
}

TEST(RouterOrdersTest, PaddedAndRaggedOrdersGiveTheSameBits) {
  for (const RoutingKind& kind : Kinds()) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(absl::StrCat(kind.name, masked ? ", masked" : ""));
      const LayerCase c = CaseOf(kind, 2, 2, masked);
      ASSERT_OK_AND_ASSIGN(const LayerRun reference, RunLayer(c, *FindOrder("reference")));
      ExpectLikeDense(c, reference);
      for (const RankRun& rank : reference.ranks) EXPECT_OK(rank.decision.Validate());
      for (const char* name : {"drop_gather", "fused", "token_sliced"}) {
        SCOPED_TRACE(name);
        ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, *FindOrder(name)));
        ExpectSameBits(reference, run);
      }
      ASSERT_OK_AND_ASSIGN(const LayerRun dedup, RunLayer(c, *FindOrder("dedup")));
      ExpectLikeDense(c, dedup);
    }
  }
}

// Whole experts whose EP groups cut TP groups, with token counts that differ: capacities agree all the same.
TEST(RouterOrdersTest, WholeExpertsWhereEpGroupsCutTpGroups) {
  for (const int tp : {2, 4}) {
    for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop, CapacityMode::kDropless}) {
      LayerCase c;
      c.tp = tp;
      c.ep = 3;
      c.dp = 3;
      c.whole = true;
      c.experts = 6;
      c.dtype = DType::kF32;
      c.mode = mode;
      c.tokens_of = [](int replica) -> int64_t { return 4 + 8 * replica; };
      for (const char* name : {"unsharded", "token_sliced", "dedup"}) {
        SCOPED_TRACE(absl::StrCat(name, " tp ", tp, " mode ", static_cast<int>(mode)));
        if (mode == CapacityMode::kDropless && std::string(name) == "unsharded") continue;
        ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, *FindOrder(name)));
        ExpectLikeDense(c, run);
      }
    }
  }
}

// Masked tokens are zero rows of the output and pass no gradient, whatever they contain.
TEST(RouterOrdersTest, MaskedTokensAreExactlyZero) {
  const LayerCase c = CaseOf(Kinds()[1], 2, 2, true);
  for (const char* name : {"reference", "token_sliced", "dedup"}) {
    ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, *FindOrder(name)));
    for (const RankRun& rank : run.ranks) {
      for (int64_t t = 0; t < c.tokens; ++t) {
        if (rank.decision.is_active(t)) continue;
        for (int64_t i = t * c.hidden; i < (t + 1) * c.hidden; ++i) {
          EXPECT_EQ(rank.values.y[i], 0.0) << name;
          EXPECT_EQ(rank.values.dx[i], 0.0) << name;
        }
      }
    }
  }
}

// Routes recorded under one order and replayed under another whose own choice would differ (other seed of the noise).
TEST(RouterOrdersTest, Trail30_ReplayedRoutesGiveTheRecordedBits) {
  const RoutingKind noisy = Kinds()[3];
  LayerCase c = CaseOf(noisy, 2, 2, false);
  c.router = [](RouterConfig* config) { config->noise = SelectionNoise::kAllChoices; };
  ASSERT_OK_AND_ASSIGN(const LayerRun recorded, RunLayer(c, *FindOrder("fused")));
  RoutingLog log;
  for (const RankRun& rank : recorded.ranks) {
    if (rank.lane != 0) continue;
    ASSERT_OK(
        log.Record({.layer = "test.moe", .step = 3, .source = static_cast<uint64_t>(rank.replica)}, rank.decision));
  }
  ASSERT_OK_AND_ASSIGN(const RoutingLog read, RoutingLog::Parse(log.Serialize()));
  LayerCase replayed = c;
  replayed.replay = [&read](int replica) -> const RoutingDecision* {
    return *read.Find({.layer = "test.moe", .step = 3, .source = static_cast<uint64_t>(replica)});
  };
  replayed.router = nullptr;  // without noise the router would choose otherwise
  for (const char* name : {"reference", "token_sliced"}) {
    ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(replayed, *FindOrder(name)));
    ExpectSameBits(recorded, run);
  }
  replayed.replay = nullptr;
  ASSERT_OK_AND_ASSIGN(const LayerRun free, RunLayer(replayed, *FindOrder("reference")));
  EXPECT_NE(free.ranks[0].decision.expert, recorded.ranks[0].decision.expert);
}

// Guarantee 6: whatever the router does, all ranks issue the same collectives. Every subset of experts in use, forced
// by replaying made-up routes, on every source.
TEST(RouterOrdersTest, C32_EveryUsePatternOfExpertsHasTheSameCollectives) {
  LayerCase c;
  c.tp = 2;
  c.ep = 2;
  c.experts = 4;
  c.top_k = 1;
  c.tokens = 4;
  c.mode = CapacityMode::kFactor;
  c.capacity_factor = 4;
  for (const char* name : {"fused", "token_sliced", "dedup"}) {
    std::vector<int64_t> collectives;
    std::vector<std::string> taps;
    for (int used = 1; used < 16; ++used) {
      std::vector<RoutingDecision> made(2);
      for (int replica = 0; replica < 2; ++replica) {
        RoutingDecision& d = made[replica];
        d.num_tokens = 4;
        d.num_experts = 4;
        d.capacity = 4;
        d.slot.assign(4, 0);
        d.weight.assign(4, 0.5f);
        d.assigned.assign(4, 0);
        d.balance_count.assign(4, 0);
        std::vector<int> experts;
        for (int e = 0; e < 4; ++e) {
          // Sources use complementary sets, so an expert may be used by one source only, or by none.
          if (((replica == 0 ? used : 15 - used) >> e) % 2 == 1) experts.push_back(e);
        }
        if (experts.empty()) experts.push_back(0);
        for (int t = 0; t < 4; ++t) {
          d.expert.push_back(experts[t % experts.size()]);
          d.slot[t] = static_cast<int32_t>(d.assigned[d.expert[t]]++);
        }
        d.kept = d.assigned;
        ASSERT_OK(d.Validate());
      }
      c.replay = [&made](int replica) { return &made[replica]; };
      ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, *FindOrder(name)));
      ExpectLikeDense(c, run);
      for (const RankRun& rank : run.ranks) {
        const int64_t count = rank.forward.total_collectives() + rank.backward.total_collectives();
        collectives.push_back(count);
        EXPECT_EQ(count, collectives[0]) << name << " pattern " << used;
        if (taps.empty()) taps = rank.taps;
        EXPECT_EQ(rank.taps, taps) << name << " pattern " << used;
        // An expert of this rank that nobody uses has a gradient of exactly zero.
        const int64_t per_expert = static_cast<int64_t>(rank.values.w_in.size()) / 2;
        for (int64_t local = 0; local < 2; ++local) {
          const int64_t e = rank.ep_rank * 2 + local;
          if (made[0].kept[e] + made[1].kept[e] > 0) continue;
          for (int64_t i = local * per_expert; i < (local + 1) * per_expert; ++i) EXPECT_EQ(rank.values.w_in[i], 0.0);
        }
      }
    }
  }
}

// A user's router that gives two routes one slot: found before a row moves, in every order.
class DoublingRouter final : public Router {
 public:
  explicit DoublingRouter(std::unique_ptr<Router> inner) : inner_(std::move(inner)) {}
  const RouterConfig& config() const override { return inner_->config(); }
  absl::StatusOr<RoutingDecision> Route(const RouterInput& input, const RouterStep& step, Stream& stream) override {
    EK_ASSIGN_OR_RETURN(RoutingDecision d, inner_->Route(input, step, stream));
    std::fill(d.slot.begin(), d.slot.end(), 0);
    return d;
  }
  absl::Status Backward(const RouterInput& input, const RouterStep& step, const RoutingDecision& decision,
                        ConstTensorView dweight, const RouterLossGradients& losses, TensorView dx, TensorView dgate,
                        Stream& stream) override {
    return inner_->Backward(input, step, decision, dweight, losses, dx, dgate, stream);
  }

 private:
  std::unique_ptr<Router> inner_;
};

const bool registered =
    RegisterRouter("doubling",
                   [](const RouterConfig& config, const RouterGroups& groups,
                      Device* device) -> absl::StatusOr<std::unique_ptr<Router>> {
                     RouterConfig inner = config;
                     inner.kind = kTopK;
                     EK_ASSIGN_OR_RETURN(std::unique_ptr<Router> router, CreateRouter(inner, groups, device));
                     return std::make_unique<DoublingRouter>(std::move(router));
                   });

TEST(RouterOrdersTest, C43_AUsersRouterThatDoublesSlotsIsRefused) {
  ASSERT_TRUE(registered);
  LayerCase c = CaseOf(Kinds()[1], 2, 2, false);
  c.router = [](RouterConfig* config) { config->kind = "doubling"; };
  for (const char* name : {"reference", "token_sliced", "dedup"}) {
    EXPECT_THAT(RunLayer(c, *FindOrder(name)).status(),
                testutil::StatusIs(absl::StatusCode::kInternal, ::testing::HasSubstr("slots of the expert")));
  }
}

}  // namespace
}  // namespace evenkeel::moe
