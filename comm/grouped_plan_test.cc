// How grouped calls are laid out: what shares an exchange, what has one of its own, what is refused.
#include "evenkeel/comm/grouped_plan.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int kSize = 3;
const Place kPlace{.rank = 1, .size = kSize};
constexpr int64_t kSmall = 16;                        // f32 elements
constexpr int64_t kLarge = kMostPackedBytes / 4 + 1;  // f32 elements

// Memory for calls that do not overlap.
class Memory {
 public:
  TensorView New(int64_t n) {
    const TensorView view(next_, DType::kF32, Shape({n}));
    next_ += n;
    EXPECT_LE(next_, bytes_.data() + bytes_.size());
    return view;
  }

 private:
  std::vector<float> bytes_ = std::vector<float>(1 << 20);
  float* next_ = bytes_.data();
};

GroupedCall AllReduce(Memory& memory, int64_t n) {
  return {.operation = Operation::kAllReduce, .send = memory.New(n), .recv = memory.New(n)};
}
GroupedCall AllGather(Memory& memory, int64_t n) {
  return {.operation = Operation::kAllGather, .send = memory.New(n), .recv = memory.New(n * kSize)};
}
GroupedCall AllToAllV(Memory& memory, int64_t n) {
  const std::vector<int64_t> counts(kSize, n);
  return {.operation = Operation::kAllToAllV,
          .send = memory.New(n * kSize),
          .recv = memory.New(n * kSize),
          .counts = counts,
          .recv_counts = counts};
}

int NumExchanges(const CallPlan& plan) {
  return static_cast<int>(
      std::count_if(plan.phases.begin(), plan.phases.end(), [](const PhasePlan& phase) { return !phase.is_local; }));
}

TEST(GroupedPlanTest, SmallCallsShareOneExchange) {
  Memory memory;
  std::vector<GroupedCall> calls;
  for (int i = 0; i < 16; ++i) calls.push_back(AllGather(memory, kSmall));
  const CallPlan plan = PlanGrouped(calls, kPlace);
  ASSERT_OK(plan.bad_argument);
  EXPECT_EQ(NumExchanges(plan), 1);
  EXPECT_EQ(plan.phases[0].sends[0].bytes, 16 * kSmall * 4);
  EXPECT_EQ(plan.phases[0].receives[2].bytes, 16 * kSmall * 4);
  EXPECT_EQ(plan.phases[0].sends[1].bytes, 0);
}

TEST(GroupedPlanTest, CallsOfTwoPhasesShareTwo) {
  Memory memory;
  std::vector<GroupedCall> calls;
  for (int i = 0; i < 5; ++i) calls.push_back(AllReduce(memory, kSmall));
  calls.push_back(AllGather(memory, kSmall));
  EXPECT_EQ(NumExchanges(PlanGrouped(calls, kPlace)), 2);
}

TEST(GroupedPlanTest, LargeBlocksAreNotCopied) {
  Memory memory;
  const std::vector<GroupedCall> calls = {AllGather(memory, kLarge), AllGather(memory, kSmall),
                                          AllGather(memory, kLarge)};
  const CallPlan plan = PlanGrouped(calls, kPlace);
  ASSERT_EQ(NumExchanges(plan), 3);
  EXPECT_EQ(plan.phases[0].sends[0].bytes, kSmall * 4);  // what is small goes first
  for (const int phase : {1, 2}) {
    const ConstTensorView& send = calls[phase == 1 ? 0 : 2].send;
    EXPECT_EQ(plan.phases[phase].sends[0].data, send.raw());
    EXPECT_EQ(plan.phases[phase].sends[0].bytes, send.num_bytes());
  }
}

TEST(GroupedPlanTest, NothingToMoveIsNoExchange) {
  Memory memory;
  EXPECT_EQ(NumExchanges(PlanGrouped({}, kPlace)), 0);
  EXPECT_EQ(NumExchanges(PlanGrouped({AllGather(memory, 0), AllReduce(memory, 0)}, kPlace)), 0);
}

// A plan as if all ranks had the counts of this one.
CallPlan WithJudgedCounts(const std::vector<GroupedCall>& calls) {
  CallPlan plan = PlanGrouped(calls, kPlace);
  EXPECT_OK(plan.bad_argument);
  EXPECT_TRUE(plan.phases[0].is_control);
  for (int r = 0; r < kSize; ++r) {
    // The matrix is symmetric: every rank's rows are this rank's.
    if (r != kPlace.rank) plan.grouped_counts->rows_of[r] = static_cast<const std::byte*>(plan.phases[0].sends[r].data);
  }
  RunLocalSteps(plan.phases[0].before, kSize);
  EXPECT_FALSE(JudgeGroupedCounts(kPlace, &plan).has_value());
  return plan;
}

TEST(GroupedPlanTest, TheCountsTellWhichExchangesOfAllToAllVThereAre) {
  Memory memory;
  EXPECT_EQ(NumExchanges(WithJudgedCounts({AllToAllV(memory, 0), AllToAllV(memory, 0)})), 1);  // the counts
  EXPECT_EQ(NumExchanges(WithJudgedCounts({AllToAllV(memory, kSmall), AllToAllV(memory, kSmall)})), 2);
  EXPECT_EQ(NumExchanges(WithJudgedCounts({AllToAllV(memory, kLarge), AllToAllV(memory, kSmall)})), 3);
  EXPECT_EQ(NumExchanges(WithJudgedCounts({AllToAllV(memory, kLarge), AllToAllV(memory, kLarge)})), 3);
}

TEST(GroupedPlanTest, CallsThatOverlapAreRefused) {
  Memory memory;
  const GroupedCall first = AllGather(memory, kSmall), second = AllGather(memory, kSmall);
  const auto refused = [](const std::vector<GroupedCall>& calls) { return PlanGrouped(calls, kPlace).bad_argument; };
  const auto overlap =
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("call 0 and call 2 of the group overlap"));
  EXPECT_OK(refused({first, second}));
  // Two may read the same memory, ...
  GroupedCall third = AllGather(memory, kSmall);
  third.send = first.send;
  EXPECT_OK(refused({first, second, third}));
  // ... but not read what the other writes, write what it reads, or write the same.
  third.send = ConstTensorView(first.recv.Rows(0, kSmall));
  EXPECT_THAT(refused({first, second, third}), overlap);
  GroupedCall reader = AllGather(memory, kSmall);
  reader.send = ConstTensorView(third.recv.Rows(kSmall, kSmall));
  third = AllGather(memory, kSmall);
  third.recv = TensorView(const_cast<void*>(first.send.raw()), DType::kF32, Shape({kSmall * kSize}));
  EXPECT_THAT(refused({first, reader, third}), overlap);
  third = AllGather(memory, kSmall);
  third.recv = first.recv;
  EXPECT_THAT(refused({first, second, third}), overlap);
}

// A long interval of one call hides behind a shorter one of the same call.
TEST(GroupedPlanTest, OverlapIsFoundBehindNearerIntervals) {
  Memory memory;
  const TensorView all = memory.New(1000);
  const auto part = [&all](int64_t begin, int64_t n) { return all.Rows(begin, n); };
  GroupedCall wide{.operation = Operation::kAllReduce, .send = part(0, 300), .recv = memory.New(300)};
  GroupedCall inside{.operation = Operation::kAllReduce, .send = part(10, 20), .recv = part(700, 20)};
  GroupedCall writer{.operation = Operation::kAllReduce, .send = memory.New(20), .recv = part(270, 20)};
  EXPECT_OK(PlanGrouped({wide, inside}, kPlace).bad_argument);
  EXPECT_THAT(PlanGrouped({wide, inside, writer}, kPlace).bad_argument,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("call 0 and call 2")));
}

// What is written lies in what the same call reads, and in what another reads.
TEST(GroupedPlanTest, OverlapIsFoundBehindTheCallsOwnMemory) {
  Memory memory;
  const TensorView all = memory.New(kSize * 100);
  const GroupedCall in_place{.operation = Operation::kReduceScatter, .send = all, .recv = all.Rows(100, 100)};
  const auto reader = [&](int64_t begin, int64_t n) {
    return GroupedCall{.operation = Operation::kAllReduce, .send = all.Rows(begin, n), .recv = memory.New(n)};
  };
  EXPECT_OK(PlanGrouped({in_place, reader(50, 50)}, kPlace).bad_argument);
  EXPECT_THAT(PlanGrouped({in_place, reader(50, 51)}, kPlace).bad_argument,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("call 0 and call 1")));
}

TEST(GroupedPlanTest, BadCallsAreNamedByNumber) {
  Memory memory;
  GroupedCall bad = AllGather(memory, kSmall);
  bad.recv = bad.recv.Rows(0, 1);
  EXPECT_THAT(PlanGrouped({AllReduce(memory, 1), bad}, kPlace).bad_argument,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("call 1 of the group (all_gather): recv has 1 elements, needs 48")));
  for (const Operation operation : {Operation::kBarrier, Operation::kSend, Operation::kGrouped}) {
    const CallPlan plan = PlanGrouped({GroupedCall{.operation = operation}}, kPlace);
    EXPECT_THAT(plan.bad_argument, StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr(absl::StrCat(OperationName(operation), "): cannot be grouped"))));
    EXPECT_TRUE(plan.phases.empty());
  }
}

}  // namespace
}  // namespace evenkeel::comm
