// Two groups used in opposite order: what must deadlock does so at once and with its cycle, what need not completes.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
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

constexpr int kRanks = 3;
// A deadline that no test waits for.
constexpr absl::Duration kFar = absl::Minutes(10);

std::vector<int> Members(int mask) {
  std::vector<int> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    if ((mask >> rank & 1) != 0) ranks.push_back(rank);
  }
  return ranks;
}

// Bit r of `reversed`: rank r uses group b before group a.
std::vector<absl::Status> UseBoth(int a, int b, int reversed) {
  auto world = InProcessWorld::Create({.world_size = kRanks, .deadline = kFar});
  EK_CHECK_OK(world);
  return RunRanks(**world, [&](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    const int bit = 1 << backend.rank();
    std::unique_ptr<Communicator> first, second;
    if ((a & bit) != 0) {
      EK_ASSIGN_OR_RETURN(first, backend.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = Members(a)}));
    }
    if ((b & bit) != 0) {
      EK_ASSIGN_OR_RETURN(second, backend.CreateGroup({.axis = Axis::kEp, .name = "ep", .ranks = Members(b)}));
    }
    if ((reversed & bit) != 0) std::swap(first, second);
    for (Communicator* group : {first.get(), second.get()}) {
      if (group != nullptr) EK_RETURN_IF_ERROR(group->Barrier(*stream));
    }
    return absl::OkStatus();
  });
}

// Every pair of groups of 3 ranks, every choice of orders, against the wait-for graph: a cycle closes exactly when two
// ranks that are in both groups use them in different orders.
TEST(InProcessDeadlockTest, C06_EveryPairOfGroupsAndOrders) {
  const int groups[] = {3, 5, 6, 7};
  int completed = 0, deadlocked = 0;
  for (const int a : groups) {
    for (const int b : groups) {
      for (int reversed = 0; reversed < 8; ++reversed) {
        const int both = a & b;
        if ((reversed & ~both) != 0) continue;  // a rank in one group has no order
        const bool cycle = (both & reversed) != 0 && (both & ~reversed) != 0;
        SCOPED_TRACE(absl::StrCat("groups ", a, " and ", b, ", reversed ", reversed));
        const auto statuses = UseBoth(a, b, reversed);
        (cycle ? deadlocked : completed) += 1;
        for (int rank = 0; rank < kRanks; ++rank) {
          if (!cycle || ((a | b) >> rank & 1) == 0) {
            EXPECT_OK(statuses[rank]);
            continue;
          }
          EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kDeadlineExceeded,
                                               AllOf(HasSubstr("deadlock"), HasSubstr("waits in barrier of group tp"),
                                                     HasSubstr("waits in barrier of group ep"))));
          EXPECT_FALSE(GetErrorContext(statuses[rank])->findings.empty());
        }
      }
    }
  }
  EXPECT_EQ(completed + deadlocked, 56);
  EXPECT_GT(deadlocked, 10);
}

// The order in which groups are used on streams of their own says nothing: they are independent.
TEST(InProcessDeadlockTest, C06_OppositeOrderOnStreamsOfTheirOwnCompletes) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = kRanks, .deadline = kFar}));
  for (int round = 0; round < 20; ++round) {
    const auto statuses = RunRanks(*world, [round](Backend& backend) -> absl::Status {
      const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
      std::unique_ptr<Communicator> groups[2];
      std::unique_ptr<Stream> streams[2];
      for (int i = 0; i < 2; ++i) {
        EK_ASSIGN_OR_RETURN(groups[i], backend.CreateGroup(WorldGroup(kRanks)));
        EK_ASSIGN_OR_RETURN(streams[i], device->CreateStream(absl::StrCat("stream", i)));
      }
      for (int call = 0; call < 10; ++call) {
        const int begin = (backend.rank() + call + round) % 2;
        EK_RETURN_IF_ERROR(groups[begin]->Barrier(*streams[begin]));
        EK_RETURN_IF_ERROR(groups[1 - begin]->Barrier(*streams[1 - begin]));
      }
      EK_RETURN_IF_ERROR(streams[0]->Synchronize());
      return streams[1]->Synchronize();
    });
    EXPECT_OK(FirstFailure(statuses));
  }
}

// Every rank's error has the whole cycle, and the deadline is far away.
void ExpectCycle(const std::vector<absl::Status>& statuses, const std::vector<std::string>& waits) {
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("deadlock")));
    for (const std::string& wait : waits) EXPECT_THAT(status.message(), HasSubstr(wait));
    const auto context = GetErrorContext(status);
    ASSERT_TRUE(context.has_value());
    EXPECT_FALSE(context->findings.empty());
  }
}

// A ring of pairs: each rank begins with the group that it has with the next one.
TEST(InProcessDeadlockTest, C06_RingsOfGroupsAreReportedWithEveryMember) {
  for (const int size : {3, 5, 8}) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = size, .deadline = kFar}));
    const auto statuses = RunRanks(*world, [size](Backend& backend) -> absl::Status {
      const auto device = HostDevice::Create();
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      std::vector<std::unique_ptr<Communicator>> pairs(size);
      for (int first = 0; first < size; ++first) {
        const int second = (first + 1) % size;
        if (backend.rank() != first && backend.rank() != second) continue;
        EK_ASSIGN_OR_RETURN(
            pairs[first],
            backend.CreateGroup({.axis = Axis::kOther, .name = absl::StrCat("pair", first), .ranks = {first, second}}));
      }
      EK_RETURN_IF_ERROR(pairs[backend.rank()]->Barrier(*stream));
      return pairs[(backend.rank() + size - 1) % size]->Barrier(*stream);
    });
    std::vector<std::string> waits;
    for (int rank = 0; rank < size; ++rank) {
      waits.push_back(absl::StrCat("world rank ", rank, " waits in barrier of group pair", rank));
    }
    ExpectCycle(statuses, waits);
  }
}

// Everybody sends to the next rank first: nobody receives.
TEST(InProcessDeadlockTest, C06_RingsOfSendsAreReported) {
  for (const int size : {3, 5}) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = size, .deadline = kFar}));
    const auto statuses = RunRanks(*world, [size](Backend& backend) -> absl::Status {
      const auto device = HostDevice::Create();
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(size)));
      float value = 1;
      const TensorView view(&value, DType::kF32, Shape({1}));
      EK_RETURN_IF_ERROR(group->Send(view, (backend.rank() + 1) % size, *stream));
      return group->Recv(view, (backend.rank() + size - 1) % size, *stream);
    });
    std::vector<std::string> waits;
    for (int rank = 0; rank < size; ++rank) waits.push_back(absl::StrCat("world rank ", rank, " waits in send"));
    ExpectCycle(statuses, waits);
  }
}

TEST(InProcessDeadlockTest, C06_ReceiveAgainstABarrierIsReported) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = kRanks, .deadline = kFar}));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    float value = 1;
    if (backend.rank() != 0) return group->Barrier(*stream);
    return group->Recv(TensorView(&value, DType::kF32, Shape({1})), 1, *stream);
  });
  ExpectCycle(statuses, {"world rank 0 waits in recv", "world rank 1 waits in barrier"});
}

// The same on worker streams, where the rank's own thread waits for its stream and not in a call.
absl::Status RingOfPairsOnWorkers(Backend& backend, int size) {
  const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
  std::vector<std::unique_ptr<Communicator>> pairs(size);
  for (int first = 0; first < size; ++first) {
    const int second = (first + 1) % size;
    if (backend.rank() != first && backend.rank() != second) continue;
    EK_ASSIGN_OR_RETURN(
        pairs[first],
        backend.CreateGroup({.axis = Axis::kOther, .name = absl::StrCat("pair", first), .ranks = {first, second}}));
  }
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  absl::Status issued = pairs[backend.rank()]->Barrier(*stream);
  if (issued.ok()) issued = pairs[(backend.rank() + size - 1) % size]->Barrier(*stream);
  const absl::Status late = stream->Synchronize();
  return issued.ok() ? late : issued;
}

TEST(InProcessDeadlockTest, C06_RingsOfGroupsOnWorkerStreamsAreReported) {
  for (const int size : {3, 5}) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = size, .deadline = kFar}));
    const auto statuses = RunRanks(*world, [size](Backend& backend) { return RingOfPairsOnWorkers(backend, size); });
    // Who wakes up late may find that its peer has given up already, which carries the cause along.
    for (const absl::Status& status : statuses) {
      EXPECT_FALSE(status.ok());
      EXPECT_THAT(FirstFailure(statuses), StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("deadlock")));
    }
    for (int rank = 0; rank < size; ++rank) {
      const std::string wait = absl::StrCat("world rank ", rank, " waits in barrier of group pair", rank, " [", rank,
                                            ",", (rank + 1) % size);
      EXPECT_THAT(FirstFailure(statuses).message(), HasSubstr(wait));
    }
  }
}

// Two groups on one worker stream, in opposite order; the calls come in any order of threads.
TEST(InProcessDeadlockTest, C06_OppositeOrderOnOneWorkerStreamIsReported) {
  for (int odd = 0; odd < kRanks; ++odd) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = kRanks, .deadline = kFar}));
    const auto statuses = RunRanks(*world, [odd](Backend& backend) -> absl::Status {
      const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
      std::unique_ptr<Communicator> groups[2];
      for (auto& group : groups) {
        EK_ASSIGN_OR_RETURN(group, backend.CreateGroup(WorldGroup(kRanks)));
      }
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      for (int call = 0; call < 20; ++call) {  // right ones first
        EK_RETURN_IF_ERROR(groups[call % 2]->Barrier(*stream));
      }
      const int first = backend.rank() == odd ? 1 : 0;
      absl::Status issued = groups[first]->Barrier(*stream);
      if (issued.ok()) issued = groups[1 - first]->Barrier(*stream);
      const absl::Status late = stream->Synchronize();
      return issued.ok() ? late : issued;
    });
    EXPECT_THAT(FirstFailure(statuses), StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("deadlock")));
    for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
  }
}

// A ring of sends on worker streams.
TEST(InProcessDeadlockTest, C06_RingsOfSendsOnWorkerStreamsAreReported) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = kRanks, .deadline = kFar}));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    float sent = 1, received = 0;
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    absl::Status issued =
        group->Send(TensorView(&sent, DType::kF32, Shape({1})), (backend.rank() + 1) % kRanks, *stream);
    if (issued.ok()) {
      issued =
          group->Recv(TensorView(&received, DType::kF32, Shape({1})), (backend.rank() + kRanks - 1) % kRanks, *stream);
    }
    const absl::Status late = stream->Synchronize();
    return issued.ok() ? late : issued;
  });
  EXPECT_THAT(FirstFailure(statuses),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       AllOf(HasSubstr("deadlock"), HasSubstr("waits in send of group world"))));
}

// Many calls on several streams, some ranks late: no cycle is seen where there is none.
TEST(InProcessDeadlockTest, NoFalseDeadlockOnWorkerStreams) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 4, .deadline = kFar}));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
    const int rank = backend.rank();
    std::unique_ptr<Communicator> groups[4];
    EK_ASSIGN_OR_RETURN(groups[0], backend.CreateGroup(WorldGroup(4)));
    EK_ASSIGN_OR_RETURN(
        groups[1], backend.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {rank / 2 * 2, rank / 2 * 2 + 1}}));
    EK_ASSIGN_OR_RETURN(groups[2],
                        backend.CreateGroup({.axis = Axis::kDp, .name = "dp", .ranks = {rank % 2, rank % 2 + 2}}));
    EK_ASSIGN_OR_RETURN(groups[3], backend.CreateGroup(WorldGroup(4)));
    std::unique_ptr<Stream> streams[2];
    for (auto& stream : streams) {
      EK_ASSIGN_OR_RETURN(stream, device->CreateStream("comm"));
    }
    for (int call = 0; call < 500; ++call) {
      // Groups 0 to 2 in one order on one stream, group 3 on the other; ranks issue the two in different order.
      if (rank % 2 == 0) EK_RETURN_IF_ERROR(groups[3]->Barrier(*streams[1]));
      EK_RETURN_IF_ERROR(groups[call % 3]->Barrier(*streams[0]));
      if (rank % 2 == 1) EK_RETURN_IF_ERROR(groups[3]->Barrier(*streams[1]));
      if ((call + rank) % 17 == 0) EK_RETURN_IF_ERROR(streams[call % 2]->Synchronize());
    }
    EK_RETURN_IF_ERROR(streams[0]->Synchronize());
    return streams[1]->Synchronize();
  });
  EXPECT_OK(FirstFailure(statuses));
}

}  // namespace
}  // namespace evenkeel::comm
