#include "evenkeel/moe/router.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
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
constexpr absl::StatusCode kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

std::vector<float> Values(int64_t n, absl::string_view name) {
  const PhiloxStream stream(PhiloxKey(21).Add(name));
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(stream.Normal(i));
  return values;
}

RouterConfig Config(int64_t hidden, int experts, int top_k) {
  RouterConfig config;
  config.layer = "blocks.1.moe";
  config.hidden = hidden;
  config.experts = experts;
  config.top_k = top_k;
  return config;
}

// One rank's router with its device.
struct Bench {
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("compute");
  std::vector<float> gate;

  RouterInput Input(const RouterConfig& config, std::vector<float>& x) {
    if (gate.empty()) gate = Values(config.experts * config.hidden, "gate");
    const int64_t tokens = static_cast<int64_t>(x.size()) / config.hidden;
    return {.x = ConstTensorView(x.data(), DType::kF32, {tokens, config.hidden}),
            .gate = ConstTensorView(gate.data(), DType::kF32, {config.experts, config.hidden})};
  }
  absl::StatusOr<RoutingDecision> Route(const RouterConfig& config, std::vector<float> x, const RouterStep& step = {},
                                        const RouterGroups& groups = {}) {
    EK_ASSIGN_OR_RETURN(const auto router, CreateRouter(config, groups, device.get()));
    return router->Route(Input(config, x), step, *stream);
  }
};

RouterConfig Dropless(int64_t hidden, int experts, int top_k) {
  RouterConfig config = Config(hidden, experts, top_k);
  config.capacity.mode = CapacityMode::kDropless;
  return config;
}

std::vector<float> Rows(const std::vector<float>& x, int64_t hidden, const std::vector<int64_t>& order) {
  std::vector<float> rows;
  for (const int64_t t : order) rows.insert(rows.end(), x.begin() + t * hidden, x.begin() + (t + 1) * hidden);
  return rows;
}

// ---- One rank ----

TEST(RouterTest, Trail22_ZeroTokensInEveryMode) {
  for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop, CapacityMode::kDropless}) {
    RouterConfig config = Config(8, 4, 2);
    config.capacity.mode = mode;
    Bench bench;
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
  Bench bench;
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
  Bench bench;
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
  Bench bench;
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
  Bench bench;
  std::vector<float> x = Values(8 * 5, "x");
  x[8 * 3 + 2] = std::nanf("");
  EXPECT_THAT(bench.Route(Config(8, 4, 2), x),
              StatusIs(kInvalid, HasSubstr("router of layer \"blocks.1.moe\": the logit of token 3 for expert 0 is")));
  x[8 * 3 + 2] = std::numeric_limits<float>::max();  // finite input, overflowing logits
  for (float& g : bench.gate) g = 4.0f;
  EXPECT_THAT(bench.Route(Config(8, 4, 2), x), StatusIs(kInvalid, HasSubstr("token 3")));
}

// ---- Metamorphic ----

TEST(RouterMetamorphicTest, PermutingTokensPermutesRoutes) {
  constexpr int64_t kTokens = 37, kHidden = 12;
  for (const int k : {1, 2, 3}) {
    Bench bench;
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
  Bench bench;
  const std::vector<float> x = Values(kTokens * kHidden, "x");
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(Dropless(kHidden, kExperts, 3), x));
  std::vector<int64_t> name_of(kExperts);  // new id of each expert
  std::vector<int64_t> old_of(kExperts);
  for (int e = 0; e < kExperts; ++e) {
    name_of[e] = (e * 3 + 1) % kExperts;
    old_of[name_of[e]] = e;
  }
  Bench renamed;
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
  Bench bench;
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
  Bench bench;
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

// ---- Expert choice, bias, replay ----

TEST(RouterTest, ExpertChoiceFillsEveryExpert) {
  Bench bench;
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
  Bench bench;
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
  Bench bench;
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

// ---- Ranks ----

using RankBody = std::function<absl::Status(int lane, int source, const RouterGroups& groups)>;

// Runs `body` on every rank of a layout; lane = rank % tp, source = rank / tp.
std::vector<absl::Status> RunMesh(const comm::MeshShape& shape, const RankBody& body) {
  auto world = comm::InProcessWorld::Create({.world_size = shape.tp * shape.dp, .deadline = absl::Seconds(20)});
  EXPECT_OK(world.status());
  return comm::RunRanks(**world, [&](comm::Backend& backend) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(shape));
    EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(mesh.GroupOf(comm::Axis::kTp, backend.rank())));
    EK_ASSIGN_OR_RETURN(const auto ep, backend.CreateGroup(mesh.GroupOf(comm::Axis::kEp, backend.rank())));
    return body(mesh.Coordinate(comm::Axis::kTp, backend.rank()), mesh.Coordinate(comm::Axis::kDp, backend.rank()),
                {.tp = tp.get(), .ep = ep.get(), .tp_size = shape.tp});
  });
}

// Experts with expert TP, one EP group per lane.
std::vector<absl::Status> RunLayout(int tp_size, int ep_size, const RankBody& body) {
  return RunMesh({.tp = tp_size, .ep = ep_size, .dp = ep_size, .etp = tp_size}, body);
}

// Different token counts on every source, every capacity mode, expert TP on: one capacity, a multiple of T, everywhere;
// and random routing that is the same on all lanes because no lane enters the key (the digest check would object).
TEST(RouterRanksTest, Trail1_Trail3_Trail4_Trail21_OneCapacityAndOneRouting) {
  constexpr int kTp = 2, kEp = 3;
  for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop, CapacityMode::kDropless}) {
    for (const int k : {1, 2, 3}) {
      RouterConfig config = Config(8, 6, k);
      config.capacity.mode = mode;
      config.capacity.factor = *Rational::Parse("1.25");
      config.capacity.min_capacity = 1;
      config.noise = SelectionNoise::kAllChoices;
      config.jitter = 0.1f;
      std::vector<RoutingDecision> decisions(kTp * kEp);
      const auto statuses = RunLayout(kTp, kEp, [&](int lane, int source, const RouterGroups& groups) -> absl::Status {
        Bench bench;
        std::vector<float> x = Values(8 * (source == 1 ? 0 : 11 + 6 * source), absl::StrCat("x", source));
        const RouterStep step{.seed = 9, .step = 4, .source = static_cast<uint64_t>(source)};
        EK_ASSIGN_OR_RETURN(decisions[source * kTp + lane], bench.Route(config, x, step, groups));
        return decisions[source * kTp + lane].Validate();
      });
      for (const absl::Status& status : statuses) ASSERT_OK(status);
      for (int rank = 0; rank < kTp * kEp; ++rank) {
        EXPECT_EQ(decisions[rank].capacity, decisions[0].capacity);
        EXPECT_EQ(decisions[rank].capacity % kTp, 0);
        EXPECT_EQ(decisions[rank].Digest(), decisions[rank / kTp * kTp].Digest());
      }
      if (mode == CapacityMode::kNoDrop) {
        int64_t fullest = 0;
        for (const RoutingDecision& d : decisions) {
          fullest = std::max(fullest, *std::max_element(d.assigned.begin(), d.assigned.end()));
          EXPECT_EQ(d.kept, d.assigned);
        }
        EXPECT_EQ(decisions[0].capacity, (fullest + 1) / 2 * 2);
      }
    }
  }
}

// Whole experts: EP groups span lanes, and where T and E divide neither the other, they cut TP groups in two. Then the
// maximum has to travel through lanes and EP groups until all have it.
TEST(RouterRanksTest, Trail3_Trail4_OneCapacityWhereEpGroupsCutTpGroups) {
  for (const comm::MeshShape& shape :
       {comm::MeshShape{.tp = 2, .ep = 3, .dp = 3, .etp = 1}, comm::MeshShape{.tp = 2, .ep = 4, .dp = 4, .etp = 1},
        comm::MeshShape{.tp = 4, .ep = 2, .dp = 2, .etp = 1}, comm::MeshShape{.tp = 3, .ep = 2, .dp = 2, .etp = 1},
        comm::MeshShape{.tp = 2, .ep = 5, .dp = 5, .etp = 1}, comm::MeshShape{.tp = 4, .ep = 3, .dp = 3, .etp = 1},
        comm::MeshShape{.tp = 4, .ep = 6, .dp = 3, .etp = 1}, comm::MeshShape{.tp = 3, .ep = 1, .dp = 2, .etp = 1}}) {
    SCOPED_TRACE(absl::StrCat("tp ", shape.tp, " ep ", shape.ep, " dp ", shape.dp));
    for (int fullest = 0; fullest < shape.dp; ++fullest) {
      std::vector<int64_t> capacity(shape.tp * shape.dp, -1);
      const auto statuses = RunMesh(shape, [&](int lane, int source, const RouterGroups& groups) -> absl::Status {
        Bench bench;
        RouterConfig config = Config(4, 60, 2);
        config.capacity.mode = CapacityMode::kNoDrop;
        std::vector<float> x(4 * (source == fullest ? 23 : 3), 1.0f);  // equal tokens: all to the same two experts
        EK_ASSIGN_OR_RETURN(const RoutingDecision d, bench.Route(config, x, {}, groups));
        capacity[source * shape.tp + lane] = d.capacity;
        return d.Validate();
      });
      for (const absl::Status& status : statuses) ASSERT_OK(status);
      // Equal on every EP group and every TP group, and enough for the source that needs most.
      EXPECT_GE(capacity[fullest * shape.tp], 23);
      const comm::Mesh mesh = *comm::Mesh::Create(shape);
      for (const comm::Axis axis : {comm::Axis::kEp, comm::Axis::kTp}) {
        for (const comm::Group& group : mesh.Groups(axis)) {
          for (const int rank : group.ranks) EXPECT_EQ(capacity[rank], capacity[group.ranks[0]]);
        }
      }
    }
  }
}

// Ranks outside the EP group take no part: they may be in another stage, or finished.
TEST(RouterRanksTest, Trail15_OnlyTheOwnGroupsAreAsked) {
  const auto statuses =
      RunMesh({.tp = 1, .ep = 2, .dp = 4, .etp = 1}, [&](int, int source, const RouterGroups& groups) -> absl::Status {
        if (source >= 2) return absl::OkStatus();
        Bench bench;
        RouterConfig config = Config(8, 4, 2);
        config.capacity.mode = CapacityMode::kNoDrop;
        return bench.Route(config, Values(8 * 5, "x"), {}, groups).status();
      });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

// One lane's gate is one ulp away at a tie: every lane gets the same error, which names the token and both decisions.
TEST(RouterRanksTest, C41_Trail21_ALaneThatRoutesDifferentlyIsNamed) {
  for (int odd = 0; odd < 3; ++odd) {
    const auto statuses = RunLayout(3, 1, [&](int lane, int, const RouterGroups& groups) -> absl::Status {
      Bench bench;
      bench.gate = {1.0f, 1.0f, 0.5f};  // experts 0 and 1 tie
      if (lane == odd) bench.gate[1] = std::nextafter(1.0f, 2.0f);
      RouterConfig config = Dropless(1, 3, 1);
      // Tokens 0 and 1 are zero and tie on all lanes. Token 2 is where lanes part.
      return bench.Route(config, {0, 0, 1, 1}, {}, groups).status();
    });
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, StatusIs(kFailedPrecondition,
                                   AllOf(HasSubstr("moe route group=blocks.1.moe"), HasSubstr("first at token 2"),
                                         HasSubstr(absl::StrCat("rank ", odd, " chose expert 1 slot 0")),
                                         HasSubstr("expert 0 slot 2"))));
      ASSERT_TRUE(GetErrorContext(status).has_value());
      EXPECT_EQ(GetErrorContext(status)->findings.size(), 3u);
    }
  }
}

TEST(RouterRanksTest, C41_LanesWithDifferentTokenCountsAreNamed) {
  const auto statuses = RunLayout(2, 1, [&](int lane, int, const RouterGroups& groups) {
    Bench bench;
    return bench.Route(Dropless(4, 4, 1), Values(4 * (2 + lane), "x"), {}, groups).status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(kFailedPrecondition,
                                 AllOf(HasSubstr("rank 0 has 2 tokens"), HasSubstr("rank 1 has 3 tokens"))));
  }
}

// Fewer tokens than lanes, down to none: small batches are right.
TEST(RouterRanksTest, C41_FewTokens) {
  for (int64_t tokens = 0; tokens <= 6; ++tokens) {
    const auto statuses = RunLayout(3, 1, [&](int, int, const RouterGroups& groups) -> absl::Status {
      Bench bench;
      EK_ASSIGN_OR_RETURN(const RoutingDecision d, bench.Route(Config(4, 4, 2), Values(4 * tokens, "x"), {}, groups));
      return d.capacity % 3 == 0 ? d.Validate() : absl::InternalError("capacity is no multiple of T");
    });
    for (const absl::Status& status : statuses) ASSERT_OK(status);
  }
}

// A rank that cannot route still takes part, so nobody waits for it: its peers hear of it at once.
TEST(RouterRanksTest, C38_AFailingSourceDoesNotHangItsPeers) {
  const auto statuses = RunLayout(2, 2, [&](int, int source, const RouterGroups& groups) {
    Bench bench;
    std::vector<float> x = Values(8 * 6, "x");
    if (source == 1) x[17] = std::nanf("");
    return bench.Route(Config(8, 4, 2), x, {}, groups).status();
  });
  for (int rank = 0; rank < 4; ++rank) {
    if (rank / 2 == 1) {
      EXPECT_THAT(statuses[rank], StatusIs(kInvalid, HasSubstr("token 2")));
    } else {
      EXPECT_THAT(statuses[rank],
                  StatusIs(kFailedPrecondition, HasSubstr("another rank of the EP group could not route")));
    }
  }
}

// Only one lane sees the bad value (its memory differs): the other lane learns that from the digest exchange.
TEST(RouterRanksTest, C38_AFailingLaneDoesNotHangItsPeers) {
  const auto statuses = RunLayout(2, 1, [&](int lane, int, const RouterGroups& groups) {
    Bench bench;
    std::vector<float> x = Values(8 * 6, "x");
    if (lane == 1) x[17] = std::nanf("");
    return bench.Route(Dropless(8, 4, 2), x, {}, groups).status();
  });
  EXPECT_THAT(statuses[0], StatusIs(kFailedPrecondition, HasSubstr("rank 1 could not route its tokens")));
  EXPECT_THAT(statuses[1], StatusIs(kInvalid, HasSubstr("token 2")));
}

// Other sources' tokens never change mine: with equal counts nothing is exchanged but the capacity.
TEST(RouterRanksTest, OtherSourcesTokensNeverChangeMine) {
  std::vector<uint64_t> digests;
  for (const char* other : {"one", "two"}) {
    uint64_t mine = 0;
    const auto statuses = RunLayout(1, 2, [&](int, int source, const RouterGroups& groups) -> absl::Status {
      Bench bench;
      EK_ASSIGN_OR_RETURN(const RoutingDecision d,
                          bench.Route(Config(8, 4, 2), Values(8 * 9, source == 0 ? "mine" : other), {}, groups));
      if (source == 0) mine = d.Digest();
      return absl::OkStatus();
    });
    for (const absl::Status& status : statuses) ASSERT_OK(status);
    digests.push_back(mine);
  }
  EXPECT_EQ(digests[0], digests[1]);
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
  Bench bench;
  RouterConfig config = Config(2, 3, 1);
  config.kind = "first";
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, bench.Route(config, {1, 2, 3, 4}));
  EXPECT_OK(d.Validate());
  EXPECT_DEATH(RegisterRouter("topk", nullptr), "registered twice");
}

}  // namespace
}  // namespace evenkeel::moe
