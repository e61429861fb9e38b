// The built-in routers on one rank, and a user's own.
#include "evenkeel/moe/router.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/testing/router_bench.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

// ---- One rank ----

TEST(RouterTest, Trail22_ZeroTokensInEveryMode) {
  for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop, CapacityMode::kDropless}) {
    RouterConfig config = Config(8, 4, 2);
    config.capacity.mode = mode;
    RouterBench bench;
    ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(config, {}));
    EXPECT_OK(d.Validate());
    EXPECT_EQ(d.capacity, mode == CapacityMode::kFactor ? 4 : 0);
    ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, bench.device.get()));
    std::vector<float> x;
    std::vector<float> dgate(32, 1.0f);
    EXPECT_OK(router->Backward(bench.Input(config, x), {}, d, ConstTensorView(nullptr, DType::kF32, {0, 2}), {},
                               TensorView(nullptr, DType::kF32, {0, 8}), TensorView(dgate.data(), DType::kF32, {4, 8}),
                               *bench.stream));
    EXPECT_EQ(dgate, std::vector<float>(32, 1.0f));
  }
}

TEST(RouterTest, KMayEqualTheNumberOfExpertsButNotExceedIt) {
  RouterBench bench;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(Dropless(8, 4, 4), Values(8 * 5, "x")));
  for (int64_t t = 0; t < 5; ++t) {
    const std::set<int32_t> experts(d.expert.begin() + 4 * t, d.expert.begin() + 4 * (t + 1));
    EXPECT_EQ(experts.size(), 4u);
    EXPECT_NEAR(d.weight[4 * t] + d.weight[4 * t + 1] + d.weight[4 * t + 2] + d.weight[4 * t + 3], 1, 1e-6);
  }
  EXPECT_THAT(bench.Route(Config(8, 4, 5), {}),
              StatusIs(kInvalid, HasSubstr("k 5 must be between 1 and the number of experts, 4")));
}

TEST(RouterTest, RefusesBadConfigurations) {
  RouterBench bench;
  const auto refused = [&](auto change, const char* message) {
    RouterConfig config = Config(8, 4, 2);
    change(config);
    EXPECT_THAT(bench.Route(config, {}), StatusIs(kInvalid, AllOf(HasSubstr("blocks.1.moe"), HasSubstr(message))));
  };
  refused([](RouterConfig& c) { c.top_k = 0; }, "k 0");
  refused([](RouterConfig& c) { c.experts = 0; }, "0 experts");
  refused([](RouterConfig& c) { c.jitter = 1.0f; }, "jitter 1");
  refused([](RouterConfig& c) { c.jitter = std::nanf(""); }, "jitter nan");
  refused([](RouterConfig& c) { c.route_scale = 0; }, "route scale 0");
  refused([](RouterConfig& c) { c.route_scale = 1e300; }, "route scale 1e+300");
  refused([](RouterConfig& c) { c.groups = 3; }, "1 of 3 groups of 4 experts");
  refused([](RouterConfig& c) { c.groups = 4; }, "k 2 exceeds the 1 experts");
  refused([](RouterConfig& c) { c.groups = 2, c.groups_kept = 3; }, "cannot keep 3 of 2");
  refused([](RouterConfig& c) { c.capacity.factor = Rational(); }, "capacity factor of 0");
  refused([](RouterConfig& c) { c.capacity.min_capacity = -1; }, "minimum capacity -1");
  refused([](RouterConfig& c) { c.kind = kExpertChoice, c.capacity.mode = CapacityMode::kDropless; }, "expert choice");
  RouterConfig unknown = Config(8, 4, 2);
  unknown.kind = "mine";
  EXPECT_THAT(bench.Route(unknown, {}), StatusIs(absl::StatusCode::kNotFound,
                                                 HasSubstr("no router \"mine\"; linked: expert_choice, first, topk")));
}

TEST(RouterTest, RefusesBadTensors) {
  RouterBench bench;
  const RouterConfig config = Config(8, 4, 2);
  ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, bench.device.get()));
  std::vector<float> x = Values(24, "x");
  RouterInput input = bench.Input(config, x);
  input.x = ConstTensorView(x.data(), DType::kF32, {4, 6});
  EXPECT_THAT(router->Route(input, {}, *bench.stream), StatusIs(kInvalid, HasSubstr("[tokens, 8], got f32[4, 6]")));
  input = bench.Input(config, x);
  input.gate = ConstTensorView(bench.gate.data(), DType::kI32, {4, 8});
  EXPECT_THAT(router->Route(input, {}, *bench.stream), StatusIs(kInvalid, HasSubstr("got i32[4, 8]")));
  input = bench.Input(config, x);
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, router->Route(input, {}, *bench.stream));
  const TensorView dx(x.data(), DType::kF32, {3, 8});
  const TensorView dgate(bench.gate.data(), DType::kF32, {4, 8});
  EXPECT_THAT(
      router->Backward(input, {}, d, ConstTensorView(x.data(), DType::kF32, {3, 1}), {}, dx, dgate, *bench.stream),
      StatusIs(kInvalid, HasSubstr("dweight must be f32 or f64 [3, 2]")));
  EXPECT_THAT(
      router->Backward(input, {}, d, ConstTensorView(x.data(), DType::kF32, {3, 2}), {}, dgate, dgate, *bench.stream),
      StatusIs(kInvalid, HasSubstr("shapes of x and gate")));
}

TEST(RouterTest, C38_NonFiniteInputIsNamed) {
  RouterBench bench;
  std::vector<float> x = Values(8 * 5, "x");
  x[8 * 3 + 2] = std::nanf("");
  EXPECT_THAT(bench.Route(Config(8, 4, 2), x),
              StatusIs(kInvalid, HasSubstr("router of layer \"blocks.1.moe\": the logit of token 3 for expert 0 is")));
  x[8 * 3 + 2] = std::numeric_limits<float>::max();  // finite input, overflowing logits
  for (float& g : bench.gate) g = 4.0f;
  EXPECT_THAT(bench.Route(Config(8, 4, 2), x), StatusIs(kInvalid, HasSubstr("token 3")));
}

// ---- Expert choice, bias, replay ----

TEST(RouterTest, ExpertChoiceFillsEveryExpert) {
  RouterBench bench;
  RouterConfig config = Config(8, 4, 2);
  config.kind = kExpertChoice;
  config.capacity.min_capacity = 0;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d,
                       bench.Route(config, Values(8 * 10, "x"), {}, {.tp = nullptr, .ep = nullptr, .tp_size = 4}));
  EXPECT_OK(d.Validate());
  EXPECT_THAT(d.kept, ElementsAre(5, 5, 5, 5));  // ceil(10 * 2 / 4)
  EXPECT_EQ(d.capacity, 8);                      // rounded up to T
  for (int64_t r = 0; r < d.num_routes(); ++r) {
    const float score = d.score[r / d.top_k * 4 + d.expert[r]];
    EXPECT_EQ(d.weight[r], d.slot[r] >= 0 ? score : 0.0f);
  }
}

TEST(RouterTest, SelectionBiasBalancesWithoutALoss) {
  RouterBench bench;
  const RouterConfig config = Dropless(8, 4, 1);
  std::vector<float> x = Values(8 * 256, "x");
  for (size_t i = 0; i < x.size(); i += 8) x[i] += 2.0f;  // all tokens lean the same way
  ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, bench.device.get()));
  std::vector<float> bias(4, 0.0f);
  int64_t first = 0;
  int64_t last = 0;
  for (int step = 0; step < 300; ++step) {
    RouterInput input = bench.Input(config, x);
    input.selection_bias = bias.data();
    ASSERT_OK_AND_ASSIGN(const RoutingDecision d, router->Route(input, {}, *bench.stream));
    last = *std::max_element(d.assigned.begin(), d.assigned.end());
    if (step == 0) first = last;
    UpdateSelectionBias(d.assigned, 0.003f, absl::MakeSpan(bias));
  }
  EXPECT_GT(first, 110);
  EXPECT_LT(last, 80);  // 64 would be even
}

TEST(UpdateSelectionBiasTest, ComparesWithTheMeanExactly) {
  std::vector<float> bias = {0, 0, 0};
  UpdateSelectionBias({1, 2, 3}, 0.5f, absl::MakeSpan(bias));
  EXPECT_THAT(bias, ElementsAre(0.5f, 0.0f, -0.5f));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  UpdateSelectionBias({huge, huge, huge - 1}, 0.5f, absl::MakeSpan(bias));
  EXPECT_THAT(bias, ElementsAre(0.0f, -0.5f, 0.0f));
}

// A recomputation replays the recorded routes: even other random numbers and other inputs cannot change them.
TEST(RouterTest, Trail30_ReplayKeepsRoutesAndRecomputesWeights) {
  RouterBench bench;
  RouterConfig config = Config(8, 6, 2);
  config.noise = SelectionNoise::kAllChoices;
  config.drop = DropPolicy::kRandom;
  std::vector<float> x = Values(8 * 40, "x");
  ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, bench.device.get()));
  RouterInput input = bench.Input(config, x);
  const RouterStep step{.seed = 1, .step = 1};
  ASSERT_OK_AND_ASSIGN(const RoutingDecision recorded, router->Route(input, step, *bench.stream));
  input.replay = &recorded;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision same, router->Route(input, step, *bench.stream));
  EXPECT_EQ(same.Digest(), recorded.Digest());
  ASSERT_OK_AND_ASSIGN(const RoutingDecision later, router->Route(input, {.seed = 1, .step = 2}, *bench.stream));
  EXPECT_EQ(later.Digest(), recorded.Digest());
  for (float& v : x) v += 0.125f;
  ASSERT_OK_AND_ASSIGN(const RoutingDecision moved, router->Route(input, step, *bench.stream));
  EXPECT_EQ(moved.expert, recorded.expert);
  EXPECT_EQ(moved.slot, recorded.slot);
  EXPECT_NE(moved.weight, recorded.weight);
  x.resize(8 * 39);
  RouterInput shorter = bench.Input(config, x);
  shorter.replay = &recorded;
  EXPECT_THAT(router->Route(shorter, step, *bench.stream), StatusIs(kInvalid, HasSubstr("40 tokens")));
}

// ---- A user's own router ----

class FirstExpertRouter final : public Router {
 public:
  explicit FirstExpertRouter(const RouterConfig& config) : config_(config) {}
  const RouterConfig& config() const override { return config_; }
  absl::StatusOr<RoutingDecision> Route(const RouterInput& input, const RouterStep&, Stream&) override {
    RoutingDecision d;
    d.num_tokens = input.x.shape().dim(0);
    d.num_experts = config_.experts;
    d.dropless = true;
    d.expert.assign(d.num_tokens, 0);
    d.slot.resize(d.num_tokens);
    std::iota(d.slot.begin(), d.slot.end(), 0);
    d.weight.assign(d.num_tokens, 1.0f);
    d.assigned.assign(d.num_experts, 0);
    d.assigned[0] = d.num_tokens;
    d.kept = d.assigned;
    d.active_tokens = d.num_tokens;
    return d;
  }
  absl::Status Backward(const RouterInput&, const RouterStep&, const RoutingDecision&, ConstTensorView,
                        const RouterLossGradients&, TensorView, TensorView, Stream&) override {
    return absl::OkStatus();
  }

 private:
  const RouterConfig config_;
};

const bool registered = RegisterRouter("first", [](const RouterConfig& config, const RouterGroups&, Device*) {
  return absl::StatusOr<std::unique_ptr<Router>>(std::make_unique<FirstExpertRouter>(config));
});

TEST(RouterRegistryTest, FindsAUsersRouter) {
  ASSERT_TRUE(registered);
  EXPECT_THAT(RouterNames(), Contains("first"));
  RouterBench bench;
  RouterConfig config = Config(2, 3, 1);
  config.kind = "first";
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(config, {1, 2, 3, 4}));
  EXPECT_OK(d.Validate());
  EXPECT_DEATH(RegisterRouter("topk", nullptr), "registered twice");
}

}  // namespace
}  // namespace evenkeel::moe
