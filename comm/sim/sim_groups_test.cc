// Groups used in opposite order, groups in the making, and groups of ranks with different pasts: who is named, and the
// cycle of waits, on a virtual clock.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

const absl::Duration kDeadline = absl::Seconds(1);

std::vector<int> NamedRanks(const absl::Status& status) {
  std::vector<int> ranks;
  if (const auto context = GetErrorContext(status); context.has_value()) {
    for (const RankFinding& finding : context->findings) ranks.push_back(finding.rank);
  }
  return ranks;
}

std::unique_ptr<Stream> NewStream(HostDevice& device) { return *device.CreateStream("comm"); }

// Two groups of the same ranks, used in opposite order by one of them: nobody can go on, the limit says so.
TEST(SimGroupsTest, C06_OppositeOrderIsNamedAtTheDeadline) {
  for (int odd = 0; odd < 3; ++odd) {
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 3, .deadline = kDeadline}));
    const auto statuses = world->Run([odd](Backend& rank) -> absl::Status {
      const auto device = HostDevice::Create();
      const auto stream = NewStream(*device);
      EK_ASSIGN_OR_RETURN(const auto tp, rank.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {0, 1, 2}}));
      EK_ASSIGN_OR_RETURN(const auto ep, rank.CreateGroup({.axis = Axis::kEp, .name = "ep", .ranks = {0, 1, 2}}));
      EK_RETURN_IF_ERROR((rank.rank() == odd ? ep : tp)->Barrier(*stream));
      return (rank.rank() == odd ? tp : ep)->Barrier(*stream);
    });
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_THAT(statuses[rank],
                  StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("has not entered this call")));
      const std::vector<int> others = odd == 0 ? std::vector<int>{1, 2} : std::vector<int>{0, 3 - odd};
      EXPECT_EQ(NamedRanks(statuses[rank]), rank == odd ? others : std::vector<int>{odd});
      // The absent, in what they wait themselves, and the cycle.
      EXPECT_THAT(std::string(statuses[rank].message()),
                  HasSubstr(rank == odd ? "; it waits in barrier of group tp" : "; it waits in barrier of group ep"));
      EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr("they wait for each other: world rank"));
      EXPECT_LE(world->end_times()[rank], kDeadline + absl::Milliseconds(500));
    }
  }
}

// Three groups of two, each rank first in its own: a cycle of which no rank sees more than its neighbours.
TEST(SimGroupsTest, C06_CycleOverThreeGroupsIsNamedWhole) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 3, .deadline = kDeadline}));
  const auto statuses = world->Run([](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    const auto stream = NewStream(*device);
    std::vector<std::unique_ptr<Communicator>> groups(3);  // [i]: ranks i and i + 1
    for (const int i : {0, 1, 2}) {
      const int other = (i + 1) % 3;
      if (rank.rank() != i && rank.rank() != other) continue;
      EK_ASSIGN_OR_RETURN(groups[i], rank.CreateGroup({.axis = Axis::kOther,
                                                       .name = absl::StrCat("from_", i),
                                                       .ranks = {std::min(i, other), std::max(i, other)}}));
    }
    EK_RETURN_IF_ERROR(groups[rank.rank()]->Barrier(*stream));
    return groups[(rank.rank() + 2) % 3]->Barrier(*stream);
  });
  for (int rank = 0; rank < 3; ++rank) {
    // Who gives up second may see the first one leave.
    EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[rank]) || absl::IsUnavailable(statuses[rank])) << statuses[rank];
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(std::string(statuses[rank].message()),
                  ContainsRegex(absl::StrCat("other: .*world rank ", i, " waits in barrier of group from_", i,
                                             " epoch=[0-9]+ seq=0 for world rank ", (i + 1) % 3)));
    }
  }
}

// A rank waits in a call for one that waits for it to make a group.
TEST(SimGroupsTest, C06_CycleThroughTheMakingOfAGroupIsNamed) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 2, .deadline = kDeadline}));
  const auto statuses = world->Run([](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    const auto stream = NewStream(*device);
    EK_ASSIGN_OR_RETURN(const auto tp, rank.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {0, 1}}));
    if (rank.rank() == 0) return tp->Barrier(*stream);
    return rank.CreateGroup({.axis = Axis::kEp, .name = "ep", .ranks = {0, 1}}).status();
  });
  EXPECT_THAT(statuses[0], StatusIs(absl::StatusCode::kDeadlineExceeded,
                                    HasSubstr("world rank 1 waits in create_group for world rank 0")));
  EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDeadlineExceeded,
                                    HasSubstr("world rank 1 waits in create_group of ep for world rank 0, world rank 0 "
                                              "waits in barrier of group tp epoch=0 seq=0 for world rank 1")));
}

// A rank that has ended is named at once by those that make a group with it.
TEST(SimGroupsTest, C08_RankThatLeftIsNamedInTheMakingOfAGroup) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 3, .deadline = kDeadline}));
  const auto statuses = world->Run([](Backend& rank) -> absl::Status {
    return rank.rank() == 1 ? absl::OkStatus() : rank.CreateGroup(WorldGroup(3)).status();
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kUnavailable, HasSubstr("has left the world")));
    EXPECT_EQ(NamedRanks(statuses[rank]), std::vector<int>{1});
    EXPECT_LT(world->end_times()[rank], absl::Milliseconds(100));
  }
}

// Ranks that have made many groups make one with a rank that has made none: they agree on its epoch.
TEST(SimGroupsTest, C20_GroupsOfRanksWithDifferentPasts) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 3, .deadline = kDeadline}));
  std::vector<int64_t> epochs(3);
  const auto statuses = world->Run([&epochs](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    const auto stream = NewStream(*device);
    for (int i = 0; i < 5 && rank.rank() < 2; ++i) {
      EK_RETURN_IF_ERROR(rank.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {0, 1}}).status());
    }
    EK_ASSIGN_OR_RETURN(const auto all, rank.CreateGroup(WorldGroup(3)));
    epochs[rank.rank()] = all->epoch();
    return all->Barrier(*stream);
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
  EXPECT_EQ(epochs, std::vector<int64_t>(3, epochs[0]));
}

}  // namespace
}  // namespace evenkeel::comm
