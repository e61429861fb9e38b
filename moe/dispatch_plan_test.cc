#include "evenkeel/moe/dispatch_plan.h"

#include <set>
#include <vector>

#include "evenkeel/moe/random_routing.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

// Four tokens, two of three experts each, two slots per expert; expert 0 is asked by three of them.
RoutingDecision SmallDecision() {
  RoutingDecision d;
  d.num_tokens = 4;
  d.num_experts = 3;
  d.top_k = 2;
  d.capacity = 2;
  d.expert = {0, 1, 0, 2, 1, 0, 2, 1};
  d.slot = {0, 0, 1, 0, 1, -1, 1, -1};
  d.weight = {.5f, .5f, .6f, .4f, 1, 0, 1, 0};
  d.assigned = {3, 3, 2};
  d.kept = {2, 2, 2};
  return d;
}

TEST(DispatchPlanTest, MapsRoutesToRowsAndBack) {
  const RoutingDecision d = SmallDecision();
  ASSERT_OK(d.Validate());
  ASSERT_OK_AND_ASSIGN(const DispatchPlan plan, BuildDispatchPlan(d));
  EXPECT_THAT(plan.row_of_route, ElementsAre(0, 2, 1, 4, 3, -1, 5, -1));
  EXPECT_THAT(plan.token_of_row, ElementsAre(0, 1, 0, 2, 1, 3));
  EXPECT_THAT(plan.route_of_row, ElementsAre(0, 2, 1, 4, 3, 6));
  EXPECT_OK(CheckConservation(plan, d));
}

// Random decisions: every kept route has exactly one row, empty rows are empty, and the two maps are transposes.
TEST(DispatchPlanTest, C43_LosesAndDoublesNothing) {
  int drops = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const int experts = 1 + static_cast<int>(seed % 7);
    const RandomRoutingOptions options{.tokens = static_cast<int64_t>(seed * 5 % 67),
                                       .experts = experts,
                                       .top_k = 1 + static_cast<int>(seed % experts),
                                       .capacity = 1 + static_cast<int64_t>(seed % 11),
                                       .choice_classes = seed % 2 == 0,
                                       .skew = seed % 3 == 0 ? 1.0 : 0.3,
                                       .masked = seed % 4 == 0 ? 0.5 : 0.0,
                                       .seed = seed};
    const RoutingDecision d = RandomRouting(options);
    ASSERT_OK(d.Validate()) << "seed " << seed;
    ASSERT_OK_AND_ASSIGN(const DispatchPlan plan, BuildDispatchPlan(d));
    ASSERT_OK(CheckConservation(plan, d)) << "seed " << seed;
    std::set<int32_t> rows;
    int64_t kept = 0;
    int64_t assigned = 0;
    for (int32_t e = 0; e < d.num_experts; ++e) assigned += d.assigned[e];
    for (int64_t r = 0; r < d.num_routes(); ++r) {
      if (plan.row_of_route[r] == -1) continue;
      ++kept;
      EXPECT_TRUE(rows.insert(plan.row_of_route[r]).second);
      EXPECT_EQ(plan.row_of_route[r], d.expert[r] * d.capacity + d.slot[r]);
      EXPECT_EQ(plan.token_of_row[plan.row_of_route[r]], r / d.top_k);
    }
    EXPECT_EQ(kept, d.num_kept());
    EXPECT_EQ(assigned, d.active_tokens * d.top_k);
    drops += assigned > kept ? 1 : 0;
  }
  EXPECT_GT(drops, 10);  // the sweep really drops
}

TEST(DispatchPlanTest, Trail22_NoTokensAndNoSlots) {
  ASSERT_OK_AND_ASSIGN(const DispatchPlan empty,
                       BuildDispatchPlan(RandomRouting({.tokens = 0, .experts = 4, .top_k = 2, .capacity = 4})));
  EXPECT_EQ(empty.num_rows(), 16);
  EXPECT_THAT(empty.row_of_route, ElementsAre());
  RoutingDecision no_slots = RandomRouting({.tokens = 0, .experts = 4, .top_k = 2, .capacity = 4});
  no_slots.capacity = 0;
  ASSERT_OK_AND_ASSIGN(const DispatchPlan plan, BuildDispatchPlan(no_slots));
  EXPECT_EQ(plan.num_rows(), 0);
}

TEST(DispatchPlanTest, RefusesWhatHasNoPlan) {
  EXPECT_THAT(BuildDispatchPlan(RandomRouting({.tokens = 3, .experts = 2})), StatusIs(kInvalid, HasSubstr("dropless")));
  RoutingDecision d = SmallDecision();
  d.slot[2] = 0;
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("route 2 (expert 0, slot 0): the slot is taken")));
  d = SmallDecision();
  d.slot[0] = 2;
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("slot 2): outside [3, 2]")));
  d = SmallDecision();
  d.expert[7] = -1;
  d.slot[7] = 0;
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("expert -1")));
  d = SmallDecision();
  d.slot.pop_back();
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("8 routes but holds 8 experts and 7 slots")));
}

// The product of two 31-bit numbers is computed in 64 bits and refused before memory is asked for.
TEST(DispatchPlanTest, Trail29_IndexMathIsWide) {
  RoutingDecision d;
  d.num_experts = 65536;
  d.capacity = 65536;
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("4294967296 rows")));
  d.capacity = int64_t{1} << 60;
  EXPECT_THAT(BuildDispatchPlan(d), StatusIs(kInvalid, HasSubstr("overflow")));
  DispatchPlan plan;
  plan.num_experts = 65536;
  plan.capacity = 65536;
  EXPECT_EQ(plan.num_rows(), int64_t{1} << 32);
}

TEST(DispatchPlanTest, ConservationCheckFindsBreaks) {
  const RoutingDecision d = SmallDecision();
  ASSERT_OK_AND_ASSIGN(const DispatchPlan good, BuildDispatchPlan(d));
  DispatchPlan lost = good;
  lost.row_of_route[0] = -1;
  EXPECT_THAT(CheckConservation(lost, d), StatusIs(absl::StatusCode::kInternal, HasSubstr("lost or doubled")));
  DispatchPlan swapped = good;
  std::swap(swapped.row_of_route[0], swapped.row_of_route[1]);
  EXPECT_THAT(CheckConservation(swapped, d), StatusIs(absl::StatusCode::kInternal, HasSubstr("route 0")));
  RoutingDecision other = d;
  ++other.kept[0];
  EXPECT_THAT(CheckConservation(good, other), StatusIs(absl::StatusCode::kInternal, HasSubstr("7 routes were kept")));
}

TEST(RoutingDecisionTest, ValidateNamesWhatIsBroken) {
  RoutingDecision d = SmallDecision();
  d.expert[3] = 0;
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("token 1 choice 1 (expert 0, slot 0")));
  d = SmallDecision();
  d.expert[6] = 3;
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("no such expert")));
  d = SmallDecision();
  d.weight[5] = 1;
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("bad weight")));
  d = SmallDecision();
  std::swap(d.slot[0], d.slot[2]);
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("not in order")));
  d = SmallDecision();
  d.kept[2] = 1;
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("expert 2: 2 slots taken, 1 counted")));
  d = SmallDecision();
  d.token_mask = {1, 1, 1, 0};
  EXPECT_THAT(d.Validate(), StatusIs(absl::StatusCode::kInternal, HasSubstr("token 3")));
}

TEST(RoutingDecisionTest, DigestSeesEveryField) {
  const RoutingDecision d = SmallDecision();
  std::set<uint64_t> digests = {d.Digest()};
  RoutingDecision other = d;
  other.expert[7] = 0;
  digests.insert(other.Digest());
  other = d;
  other.slot[7] = 1;
  digests.insert(other.Digest());
  other = d;
  other.weight[0] = 0.25f;
  digests.insert(other.Digest());
  other = d;
  other.capacity = 4;
  digests.insert(other.Digest());
  EXPECT_EQ(digests.size(), 5u);
  EXPECT_EQ(d.TokenDigest(1), SmallDecision().TokenDigest(1));
  EXPECT_NE(d.TokenDigest(1), d.TokenDigest(2));
}

}  // namespace
}  // namespace evenkeel::moe
