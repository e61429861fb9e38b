#include "evenkeel/comm/in_process_gathering.h"

#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::testing::ElementsAre;

Group TpOf(int a, int b) { return {.axis = Axis::kTp, .name = "tp", .ranks = {a, b}}; }

TEST(GatheringsTest, RanksOfOneGroupMeet) {
  Gatherings gatherings;
  const auto first = gatherings.Join(TpOf(0, 1), 0);
  EXPECT_THAT(first->Missing(), ElementsAre(1));
  EXPECT_EQ(gatherings.Join(TpOf(0, 1), 1), first);
  EXPECT_EQ(first->num_joined, 2);
  EXPECT_THAT(first->Missing(), ElementsAre());
}

// The same group once more, by the rank that came first: not the gathering in which it waits already.
TEST(GatheringsTest, ARankJoinsAGatheringOnce) {
  Gatherings gatherings;
  const auto first = gatherings.Join(TpOf(0, 1), 0);
  EXPECT_NE(gatherings.Join(TpOf(0, 1), 0), first);
}

TEST(GatheringsTest, ConflictEndsOnlyThoseWhoWaitForTheRank) {
  Gatherings gatherings;
  const auto waits = gatherings.Join(TpOf(0, 1), 0);
  const auto apart = gatherings.Join(TpOf(1, 2), 2);
  EXPECT_TRUE(gatherings.RefuseConflicts({.axis = Axis::kEp, .name = "ep", .ranks = {0, 1}}, 1));
  EXPECT_TRUE(waits->done);
  EXPECT_EQ(waits->code, absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(apart->done);
  EXPECT_FALSE(gatherings.RefuseConflicts(TpOf(1, 2), 1));
}

TEST(GatheringsTest, EveryGatheringLearnsThatARankHasLeft) {
  Gatherings gatherings;
  const auto left = [](int rank) { return rank == 1; };
  const std::shared_ptr<Gathering> ended[] = {gatherings.Join(TpOf(0, 1), 0), gatherings.Join(TpOf(1, 2), 2),
                                              gatherings.Join(TpOf(1, 3), 3)};
  const auto stays = gatherings.Join(TpOf(2, 3), 3);
  gatherings.CheckAllLeft(left);
  for (const auto& gathering : ended) {
    ASSERT_TRUE(gathering->done);
    EXPECT_EQ(gathering->code, absl::StatusCode::kUnavailable);
    ASSERT_EQ(gathering->findings.size(), 1u);
    EXPECT_EQ(gathering->findings[0].rank, gathering->group.IndexOf(1));
  }
  EXPECT_FALSE(stays->done);
}

}  // namespace
}  // namespace evenkeel::comm
