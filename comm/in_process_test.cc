#include "evenkeel/comm/in_process.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
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
using ::testing::AllOf;
using ::testing::HasSubstr;

std::unique_ptr<InProcessWorld> MakeWorld(int size, absl::Duration deadline = absl::Seconds(20)) {
  auto world = InProcessWorld::Create({.world_size = size, .deadline = deadline});
  EK_CHECK_OK(world);
  return *std::move(world);
}

// One inline stream on a device of its own.
struct Lane {
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("comm");
};

TensorView View(std::vector<float>& values) {
  return TensorView(values.data(), DType::kF32, Shape({static_cast<int64_t>(values.size())}));
}

double Seconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(InProcessTest, RefusesBadOptions) {
  EXPECT_THAT(InProcessWorld::Create({.world_size = 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world_size 0")));
  EXPECT_THAT(InProcessWorld::Create({.world_size = 2, .topology = Topology::SingleNode(3)}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("the topology has 3 ranks, the world 2")));
  EXPECT_THAT(InProcessWorld::Create({.world_size = 2, .deadline = absl::InfiniteDuration()}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("deadline inf")));
}

TEST(InProcessTest, SixtyFourRanksOnFewProcessors) {
  constexpr int kRanks = 64;
  auto world = MakeWorld(kRanks);
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane;
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    for (int round = 0; round < 20; ++round) {
      std::vector<float> value(3, static_cast<float>(backend.rank() + round));
      EK_RETURN_IF_ERROR(group->AllReduce(View(value), View(value), ReduceOp::kSum, *lane.stream));
      const float expected = kRanks * (kRanks - 1) / 2 + static_cast<float>(kRanks * round);
      if (value != std::vector<float>(3, expected)) return absl::InternalError("wrong sum");
    }
    return absl::OkStatus();
  });
  EXPECT_OK(FirstFailure(statuses));
}

// C08: a rank that returns early is named at once, not after the deadline.
TEST(InProcessTest, C08_RankThatLeavesIsNamedAtOnce) {
  for (int steps = 0; steps < 3; ++steps) {
    auto world = MakeWorld(3);
    const auto start = std::chrono::steady_clock::now();
    const auto statuses = RunRanks(*world, [steps](Backend& backend) -> absl::Status {
      Lane lane;
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(3)));
      for (int i = 0; i < (backend.rank() == 1 ? steps : 3); ++i) EK_RETURN_IF_ERROR(group->Barrier(*lane.stream));
      return absl::OkStatus();
    });
    EXPECT_LT(Seconds(start), 5.0);
    EXPECT_OK(statuses[1]);
    for (const int rank : {0, 2}) {
      EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 has left")));
      const auto context = GetErrorContext(statuses[rank]);
      ASSERT_TRUE(context.has_value());
      EXPECT_EQ(context->sequence, steps);
      EXPECT_EQ(context->rank, rank);
      ASSERT_EQ(context->findings.size(), 1u);
      EXPECT_EQ(context->findings[0].rank, 1);
    }
  }
}

// A rank that gives its handle up goes on living, but not in this group.
TEST(InProcessTest, C08_DestroyedHandleIsNamedAtOnce) {
  auto world = MakeWorld(3);
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> told{0};
  const auto statuses = RunRanks(*world, [&told](Backend& backend) -> absl::Status {
    Lane lane;
    EK_ASSIGN_OR_RETURN(auto group, backend.CreateGroup(WorldGroup(3)));
    EK_RETURN_IF_ERROR(group->Barrier(*lane.stream));
    if (backend.rank() == 1) {
      group.reset();
      while (told.load() < 2) std::this_thread::yield();
      return absl::OkStatus();
    }
    const absl::Status status = group->Barrier(*lane.stream);
    told.fetch_add(1);
    return status;
  });
  EXPECT_LT(Seconds(start), 5.0);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 has left")));
  }
}

// C08: a rank that is alive but does not come.
TEST(InProcessTest, C08_AbsentRankIsNamedAtTheDeadline) {
  auto world = MakeWorld(3, absl::Milliseconds(300));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane, later;
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(3)));
    EK_RETURN_IF_ERROR(group->Barrier(*lane.stream));
    if (backend.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(900));
    const absl::Status status = group->Barrier(*lane.stream);
    // Sticky: later calls say that the group is broken, and why.
    EXPECT_THAT(group->Barrier(*later.stream),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("the group was broken before by")));
    EXPECT_FALSE(group->status().ok());
    return status;
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(statuses[rank],
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         AllOf(HasSubstr("rank 2 has not come"), HasSubstr("barrier seq=0"), HasSubstr("of 300ms"))));
  }
  EXPECT_THAT(statuses[2], StatusIs(absl::StatusCode::kAborted, HasSubstr("rank 2 has not come")));
}

// C06: two groups used in opposite order.
TEST(InProcessTest, C06_DeadlockIsReportedAtOnceWithTheCycle) {
  auto world = MakeWorld(3);
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane;
    EK_ASSIGN_OR_RETURN(const auto first, backend.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {0, 1, 2}}));
    EK_ASSIGN_OR_RETURN(const auto second, backend.CreateGroup({.axis = Axis::kEp, .name = "ep", .ranks = {0, 1, 2}}));
    if (backend.rank() == 1) {
      EK_RETURN_IF_ERROR(second->Barrier(*lane.stream));
      return first->Barrier(*lane.stream);
    }
    EK_RETURN_IF_ERROR(first->Barrier(*lane.stream));
    return second->Barrier(*lane.stream);
  });
  EXPECT_LT(Seconds(start), 5.0);
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                 AllOf(HasSubstr("deadlock"), HasSubstr("world rank 1 waits in barrier of group ep"),
                                       HasSubstr("world rank 0 waits in barrier of group tp"))));
  }
}

// C06: three ranks make three groups of two, each in another order.
TEST(InProcessTest, C06_DeadlockInTheMakingOfGroupsIsReportedAtOnce) {
  auto world = MakeWorld(3);
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const int rank = backend.rank();
    const std::vector<std::vector<int>> pairs = {{0, 1}, {1, 2}, {2, 0}};
    return backend.CreateGroup({.axis = Axis::kOther, .name = "pair", .ranks = pairs[rank]}).status();
  });
  EXPECT_LT(Seconds(start), 5.0);
  for (const absl::Status& status : statuses) {
    // Who is woken last may find that the others have left already.
    EXPECT_TRUE(status.code() == absl::StatusCode::kDeadlineExceeded || status.code() == absl::StatusCode::kUnavailable)
        << status;
  }
  EXPECT_THAT(FirstFailure(statuses),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("deadlock"), HasSubstr("world rank 1 waits in create_group of pair [1,2]"))));
}

TEST(InProcessTest, NoFalseDeadlockUnderLoad) {
  constexpr int kRanks = 6;
  auto world = MakeWorld(kRanks);
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane;
    const int rank = backend.rank();
    const Group rows{.axis = Axis::kTp, .name = "tp", .ranks = {rank / 2 * 2, rank / 2 * 2 + 1}};
    const Group columns{.axis = Axis::kDp, .name = "dp", .ranks = {rank % 2, rank % 2 + 2, rank % 2 + 4}};
    EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(rows));
    EK_ASSIGN_OR_RETURN(const auto dp, backend.CreateGroup(columns));
    for (int i = 0; i < 300; ++i) {
      EK_RETURN_IF_ERROR(tp->Barrier(*lane.stream));
      if ((i + rank) % 37 == 0) std::this_thread::yield();
      EK_RETURN_IF_ERROR(dp->Barrier(*lane.stream));
    }
    return absl::OkStatus();
  });
  EXPECT_OK(FirstFailure(statuses));
}

// While one rank looks for a deadlock, others wake up, complete what the first is seen in, and sleep in the next call.
TEST(InProcessTest, NoFalseDeadlockBetweenTwoCallsOfOneGroup) {
  constexpr int kRanks = 5;
  auto world = MakeWorld(kRanks);
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane;
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    std::vector<float> one(3, static_cast<float>(backend.rank()));
    std::vector<float> all(3 * kRanks);
    for (int i = 0; i < 3000; ++i) EK_RETURN_IF_ERROR(group->AllGather(View(one), View(all), *lane.stream));
    return absl::OkStatus();
  });
  EXPECT_OK(FirstFailure(statuses));
}

TEST(InProcessTest, CreateGroupNamesTheMissing) {
  auto world = MakeWorld(3, absl::Milliseconds(200));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    if (backend.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(400));
    if (backend.rank() == 2) return absl::OkStatus();
    return backend.CreateGroup(WorldGroup(3)).status();
  });
  EXPECT_THAT(statuses[0],
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 2 (world rank 2) has not come")));
  EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 2")));
}

TEST(InProcessTest, CreateGroupRefusesDisagreementAtOnce) {
  auto world = MakeWorld(3);
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    if (backend.rank() == 2) return absl::OkStatus();
    const std::vector<int> ranks = backend.rank() == 0 ? std::vector<int>{0, 1} : std::vector<int>{1, 0};
    return backend.CreateGroup({.axis = Axis::kDp, .name = "dp", .ranks = ranks}).status();
  });
  EXPECT_LT(Seconds(start), 5.0);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("disagree about the group")));
  }
}

TEST(InProcessTest, CreateGroupRefusesBadGroups) {
  auto world = MakeWorld(2);
  Backend& backend = world->backend(0);
  const auto make = [&backend](std::vector<int> ranks) {
    return backend.CreateGroup({.axis = Axis::kDp, .name = "dp", .ranks = std::move(ranks)}).status();
  };
  EXPECT_THAT(make({}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has no ranks")));
  EXPECT_THAT(make({0, 2}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("outside [0, 2)")));
  EXPECT_THAT(make({0, 0}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("lists rank 0 twice")));
  EXPECT_THAT(make({1}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("does not hold rank 0")));
}

TEST(InProcessTest, GroupOfOneNeedsNoPeerAndBooksNothing) {
  auto world = MakeWorld(2);
  Lane lane;
  ASSERT_OK_AND_ASSIGN(const auto group,
                       world->backend(1).CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {1}}));
  std::vector<float> in = {1, 2, 3}, out(3);
  EXPECT_OK(group->AllReduce(View(in), View(out), ReduceOp::kAvg, *lane.stream));
  EXPECT_EQ(out, in);
  EXPECT_OK(group->Barrier(*lane.stream));
  EXPECT_EQ(world->backend(1).ledger().Snapshot().total_collectives(), 0);
  EXPECT_EQ(world->backend(1).ledger().Snapshot().bytes(Axis::kTp), 0);
}

// A rank whose stream has failed does not leave its peers waiting.
TEST(InProcessTest, SkippedCallOnAFailedStreamWakesThePeers) {
  for (const auto mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
    auto world = MakeWorld(2);
    const auto start = std::chrono::steady_clock::now();
    const auto statuses = RunRanks(*world, [mode](Backend& backend) -> absl::Status {
      HostDevice::Options options;
      options.stream_mode = mode;
      auto device = HostDevice::Create(options);
      auto stream = *device->CreateStream("comm");
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(2)));
      if (backend.rank() == 1) (void)stream->Launch([] { return absl::InternalError("broken work"); });
      (void)group->Barrier(*stream);
      return stream->Synchronize();
    });
    EXPECT_LT(Seconds(start), 5.0);
    EXPECT_THAT(statuses[0], StatusIs(absl::StatusCode::kAborted, HasSubstr("the stream of this rank had failed")));
    EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kInternal, HasSubstr("broken work")));
  }
}

// Open MPI gives wrong sums without an error when two threads share a communicator; here the second is refused.
TEST(InProcessTest, TwoThreadsOnOneCommunicatorAreRefused) {
  auto world = MakeWorld(2);
  const auto start = std::chrono::steady_clock::now();
  std::atomic<bool> met{false};
  const auto statuses = RunRanks(*world, [&met](Backend& backend) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(2)));
    Lane lane, second_lane;
    if (backend.rank() == 1) {
      while (!met.load()) std::this_thread::yield();
      return group->Barrier(*lane.stream);
    }
    absl::Status first;
    std::thread other([&group, &lane, &first] { first = group->Barrier(*lane.stream); });
    const absl::Status second = group->Barrier(*second_lane.stream);
    other.join();
    met.store(true);
    EXPECT_FALSE(first.ok());
    EXPECT_FALSE(second.ok());
    return first.code() == absl::StatusCode::kFailedPrecondition ? first : second;
  });
  EXPECT_LT(Seconds(start), 5.0);
  EXPECT_THAT(statuses[0], StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("two threads")));
  EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kAborted, HasSubstr("two threads")));
}

TEST(InProcessTest, SendAndRecvMatchInOrderPerPair) {
  auto world = MakeWorld(3);
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    Lane lane;
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(3)));
    const int rank = backend.rank();
    for (const int64_t n : {0, 1, 5000}) {
      std::vector<float> value(n, static_cast<float>(rank * 10));
      if (rank == 0) {
        EK_RETURN_IF_ERROR(group->Send(View(value), 2, *lane.stream));
        EK_RETURN_IF_ERROR(group->Send(View(value), 1, *lane.stream));
      } else {
        EK_RETURN_IF_ERROR(group->Recv(View(value), 0, *lane.stream));
        if (value != std::vector<float>(n, 0.0f)) return absl::InternalError("wrong data");
      }
    }
    // The collective order is apart from the pairs' orders.
    return group->Barrier(*lane.stream);
  });
  EXPECT_OK(FirstFailure(statuses));
  EXPECT_EQ(world->backend(0).ledger().Snapshot().bytes(Axis::kWorld), 2 * 5001 * 4);
  EXPECT_EQ(world->backend(1).ledger().Snapshot().bytes(Axis::kWorld), 0);
}

TEST(InProcessTest, SendMismatchFailsOnBothAndWakesTheThird) {
  for (const bool both_send : {false, true}) {
    auto world = MakeWorld(3);
    const auto start = std::chrono::steady_clock::now();
    const auto statuses = RunRanks(*world, [both_send](Backend& backend) -> absl::Status {
      Lane lane;
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(3)));
      std::vector<float> value(backend.rank() == 0 ? 4 : 5, 7.0f);
      if (backend.rank() == 1) return group->Barrier(*lane.stream);
      if (backend.rank() == 0) return group->Send(View(value), 2, *lane.stream);
      return both_send ? group->Send(View(value), 0, *lane.stream) : group->Recv(View(value), 0, *lane.stream);
    });
    EXPECT_LT(Seconds(start), 5.0);
    for (const int rank : {0, 2}) {
      EXPECT_THAT(statuses[rank],
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           both_send ? HasSubstr("rank 2 calls send") : HasSubstr("rank 2 has count 5")));
    }
    EXPECT_FALSE(statuses[1].ok());
  }
}

// Whatever goes wrong later, also without a call that the group would refuse.
TEST(InProcessTest, FirstCauseStays) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 1}));
  ASSERT_OK_AND_ASSIGN(const auto group, world->backend(0).CreateGroup(WorldGroup(1)));
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("comm"));
  float value = 0;
  const TensorView one(&value, DType::kF32, Shape({1}));
  EXPECT_FALSE(group->Broadcast(one, /*root=*/7, *stream).ok());
  ASSERT_OK_AND_ASSIGN(const auto fresh, device->CreateStream("fresh"));
  EXPECT_FALSE(group->Send(one, /*peer=*/5, *fresh).ok());
  EXPECT_THAT(group->status(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("root 7")));
}

}  // namespace
}  // namespace evenkeel::comm
