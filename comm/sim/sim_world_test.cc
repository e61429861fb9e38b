// A simulated world as a whole: its clock follows the links, it has room for many ranks, and every kind of fault at
// every message of a call ends as it must.
#include "evenkeel/comm/sim/sim_world.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

// A sum of n ones.
absl::Status SumOfOnes(Backend& rank, int64_t n, int calls) {
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(rank.size())));
  for (int call = 0; call < calls; ++call) {
    std::vector<float> values(static_cast<size_t>(n), 1.0f);
    const TensorView view(values.data(), DType::kF32, Shape({n}));
    EK_RETURN_IF_ERROR(group->AllReduce(view, view, ReduceOp::kSum, *stream));
    if (values != std::vector<float>(static_cast<size_t>(n), static_cast<float>(rank.size()))) {
      return absl::InternalError("wrong sum");
    }
  }
  return absl::OkStatus();
}

// How long rank 0 of two, on nodes of `per_node`, takes to hand `n` bytes to rank 1, beyond the time for none.
absl::Duration TimeToSend(int64_t n, int per_node, const SimLink& within, const SimLink& between) {
  absl::Duration times[2];
  for (const int64_t bytes : {int64_t{0}, n}) {
    SimOptions options{.world_size = 2, .topology = *Topology::Blocks(2, per_node)};
    options.links = {within, between};
    options.jitter = 0;
    options.eager_bytes = 0;
    options.piece_bytes = 1 << 20;
    options.payload_digest = false;
    auto world = SimWorld::Create(options);
    EK_CHECK_OK(world);
    const auto statuses = (*world)->Run([bytes](Backend& rank) -> absl::Status {
      const auto device = HostDevice::Create();
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(2)));
      std::vector<uint8_t> data(static_cast<size_t>(bytes));
      const TensorView view(data.data(), DType::kU8, Shape({bytes}));
      return rank.rank() == 0 ? group->Send(view, 1, *stream) : group->Recv(view, 0, *stream);
    });
    EXPECT_OK(FirstFailure(statuses));
    times[bytes == 0 ? 0 : 1] = (*world)->end_times()[1];
  }
  return times[1] - times[0];
}

// After the agreement, a message of n bytes: latency + n / bandwidth of the link between the two.
TEST(SimWorldTest, PayloadTakesWhatItsLinkSays) {
  const SimLink within{absl::Microseconds(3), 2e9}, between{absl::Microseconds(50), 1e8};
  EXPECT_EQ(TimeToSend(200'000, 2, within, between), absl::Microseconds(3) + absl::Microseconds(100));
  EXPECT_EQ(TimeToSend(200'000, 1, within, between), absl::Microseconds(50) + absl::Microseconds(2000));
  EXPECT_EQ(TimeToSend(400'000, 1, within, between), absl::Microseconds(50) + absl::Microseconds(4000));
}

TEST(SimWorldTest, ManyRanks) {
  for (const int size : {64}) {
    SimOptions options{.world_size = size, .topology = *Topology::Blocks(size, 8)};
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    EXPECT_OK(FirstFailure(world->Run([](Backend& rank) { return SumOfOnes(rank, 300, 2); })));
    EXPECT_GT(world->num_messages(), int64_t{4} * size * (size - 1));
  }
}

TEST(SimWorldTest, GroupsOfOneSendNothing) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 3}));
  EXPECT_OK(FirstFailure(world->Run([](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup({.axis = Axis::kTp, .name = "tp", .ranks = {rank.rank()}}));
    return group->Barrier(*stream);
  })));
  // What is left: each rank says goodbye to the others.
  EXPECT_EQ(world->num_messages(), 3 * 2);
}

// What a fault may come to: codes of the ranks that it does not hit, and whether it may also pass unseen.
struct Outcome {
  SimFault::Kind kind;
  absl::Duration by;
  std::vector<absl::StatusCode> codes;  // empty: never an error
};

using Code = absl::StatusCode;
const Outcome kOutcomes[] = {
    {SimFault::Kind::kDelay, absl::Milliseconds(300), {}},
    {SimFault::Kind::kReorder, absl::Milliseconds(300), {}},
    {SimFault::Kind::kDuplicate, absl::Milliseconds(1), {}},
    {SimFault::Kind::kStop, absl::Milliseconds(300), {}},
    {SimFault::Kind::kDrop, absl::ZeroDuration(), {Code::kDeadlineExceeded}},
    {SimFault::Kind::kStop, absl::ZeroDuration(), {Code::kDeadlineExceeded}},
    {SimFault::Kind::kCorrupt, absl::ZeroDuration(), {Code::kDataLoss, Code::kDeadlineExceeded}},
    {SimFault::Kind::kDie, absl::ZeroDuration(), {Code::kUnavailable}},
};

// Runs two sums on three ranks with `fault`; false when the run ended before it came to pass.
bool RunWith(const SimFault& fault, const Outcome& outcome, int64_t* errors) {
  auto world = SimWorld::Create({.world_size = 3, .deadline = absl::Seconds(1), .faults = {fault}});
  EK_CHECK_OK(world);
  const auto statuses = (*world)->Run([](Backend& rank) { return SumOfOnes(rank, 300, 2); });
  const bool is_out = fault.kind == SimFault::Kind::kDie || outcome.by == absl::ZeroDuration();
  for (int rank = 0; rank < 3; ++rank) {
    const absl::Status& status = statuses[rank];
    if (status.ok() || (rank == fault.rank && is_out)) continue;
    ++*errors;
    // A rank may learn it from another one that gave up.
    const auto context = GetErrorContext(status);
    EXPECT_TRUE(context.has_value()) << status;
    bool known = status.code() == Code::kAborted;
    for (const Code code : outcome.codes) known = known || status.code() == code;
    EXPECT_TRUE(known) << status;
    EXPECT_FALSE(context->findings.empty()) << status;
    EXPECT_LE((*world)->end_times()[rank], absl::Seconds(2)) << status;
  }
  return (*world)->num_faults() > 0;
}

TEST(SimWorldTest, EveryKindOfFaultAtEveryMessageEndsAsItMust) {
  for (const Outcome& outcome : kOutcomes) {
    for (int rank = 0; rank < 3; ++rank) {
      int64_t index = 0, errors = 0;
      for (bool came = true; came && !HasFailure(); ++index) {
        const SimFault fault{.kind = outcome.kind, .rank = rank, .index = index, .by = outcome.by};
        SCOPED_TRACE(DescribeFault(fault));
        came = RunWith(fault, outcome, &errors);
      }
      EXPECT_GT(index, 10) << "the fault never came to pass";
      EXPECT_EQ(errors > 0, !outcome.codes.empty()) << DescribeFault({.kind = outcome.kind, .by = outcome.by});
    }
  }
}

}  // namespace
}  // namespace evenkeel::comm
