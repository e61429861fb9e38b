#include "evenkeel/moe/routing_replay.h"

#include <string>

#include "evenkeel/moe/random_routing.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

RoutingLog SmallLog() {
  RoutingLog log;
  EXPECT_OK(
      log.Record({.layer = "a", .step = 1}, RandomRouting({.tokens = 5, .experts = 4, .top_k = 2, .capacity = 3})));
  EXPECT_OK(log.Record({.layer = "a", .step = 1, .source = 1},
                       RandomRouting({.tokens = 3, .experts = 4, .masked = 0.5, .seed = 2})));
  EXPECT_OK(log.Record({.layer = "b", .step = 2, .pass = 1},
                       RandomRouting({.tokens = 0, .experts = 4, .top_k = 2, .capacity = 2})));
  return log;
}

TEST(RoutingReplayTest, FindsWhatWasRecordedAndOnlyThat) {
  RoutingLog log = SmallLog();
  ASSERT_OK_AND_ASSIGN(const RoutingDecision* found, log.Find({.layer = "a", .step = 1}));
  EXPECT_EQ(found->Digest(), RandomRouting({.tokens = 5, .experts = 4, .top_k = 2, .capacity = 3}).Digest());
  EXPECT_THAT(log.Find({.layer = "a", .step = 2}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("layer \"a\" step 2 source 0 pass 0 was not recorded")));
  EXPECT_THAT(log.Record({.layer = "a", .step = 1}, *found),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("recorded twice")));
  RoutingDecision broken = *found;
  broken.expert[0] = 9;
  EXPECT_THAT(log.Record({.layer = "c"}, broken), StatusIs(absl::StatusCode::kInternal, HasSubstr("no such expert")));
}

TEST(RoutingReplayTest, SurvivesBytes) {
  const RoutingLog log = SmallLog();
  ASSERT_OK_AND_ASSIGN(const RoutingLog again, RoutingLog::Parse(log.Serialize()));
  EXPECT_EQ(again.size(), 3);
  EXPECT_OK(log.Compare(again));
  EXPECT_EQ(again.Serialize(), log.Serialize());
  EXPECT_EQ(RoutingLog::Parse(RoutingLog().Serialize())->size(), 0);
}

TEST(RoutingReplayTest, EveryFlippedBitAndEveryCutIsFound) {
  const std::string bytes = SmallLog().Serialize();
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    EXPECT_THAT(RoutingLog::Parse(flipped), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("routing log"))) << bit;
  }
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_THAT(RoutingLog::Parse(bytes.substr(0, length)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("routing log")));
  }
}

TEST(RoutingReplayTest, ComparisonNamesTheFirstToken) {
  const RoutingLog log = SmallLog();
  RoutingLog other;
  RoutingDecision d = RandomRouting({.tokens = 5, .experts = 4, .top_k = 2, .capacity = 3});
  for (float& w : d.weight) w *= 0.5f;  // arithmetic may differ
  ASSERT_OK(other.Record({.layer = "a", .step = 1}, d));
  EXPECT_THAT(log.Compare(other), StatusIs(absl::StatusCode::kNotFound, HasSubstr("source 1")));
  EXPECT_THAT(other.Compare(log), StatusIs(absl::StatusCode::kNotFound, HasSubstr("source 1")));
  RoutingLog moved;
  ASSERT_OK(moved.Record({.layer = "a", .step = 1},
                         RandomRouting({.tokens = 5, .experts = 4, .top_k = 2, .capacity = 3, .seed = 5})));
  EXPECT_THAT(moved.Compare(other),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("layer \"a\" step 1 source 0 pass 0: token ")));
  RoutingLog wider;
  ASSERT_OK(
      wider.Record({.layer = "a", .step = 1}, RandomRouting({.tokens = 5, .experts = 4, .top_k = 2, .capacity = 4})));
  EXPECT_THAT(wider.Compare(other), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("capacity 4 against")));
}

}  // namespace
}  // namespace evenkeel::moe
