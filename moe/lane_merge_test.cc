// Which rows lanes bring together: every row once, contiguous by expert, in order of slots.
#include "evenkeel/moe/lane_merge.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::testing::ElementsAre;

// Four tokens, two experts, one route each; two slots per expert are kept, token 3 is dropped.
RoutingDecision Decision() {
  RoutingDecision d;
  d.num_tokens = 4;
  d.num_experts = 2;
  d.capacity = 4;
  d.expert = {0, 1, 0, 0};
  d.slot = {0, 0, 1, -1};
  return d;
}

TEST(LaneMergeTest, RaggedLanesHaveTheRoutesOfTheirOwnTokens) {
  // E = 1: both lanes hold both experts. Lane 0 has tokens 0 and 1, lane 1 token 2.
  const LaneMerge lane0 = MergeLanes(Decision(), {.tp = 2, .ep = 1, .lane = 0, .padded = false});
  EXPECT_THAT(lane0.rows_of_lane, ElementsAre(2, 1));
  EXPECT_THAT(lane0.gathered_of_merged, ElementsAre(0, 2, 1));  // expert 0: tokens 0 and 2; expert 1: token 1
  EXPECT_THAT(lane0.rows_of_expert, ElementsAre(2, 1));
  EXPECT_THAT(lane0.positions, ElementsAre(0, 1, 0));
  EXPECT_THAT(lane0.merged_of_own, ElementsAre(0, 2));
  EXPECT_TRUE(lane0.adds_gradients);
  const LaneMerge lane1 = MergeLanes(Decision(), {.tp = 2, .ep = 1, .lane = 1, .padded = false});
  EXPECT_EQ(lane1.gathered_of_merged, lane0.gathered_of_merged);
  EXPECT_THAT(lane1.merged_of_own, ElementsAre(1));
  EXPECT_FALSE(lane1.adds_gradients);
}

TEST(LaneMergeTest, PaddedLanesHaveTheirShareOfEverySlot) {
  // T = 4, E = 2: lanes 0 and 2 hold expert 0, each with the slots of two lanes.
  const LaneMerge lane2 = MergeLanes(Decision(), {.tp = 4, .ep = 2, .lane = 2, .padded = true});
  EXPECT_THAT(lane2.rows_of_lane, ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(lane2.positions, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(lane2.gathered_of_merged, ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(lane2.merged_of_own, ElementsAre(2, 3));
  EXPECT_FALSE(lane2.adds_gradients);
  EXPECT_TRUE(MergeLanes(Decision(), {.tp = 4, .ep = 2, .lane = 1, .padded = true}).adds_gradients);
}

}  // namespace
}  // namespace evenkeel::moe
