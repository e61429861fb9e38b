// The cost model against the closed forms' break-even points.
#include "evenkeel/moe/order_planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

OrderSizes Sizes(int tp, int ep) {
  return {.tokens = 4096,
          .hidden = 1024,
          .experts = 8,
          .top_k = 2,
          .capacity = 1280,
          .dtype = DType::kBF16,
          .tp = tp,
          .ep = ep};
}

CostModel Links(double tp_bandwidth, double ep_bandwidth, double alpha = 0) {
  return {.tp = {alpha, 1 / tp_bandwidth}, .ep = {alpha, 1 / ep_bandwidth}};
}

TypedOrder Typed(const char* name) { return *CheckOrder(*FindOrder(name)); }

double Seconds(const char* name, const OrderSizes& sizes, const CostModel& model) {
  return EstimateSeconds(*ComputeOrderCost(Typed(name), sizes), model);
}

// drop_gather beats reference iff the TP link is faster by more than E/(E-1); fused iff by more than E/(2(E-1)).
TEST(OrderPlannerTest, BreakEvenPointsAreThoseOfTheClosedForms) {
  for (int tp : {2, 4}) {
    for (int ep : {2, 4, 8}) {
      const OrderSizes sizes = Sizes(tp, ep);
      const double drop_gather = ep / (ep - 1.0), fused = ep / (2 * (ep - 1.0));
      EXPECT_LT(Seconds("drop_gather", sizes, Links(1e9 * drop_gather * 1.01, 1e9)),
                Seconds("reference", sizes, Links(1e9 * drop_gather * 1.01, 1e9)));
      EXPECT_GT(Seconds("drop_gather", sizes, Links(1e9 * drop_gather * 0.99, 1e9)),
                Seconds("reference", sizes, Links(1e9 * drop_gather * 0.99, 1e9)));
      EXPECT_LT(Seconds("fused", sizes, Links(1e9 * fused * 1.01, 1e9)),
                Seconds("reference", sizes, Links(1e9 * fused * 1.01, 1e9)));
      EXPECT_GT(Seconds("fused", sizes, Links(1e9 * fused * 0.99, 1e9)),
                Seconds("reference", sizes, Links(1e9 * fused * 0.99, 1e9)));
    }
  }
}

TEST(OrderPlannerTest, ChoosesAndSaysWhy) {
  const std::vector<std::string> padded = {"reference", "drop_gather", "fused"};
  ASSERT_OK_AND_ASSIGN(OrderPlan plan,
                       PlanOrder(padded, ExpertLayout::kTensorParallel, Sizes(2, 4), Links(1e10, 1e9, 1e-6)));
  EXPECT_EQ(plan.best().name, "fused");
  EXPECT_EQ(plan.estimates.size(), 3u);
  EXPECT_THAT(plan.why, HasSubstr("fused"));
  EXPECT_THAT(plan.why, HasSubstr("would take"));
  // Latency only: fewer collectives win.
  ASSERT_OK_AND_ASSIGN(plan, PlanOrder(padded, ExpertLayout::kTensorParallel, Sizes(2, 4), Links(1e18, 1e18, 1e-3)));
  EXPECT_EQ(plan.best().name, "reference");
  // Orders of the other layout are left out.
  ASSERT_OK_AND_ASSIGN(plan, PlanOrder(OrderNames(), ExpertLayout::kWhole, Sizes(2, 4), Links(1e9, 1e9)));
  for (const OrderEstimate& estimate : plan.estimates) EXPECT_NE(estimate.name, "fused");
  EXPECT_THAT(PlanOrder(padded, ExpertLayout::kWhole, Sizes(2, 4), Links(1e9, 1e9)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("none of the orders")));
  EXPECT_THAT(
      PlanOrder(padded, ExpertLayout::kTensorParallel, Sizes(2, 4), Links(std::numeric_limits<double>::quiet_NaN(), 1)),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("finite")));
}

// V* = alpha * T/(T-1) / ((E-1)/(E beta_ep) - 1/beta_tp): two more all-gathers against the saved exchange.
TEST(OrderPlannerTest, CrossoverIsTheFormulas) {
  const double alpha = 1e-5, tp = 2e10, ep = 1e9;
  const int T = 2, E = 4;
  ASSERT_OK_AND_ASSIGN(const std::optional<double> v,
                       CrossoverBytes(Typed("reference"), Typed("drop_gather"), Sizes(T, E), Links(tp, ep, alpha)));
  ASSERT_TRUE(v.has_value());
  EXPECT_NEAR(*v, alpha * T / (T - 1.0) / ((E - 1.0) / (E * ep) - 1 / tp), 1e-6 * *v);
  ASSERT_OK_AND_ASSIGN(const std::optional<double> never,
                       CrossoverBytes(Typed("reference"), Typed("drop_gather"), Sizes(T, E), Links(1e9, 1e9, alpha)));
  EXPECT_FALSE(never.has_value());
}

// At the crossover both take the same time; below it the first is faster, above it the second. Also for real rows.
TEST(OrderPlannerTest, CrossoverInTokensIsWhereTimesMeet) {
  const CostModel model = Links(300e9, 50e9, 10e-6);
  for (const char* name : {"fused", "token_sliced", "dedup"}) {
    const TypedOrder first = Typed("reference"), second = Typed(name);
    const OrderSizes sizes = Sizes(2, 4);
    ASSERT_OK_AND_ASSIGN(const std::optional<double> tokens, CrossoverTokens(first, second, sizes, model));
    ASSERT_TRUE(tokens.has_value()) << name;
    ASSERT_GT(*tokens, 0) << name;
    const auto faster_by = [&](double factor) {
      OrderSizes scaled = sizes;
      scaled.tokens = static_cast<int64_t>(*tokens * factor);
      // Slots in proportion, as the crossover has them: a multiple of T.
      scaled.capacity = sizes.capacity * scaled.tokens / sizes.tokens / 2 * 2;
      return EstimateSeconds(*ComputeOrderCost(first, scaled), model) -
             EstimateSeconds(*ComputeOrderCost(second, scaled), model);
    };
    EXPECT_LT(faster_by(0.7), 0) << name;
    EXPECT_GT(faster_by(1.4), 0) << name;
  }
  ASSERT_OK_AND_ASSIGN(const std::optional<double> never,
                       CrossoverTokens(Typed("reference"), Typed("drop_gather"), Sizes(2, 4), Links(1e9, 1e9, 1e-6)));
  EXPECT_FALSE(never.has_value());
}

// Messages between nodes decide for small buffers, the hop inside nodes against two levels for large ones: 2 (N-1)(L-1)
// messages less for 2 V/T ((L-1)/L - (L-1)/E) bytes more inside, each way.
TEST(OrderPlannerTest, TwoLevelsWinWhereMessagesBetweenNodesCost) {
  constexpr double kMessage = 20e-6, kInside = 100e9, kBetween = 25e9;
  CostModel model = Links(300e9, kInside);
  model.ep_between = LinkModel{.alpha_seconds = kMessage, .seconds_per_byte = 1 / kBetween};
  OrderSizes sizes = Sizes(2, 8);
  sizes.ep_per_node = 4;
  const double N = 2, L = 4, E = 8, T = 2;
  for (int64_t capacity : {8, 80, 800, 8000, 80000}) {
    sizes.capacity = capacity;
    const double V = 8.0 * static_cast<double>(capacity) * 1024 * 2;
    const auto seconds = [&](const char* name) {
      return EstimateSeconds(*ComputeOrderCost(Typed(name), sizes), model);
    };
    const double saved = 4 * (N - 1) * (L - 1) * kMessage;
    const double added = 4 * V / T * ((L - 1) / L - (L - 1) / E) / kInside;
    EXPECT_NEAR(seconds("fused") - seconds("two_level(fused)"), saved - added, 1e-3 * (saved + added)) << capacity;
  }
  sizes.capacity = 80;
  const std::vector<std::string> names = {"fused", "two_level(fused)"};
  ASSERT_OK_AND_ASSIGN(OrderPlan plan, PlanOrder(names, ExpertLayout::kTensorParallel, sizes, model));
  EXPECT_EQ(plan.best().name, "two_level(fused)");
  model.ep_between->alpha_seconds = 0;
  ASSERT_OK_AND_ASSIGN(plan, PlanOrder(names, ExpertLayout::kTensorParallel, sizes, model));
  EXPECT_EQ(plan.best().name, "fused");
  model.ep_between->seconds_per_byte = -1;
  EXPECT_THAT(PlanOrder(names, ExpertLayout::kTensorParallel, sizes, model),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at least 0")));
}

void ExpectAllRanksMeasureAlike(const comm::MeshShape& shape) {
  comm::InProcessOptions options;
  options.world_size = 4;
  ASSERT_OK_AND_ASSIGN(const auto world, comm::InProcessWorld::Create(options));
  ASSERT_OK_AND_ASSIGN(const comm::Mesh mesh, comm::Mesh::Create(shape));
  std::vector<CostModel> models(4);
  const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(auto stream, device->CreateStream("s"));
    EK_ASSIGN_OR_RETURN(auto tp, backend.CreateGroup(mesh.GroupOf(comm::Axis::kTp, backend.rank())));
    EK_ASSIGN_OR_RETURN(auto ep, backend.CreateGroup(mesh.GroupOf(comm::Axis::kEp, backend.rank())));
    EK_ASSIGN_OR_RETURN(models[backend.rank()],
                        CalibrateCostModel({.tp = tp.get(), .ep = ep.get()}, device.get(), Clock::Real(), *stream));
    return absl::OkStatus();
  });
  ASSERT_OK(comm::FirstFailure(statuses));
  for (const CostModel& model : models) {
    EXPECT_EQ(model.tp.alpha_seconds > 0, shape.tp > 1);
    EXPECT_EQ(model.tp.alpha_seconds, models[0].tp.alpha_seconds);
    EXPECT_EQ(model.ep.alpha_seconds, models[0].ep.alpha_seconds);
    EXPECT_EQ(model.ep.seconds_per_byte, models[0].ep.seconds_per_byte);
  }
}

TEST(OrderPlannerTest, AllRanksMeasureAlike) {
  ExpectAllRanksMeasureAlike({.tp = 2, .ep = 2, .dp = 2, .etp = 2});
  ExpectAllRanksMeasureAlike({.tp = 1, .ep = 4, .dp = 4, .etp = 1});  // a group of one takes part in nothing
}

// With a bandwidth alone, no latency and no TP, exchanges of x and experts of m per chunk: 2 C x where m <= x, all of
// the experts hidden; 2 x + C m where m >= 2 x; and 2 x + m in one chunk. The backward's m is twice the forward's.
TEST(OverlapEstimateTest, HasTheClosedFormsOfTheTwoQueues) {
  OrderSizes sizes = Sizes(1, 2);
  sizes.ffn = 4096;
  CostModel model = Links(1e9, 1e9);
  const OrderCost cost = *ComputeOrderCost(Typed("reference"), sizes);
  const double exchange = static_cast<double>(cost.forward.ep.bytes) / 2 / 1e9;  // one way, all chunks
  const double rows = 4.0 * 2 * 1280;                                            // experts here, sources, slots
  const double flops = 2.0 * 2 * rows * 1024 * 4096;
  for (const double ratio : {0.25, 0.5, 2.0, 3.0}) {  // of the forward's experts to one way of the exchange
    model.expert_flops_per_second = flops / (ratio * exchange);
    for (const auto& [name, chunks] : std::vector<std::pair<const char*, int>>{
             {"reference", 1}, {"overlapped(reference)", 2}, {"overlapped(reference:4)", 4}}) {
      double wanted = 0;
      for (const double m : {ratio * exchange, 2 * ratio * exchange}) {
        const double x = exchange / chunks;
        wanted += chunks == 1 ? 2 * x + m : m <= exchange ? 2 * exchange : 2 * x + m;
      }
      EXPECT_NEAR(EstimateSecondsWithExperts(Typed(name), sizes, model), wanted, 1e-9 * wanted) << name << " " << ratio;
    }
  }
}

TEST(OverlapEstimateTest, IsPickedWhereItHidesMoreThanItsLatency) {
  OrderSizes sizes = Sizes(1, 2);
  sizes.ffn = 4096;
  const std::vector<std::string> names = {"reference", "overlapped(reference)", "overlapped(reference:4)"};
  const auto best = [&](double alpha, double flops_per_second) {
    CostModel model = Links(1e9, 1e9, alpha);
    model.expert_flops_per_second = flops_per_second;
    const absl::StatusOr<OrderPlan> plan = PlanOrder(names, ExpertLayout::kTensorParallel, sizes, model);
    EXPECT_OK(plan);
    return plan.ok() ? plan->best().name : std::string();
  };
  EXPECT_EQ(best(1e-6, 1e13), "overlapped(reference:4)");
  EXPECT_EQ(best(1.0, 1e13), "reference") << "collectives of a second each";
  EXPECT_EQ(best(1e-6, 0), "reference") << "of communication alone nothing can be hidden";
  CostModel bad = Links(1e9, 1e9);
  bad.expert_flops_per_second = -1;
  EXPECT_THAT(PlanOrder(names, ExpertLayout::kTensorParallel, sizes, bad).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1 operations per second")));
  bad.expert_flops_per_second = 1;
  sizes.ffn = 0;
  EXPECT_THAT(PlanOrder(names, ExpertLayout::kTensorParallel, sizes, bad).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("experts of width 0")));
}

TEST(OverlapEstimateTest, ChunksAreOfferedWhereARankHasTheExperts) {
  const std::vector<std::string> names = {"fused", "dedup"};
  EXPECT_THAT(WithChunks(names, Sizes(1, 2)),
              ::testing::ElementsAre("fused", "dedup", "overlapped(fused)", "overlapped(fused:4)"));
  EXPECT_THAT(WithChunks(names, Sizes(1, 4)), ::testing::ElementsAre("fused", "dedup", "overlapped(fused)"));
  EXPECT_THAT(WithChunks(names, Sizes(1, 8)), ::testing::ElementsAre("fused", "dedup"));
}

}  // namespace
}  // namespace evenkeel::moe
