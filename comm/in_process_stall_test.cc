// A rank that stalls in the middle of copying, after all have agreed: the others leave at their limit, their memory
// free to be given back, and the rank that stalled reads nothing more.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
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
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kOdd = 1;
constexpr int64_t kBlock = 200'000;  // floats: four pieces
const absl::Duration kDeadline = absl::Milliseconds(300);

enum class Op { kAllGather, kReduceScatter, kAllReduce, kAllToAll, kSendRecv };

// One call of `op`, with memory that is gone when this returns.
absl::Status CallOnce(Op op, Communicator& group, Stream& stream) {
  std::vector<float> from(kBlock * kRanks, static_cast<float>(group.rank() + 1)), to(kBlock * kRanks);
  const auto in = [&from](int64_t n) { return ConstTensorView(from.data(), DType::kF32, Shape({n})); };
  const auto out = [&to](int64_t n) { return TensorView(to.data(), DType::kF32, Shape({n})); };
  switch (op) {
    case Op::kAllGather:
      return group.AllGather(in(kBlock), out(kBlock * kRanks), stream);
    case Op::kReduceScatter:
      return group.ReduceScatter(in(kBlock * kRanks), out(kBlock), ReduceOp::kSum, stream);
    case Op::kAllReduce:
      return group.AllReduce(in(kBlock), out(kBlock), ReduceOp::kSum, stream);
    case Op::kAllToAll:
      return group.AllToAll(in(kBlock * kRanks), out(kBlock * kRanks), stream);
    case Op::kSendRecv:
      if (group.rank() == 2) return absl::OkStatus();
      return group.rank() == kOdd ? group.Recv(out(kBlock), 0, stream) : group.Send(in(kBlock), kOdd, stream);
  }
  return absl::OkStatus();
}

// Rank kOdd stalls before its piece number `piece` until the others have returned.
void CheckStall(Op op, int piece) {
  SCOPED_TRACE(absl::StrCat("operation ", static_cast<int>(op), ", stall at piece ", piece));
  absl::Notification others_returned;
  std::atomic<int> pieces{0}, returned{0};
  InProcessOptions options{.world_size = kRanks, .deadline = kDeadline};
  options.before_copy = [&](int rank) {
    if (rank == kOdd && pieces.fetch_add(1) == piece) others_returned.WaitForNotification();
  };
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create(options));
  const int num_others = op == Op::kSendRecv ? 1 : 2;
  const absl::Time start = absl::Now();
  const auto statuses = RunRanks(*world, [&](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    const absl::Status status = CallOnce(op, *group, *stream);
    // In the send, rank 2 takes no part, but stays until the stall is over.
    if (backend.rank() != kOdd && op == Op::kSendRecv && backend.rank() == 2) others_returned.WaitForNotification();
    if (backend.rank() != kOdd && status.code() != absl::StatusCode::kOk && ++returned == num_others) {
      others_returned.Notify();
    }
    return status;
  });
  // Without the limit this would never end; how soon it does is said generously.
  EXPECT_LT(absl::Now() - start, kDeadline + absl::Seconds(10));
  ASSERT_GT(pieces.load(), piece) << "the rank never came to that piece";
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == kOdd || (op == Op::kSendRecv && rank == 2)) continue;
    EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 has agreed, but not")));
    const auto context = GetErrorContext(statuses[rank]);
    ASSERT_TRUE(context.has_value());
    ASSERT_EQ(context->findings.size(), 1u);
    EXPECT_EQ(context->findings[0].rank, kOdd);
    EXPECT_GE(context->elapsed, kDeadline);
  }
  EXPECT_THAT(statuses[kOdd], StatusIs(absl::StatusCode::kAborted, HasSubstr("rank 1 has agreed, but not")));
}

TEST(InProcessStallTest, C23_RankWedgedInACopyIsNamedAtTheDeadline) {
  for (const Op op : {Op::kAllGather, Op::kAllToAll}) {
    for (const int piece : {0, 3, 7}) CheckStall(op, piece);
  }
  for (const int piece : {0, 3}) CheckStall(Op::kReduceScatter, piece);
  // Two of its own block's sum, then two of each other block.
  for (const int piece : {0, 1, 2, 5}) CheckStall(Op::kAllReduce, piece);
  for (const int piece : {0, 3}) CheckStall(Op::kSendRecv, piece);
}

// A rank that is slow in every piece, inside the limit, delays the others and breaks nothing.
TEST(InProcessStallTest, C24_SlowCopyInsideTheLimitIsNoError) {
  InProcessOptions options{.world_size = kRanks, .deadline = absl::Seconds(60)};
  options.before_copy = [](int rank) {
    if (rank == kOdd) absl::SleepFor(absl::Milliseconds(5));
  };
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create(options));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    std::vector<float> sum(kBlock, static_cast<float>(backend.rank() + 1));
    const TensorView view(sum.data(), DType::kF32, Shape({kBlock}));
    EK_RETURN_IF_ERROR(group->AllReduce(view, view, ReduceOp::kSum, *stream));
    if (sum != std::vector<float>(kBlock, 6.0f)) return absl::InternalError("wrong sum");
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

}  // namespace
}  // namespace evenkeel::comm
