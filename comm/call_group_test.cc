#include "evenkeel/comm/call_group.h"

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// How many messages rank `from` sends to `to`, and element i of the n-th.
int Messages(int from, int to) {
  return from == to ? 0 : static_cast<int>(PhiloxStream(PhiloxKey(9)).Below(from * 64 + to, 4));
}
int64_t Elements(int from, int to, int n) { return (from * 7 + to * 3 + n) % 5 * 300; }
int32_t Value(int from, int to, int n, int64_t i) {
  return ((from * 8 + to) * 4 + n) * 10000 + static_cast<int32_t>(i);
}

// Every rank with every other, many messages each way, sends and receives added in an order of its own.
absl::Status Exchange(Backend& backend, HostDevice::StreamMode mode) {
  const int rank = backend.rank(), size = backend.size();
  const auto device = HostDevice::Create({.stream_mode = mode});
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("main"));
  EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(WorldGroup(size)));
  CallGroup group;
  std::vector<std::vector<int32_t>> memory;
  memory.reserve(size * 16);
  std::vector<std::pair<int, int>> received;  // (peer, n) of memory[i], or (-1, 0) for what is sent
  for (int step = 0; step < size; ++step) {
    const int peer = (rank + (rank % 2 == 0 ? step : size - step)) % size;
    for (int n = 0; n < Messages(rank, peer); ++n) {
      std::vector<int32_t> values(Elements(rank, peer, n));
      for (size_t i = 0; i < values.size(); ++i) values[i] = Value(rank, peer, n, static_cast<int64_t>(i));
      memory.push_back(std::move(values));
      received.push_back({-1, 0});
      const int64_t count = static_cast<int64_t>(memory.back().size());
      group.Send(ConstTensorView(memory.back().data(), DType::kI32, Shape({count})), peer);
    }
    for (int n = 0; n < Messages(peer, rank); ++n) {
      memory.emplace_back(Elements(peer, rank, n), -1);
      received.push_back({peer, n});
      const int64_t count = static_cast<int64_t>(memory.back().size());
      group.Recv(TensorView(memory.back().data(), DType::kI32, Shape({count})), peer);
    }
  }
  for (int round = 0; round < 3; ++round) EK_RETURN_IF_ERROR(group.Run(*communicator, *stream));
  EK_RETURN_IF_ERROR(stream->Synchronize());
  for (size_t m = 0; m < memory.size(); ++m) {
    const auto [peer, n] = received[m];
    for (size_t i = 0; peer >= 0 && i < memory[m].size(); ++i) {
      if (memory[m][i] != Value(peer, rank, n, static_cast<int64_t>(i))) return absl::DataLossError("wrong element");
    }
  }
  return absl::OkStatus();
}

TEST(CallGroupTest, AnyPatternCompletesWithTheRightElements) {
  for (int size : {1, 2, 3, 4, 5, 8}) {
    for (HostDevice::StreamMode mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
      ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = size}));
      EXPECT_OK(FirstFailure(RunRanks(*world, [mode](Backend& backend) { return Exchange(backend, mode); })))
          << size << " ranks";
    }
  }
}

TEST(CallGroupTest, OneCallTooManyIsNamedOnBothRanks) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 2, .deadline = absl::Seconds(2)}));
  const std::vector<absl::Status> statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("main"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(WorldGroup(2)));
    float out = 1, in = 0;
    CallGroup group;
    for (int i = 0; i <= 1 - backend.rank(); ++i)
      group.Send(ConstTensorView(&out, DType::kF32, {1}), 1 - backend.rank());
    group.Recv(TensorView(&in, DType::kF32, {1}), 1 - backend.rank());
    return group.Run(*communicator, *stream);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("send")));
  }
}

TEST(CallGroupTest, RefusesPeersThatAreNoOtherRank) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 1}));
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("main"));
  ASSERT_OK_AND_ASSIGN(const auto communicator, world->backend(0).CreateGroup(WorldGroup(1)));
  for (int peer : {-1, 0, 1}) {
    CallGroup group;
    group.Send(ConstTensorView(nullptr, DType::kF32, {0}), peer);
    EXPECT_THAT(group.Run(*communicator, *stream), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("peer")));
  }
}

// What a group saves: messages, and the price of agreeing.
TEST(CallGroupTest, ManySmallCallsAreOneMessageToEachPeer) {
  constexpr int kRanks = 4, kCalls = 16;
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = kRanks}));
  LedgerCounts grouped[kRanks];
  EXPECT_OK(FirstFailure(RunRanks(*world, [&grouped](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("main"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(WorldGroup(kRanks)));
    std::vector<float> mine(kCalls, static_cast<float>(backend.rank())), all(kCalls * kRanks);
    CallGroup group;
    for (int i = 0; i < kCalls; ++i) {
      group.AllGather(ConstTensorView(&mine[i], DType::kF32, {1}), TensorView(&all[i * kRanks], DType::kF32, {kRanks}));
    }
    const LedgerCounts before = backend.ledger().Snapshot();
    EK_RETURN_IF_ERROR(group.Run(*communicator, *stream));
    grouped[backend.rank()] = backend.ledger().Snapshot() - before;
    for (int i = 0; i < kCalls * kRanks; ++i) {
      if (all[i] != static_cast<float>(i % kRanks)) return absl::DataLossError("wrong element");
    }
    return absl::OkStatus();
  })));
  for (const LedgerCounts& counts : grouped) {
    const LedgerEntry& sent = counts.sent[static_cast<int>(Axis::kWorld)][static_cast<int>(LinkClass::kIntraNode)];
    EXPECT_EQ(sent.bytes_sent, (kRanks - 1) * kCalls * 4);
    EXPECT_EQ(sent.messages_sent, kRanks - 1);
    EXPECT_EQ(counts.total_collectives(), kCalls);
    EXPECT_EQ(counts.control_bytes, (kRanks - 1) * 64);
  }
}

// Only the digest of the counts tells.
TEST(CallGroupTest, CountsOfEqualSumsDiffer) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 2}));
  const std::vector<absl::Status> statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("main"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(WorldGroup(2)));
    const std::vector<int64_t> counts = backend.rank() == 0 ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{2, 1};
    float mine = 1, all[3] = {};
    CallGroup group;
    group.AllGatherV(ConstTensorView(&mine, DType::kF32, {1}), TensorView(all, DType::kF32, {3}), counts);
    return group.Run(*communicator, *stream);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("call 0 of the group (all_gather_v): counts vectors differ at index 0")));
  }
}

TEST(CallGroupTest, CollectivesAndPairsInOneGroup) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 3}));
  EXPECT_OK(FirstFailure(RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("main"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(WorldGroup(3)));
    const int rank = backend.rank();
    int32_t mine = rank, theirs = -1, sum = -1;
    CallGroup group;
    group.Recv(TensorView(&theirs, DType::kI32, {1}), (rank + 2) % 3);
    group.AllReduce(ConstTensorView(&mine, DType::kI32, {1}), TensorView(&sum, DType::kI32, {1}), ReduceOp::kSum);
    group.Send(ConstTensorView(&mine, DType::kI32, {1}), (rank + 1) % 3);
    EK_RETURN_IF_ERROR(group.Run(*communicator, *stream));
    if (theirs != (rank + 2) % 3 || sum != 3) return absl::DataLossError("wrong element");
    return absl::OkStatus();
  })));
}

}  // namespace
}  // namespace evenkeel::comm
