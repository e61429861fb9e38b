#include "evenkeel/zero3/fetch_plan.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr auto kFetch = Visit::Kind::kFetch;
constexpr auto kRelease = Visit::Kind::kRelease;

std::vector<PlanUnit> Units(const std::vector<int64_t>& bytes) {
  std::vector<PlanUnit> units;
  for (size_t i = 0; i < bytes.size(); ++i) units.push_back({absl::StrCat("u", i), bytes[i], 0, false});
  return units;
}

std::vector<PlanLeaf> OneUnitLeaves(size_t count) {
  std::vector<PlanLeaf> leaves;
  for (size_t i = 0; i < count; ++i) leaves.push_back({absl::StrCat("leaf", i), {static_cast<int>(i)}});
  return leaves;
}

// Forward through all leaves, backward through all leaves.
std::vector<Visit> Chain(int leaves) {
  std::vector<Visit> visits;
  for (int l = 0; l < leaves; ++l) {
    visits.push_back({kFetch, l});
    visits.push_back({kRelease, l});
  }
  for (int l = leaves; l-- > 0;) {
    visits.push_back({kFetch, l});
    visits.push_back({kRelease, l});
  }
  return visits;
}

// Units that are live together never overlap, and the peak is the largest sum of live units.
void CheckPlan(const FetchPlan& plan, const std::vector<int64_t>& bytes, int64_t fixed) {
  std::vector<bool> live(bytes.size(), false);
  int64_t now = fixed;
  int64_t peak = fixed;
  for (int v = 0; v < plan.num_visits(); ++v) {
    for (const PlanAction& action : plan.actions(v)) {
      const size_t u = static_cast<size_t>(action.unit);
      if (action.kind == PlanAction::Kind::kFree) {
        ASSERT_TRUE(live[u]);
        live[u] = false;
        now -= bytes[u];
        continue;
      }
      ASSERT_FALSE(live[u]);
      for (size_t other = 0; other < bytes.size(); ++other) {
        if (!live[other] || bytes[other] == 0 || bytes[u] == 0) continue;
        const int64_t a = plan.offset(action.unit);
        const int64_t b = plan.offset(static_cast<int>(other));
        ASSERT_TRUE(a + bytes[u] <= b || b + bytes[other] <= a) << plan.ToString();
      }
      ASSERT_LE(plan.offset(action.unit) + bytes[u], plan.arena_bytes());
      live[u] = true;
      now += bytes[u];
      peak = std::max(peak, now);
    }
    ASSERT_EQ(plan.live_bytes(v), now);
  }
  EXPECT_EQ(plan.peak_bytes(), peak);
}

TEST(FetchPlanTest, WithoutPrefetchThePeakIsTheLargestLeaf) {
  const std::vector<int64_t> bytes = {640, 1280, 64, 1920};
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(Units(bytes), OneUnitLeaves(4), Chain(4), {}));
  CheckPlan(plan, bytes, 0);
  EXPECT_EQ(plan.peak_bytes(), 1920);
  EXPECT_EQ(plan.arena_bytes(), 1920);
}

// Prefetch depth 1: the two largest adjacent leaves, and no byte lost to placement.
TEST(FetchPlanTest, PrefetchOfTheNextLeafNeedsTheLargestAdjacentPair) {
  const std::vector<int64_t> bytes = {640, 1280, 64, 1920, 1216};
  PlanOptions options;
  options.prefetch_bytes = 1920;
  options.fixed_bytes = 100;
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(Units(bytes), OneUnitLeaves(5), Chain(5), options));
  CheckPlan(plan, bytes, 100);
  const std::vector<int64_t> even(6, 1024);
  options.prefetch_bytes = 1024;
  ASSERT_OK_AND_ASSIGN(const FetchPlan chain, FetchPlan::Build(Units(even), OneUnitLeaves(6), Chain(6), options));
  CheckPlan(chain, even, 100);
  EXPECT_EQ(chain.peak_bytes(), 100 + 2 * 1024);
  EXPECT_EQ(chain.arena_bytes(), 2 * 1024);
  EXPECT_THAT(chain.ToString(), HasSubstr("prefetch u1@1024"));
  int demand = 0;
  for (int v = 0; v < chain.num_visits(); ++v) {
    for (const PlanAction& action : chain.actions(v)) demand += action.kind == PlanAction::Kind::kGather ? 1 : 0;
  }
  EXPECT_EQ(demand, 2);  // the first of all, and the last leaf again for its backward; the rest is early
}

TEST(FetchPlanTest, NearReuseKeepsALeaf) {
  const std::vector<int64_t> bytes = {128, 128, 128};
  PlanOptions options;
  options.reuse_distance_bytes = 0;
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(Units(bytes), OneUnitLeaves(3), Chain(3), options));
  CheckPlan(plan, bytes, 0);
  int gathers = 0;
  for (int v = 0; v < plan.num_visits(); ++v) {
    for (const PlanAction& action : plan.actions(v)) gathers += action.kind == PlanAction::Kind::kFree ? 0 : 1;
  }
  EXPECT_EQ(gathers, 5);  // the last leaf is not gathered again for its backward
  options.reuse_distance_bytes = 256;
  ASSERT_OK_AND_ASSIGN(const FetchPlan all, FetchPlan::Build(Units(bytes), OneUnitLeaves(3), Chain(3), options));
  CheckPlan(all, bytes, 0);
  EXPECT_EQ(all.peak_bytes(), 384);
}

TEST(FetchPlanTest, LimitEvictsEarlyAndKeptUnitsBeforeItFails) {
  const std::vector<int64_t> bytes = {128, 512, 128};
  PlanOptions options;
  options.reuse_distance_bytes = 1 << 20;
  options.prefetch_bytes = 1 << 20;
  options.max_live_bytes = 600;
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(Units(bytes), OneUnitLeaves(3), Chain(3), options));
  CheckPlan(plan, bytes, 0);
  EXPECT_LE(plan.peak_bytes(), 600);
  options.max_live_bytes = 511;
  EXPECT_THAT(FetchPlan::Build(Units(bytes), OneUnitLeaves(3), Chain(3), options),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("leaf1: needs 512 bytes")));
}

TEST(FetchPlanTest, DeferredFreesAndStagingAreCounted) {
  std::vector<PlanUnit> units = Units({100, 200});
  units[0].transient_bytes = 110;
  units[1].transient_bytes = 220;
  PlanOptions options;
  options.deferred_free = true;
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(units, OneUnitLeaves(2), Chain(2), options));
  // Everything of the previous leaf goes back before the next gather: 200 + 220 at most.
  EXPECT_EQ(plan.peak_bytes(), 420);
}

TEST(FetchPlanTest, RandomNestedOrdersNeverOverlap) {
  uint64_t state = 12345;
  const auto below = [&state](uint64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (state >> 33) % n;
  };
  for (int round = 0; round < 300; ++round) {
    const size_t count = 2 + below(6);
    std::vector<int64_t> bytes;
    for (size_t i = 0; i < count; ++i) bytes.push_back(static_cast<int64_t>(64 * below(9)));
    std::vector<PlanLeaf> leaves = OneUnitLeaves(count);
    leaves.push_back({"both", {0, 1}});
    std::vector<int> users(leaves.size(), 0);
    std::vector<Visit> visits;
    for (int step = 0; step < 24; ++step) {
      const int leaf = static_cast<int>(below(leaves.size()));
      if (users[static_cast<size_t>(leaf)] > 0 && below(2) == 0) {
        --users[static_cast<size_t>(leaf)];
        visits.push_back({kRelease, leaf});
      } else {
        ++users[static_cast<size_t>(leaf)];
        visits.push_back({kFetch, leaf});
      }
    }
    for (size_t l = 0; l < leaves.size(); ++l) {
      for (; users[l] > 0; --users[l]) visits.push_back({kRelease, static_cast<int>(l)});
    }
    PlanOptions options;
    options.prefetch_bytes = static_cast<int64_t>(below(1500));
    options.reuse_distance_bytes = static_cast<int64_t>(below(600)) - 1;
    ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build(Units(bytes), leaves, visits, options));
    CheckPlan(plan, bytes, 0);
  }
}

TEST(FetchPlanTest, RefusesBadOrders) {
  EXPECT_THAT(FetchPlan::Build(Units({1}), OneUnitLeaves(1), {{kRelease, 0}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("releases a leaf that is not fetched")));
  EXPECT_THAT(FetchPlan::Build(Units({1}), OneUnitLeaves(1), {{kFetch, 1}}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no leaf 1")));
  EXPECT_THAT(FetchPlan::Build(Units({1}), {{"x", {3}}}, {}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has no unit 3")));
}

}  // namespace
}  // namespace evenkeel::zero3
