// The planner alone: extents near every limit without memory behind them, and placements against a checker of
// intervals.
#include "evenkeel/comm/call_plan.h"

#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// Addresses that nobody touches: the send buffer high, the receive buffer low, with room for 2^61 bytes between.
void* const kLow = reinterpret_cast<void*>(uintptr_t{1} << 20);
void* const kHigh = reinterpret_cast<void*>((uintptr_t{1} << 62) + (uintptr_t{1} << 20));

ConstTensorView Send(DType dtype, int64_t n) { return ConstTensorView(kHigh, dtype, Shape({n})); }
TensorView Recv(DType dtype, int64_t n) { return TensorView(kLow, dtype, Shape({n})); }

int64_t Total(absl::Span<const SendSpan> spans) {
  int64_t bytes = 0;
  for (const SendSpan& span : spans) bytes += span.bytes;
  return bytes;
}

// Every operation around 2^31 and 2^32 elements and bytes: spans of the right lengths, in 64 bits.
TEST(CallPlanTest, C12_ExtentsBeyond31BitsArePlanned) {
  for (const int size : {2, 3, 8}) {
    const Place place{.rank = size - 1, .size = size};
    for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF64}) {
      for (const int64_t around : {int64_t{1} << 31, int64_t{1} << 32, (int64_t{1} << 31) / SizeOf(dtype)}) {
        for (const int64_t n : {around - 1, around, around + 1}) {
          const int64_t bytes = n * SizeOf(dtype);
          const CallPlan gather = PlanAllGather(Send(dtype, n), Recv(dtype, n * size), place);
          ASSERT_OK(gather.bad_argument);
          EXPECT_EQ(Total(gather.phases[0].sends), bytes * size);
          EXPECT_EQ(gather.phases[0].receives[1].data, static_cast<std::byte*>(kLow) + bytes);
          const CallPlan scatter = PlanReduceScatter(Send(dtype, n * size), Recv(dtype, n), ReduceOp::kSum, place);
          ASSERT_OK(scatter.bad_argument);
          EXPECT_EQ(scatter.phases[0].block_bytes, bytes);
          const CallPlan exchange = PlanAllToAll(Send(dtype, n * size), Recv(dtype, n * size), place);
          ASSERT_OK(exchange.bad_argument);
          EXPECT_EQ(exchange.phases[0].sends[1].data, static_cast<std::byte*>(kHigh) + bytes);
          const CallPlan reduce = PlanAllReduce(Send(dtype, n), Recv(dtype, n), ReduceOp::kMax, place);
          ASSERT_OK(reduce.bad_argument);
          EXPECT_EQ(Total(reduce.phases[0].sends), bytes);
          std::vector<int64_t> counts(size, n);
          counts[0] = 1;
          const int64_t total = n * (size - 1) + 1;
          const CallPlan ragged = PlanAllToAllV(Send(dtype, total), counts, Recv(dtype, total), counts, place);
          ASSERT_OK(ragged.bad_argument);
          EXPECT_EQ(Total(ragged.phases[0].sends), total * SizeOf(dtype));
        }
      }
    }
  }
}

// Counts, counts times size, and sums of counts past 2^63: refused before anything is allocated or touched.
TEST(CallPlanTest, C12_OverflowIsRefusedInEveryOperation) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  const Place place{.rank = 1, .size = 4};
  for (const DType dtype : kAllDTypes) {
    const int64_t most = kMax / SizeOf(dtype);
    for (const int64_t n : {most / 4 + 1, most, kMax / 2, kMax}) {
      if (n <= most && SizeOf(dtype) == 1 && n < kMax / 4) continue;
      EXPECT_THAT(PlanAllGather(Send(dtype, n), Recv(dtype, n), place).bad_argument, StatusIs(kBad, HasSubstr("")));
      EXPECT_THAT(PlanReduceScatter(Send(dtype, n), Recv(dtype, n), ReduceOp::kSum, place).bad_argument,
                  StatusIs(kBad, HasSubstr("")));
      const std::vector<int64_t> counts(4, n);
      EXPECT_THAT(PlanAllGatherV(Send(dtype, n), Recv(dtype, n), counts, place).bad_argument,
                  StatusIs(kBad, HasSubstr("")));
      EXPECT_THAT(PlanAllToAllV(Send(dtype, n), counts, Recv(dtype, n), counts, place).bad_argument,
                  StatusIs(kBad, HasSubstr("")));
    }
    if (SizeOf(dtype) == 1) continue;
    EXPECT_THAT(PlanAllReduce(Send(dtype, most + 1), Recv(dtype, most + 1), ReduceOp::kMax, place).bad_argument,
                StatusIs(kBad, HasSubstr("overflow")));
    EXPECT_THAT(PlanBroadcast(Recv(dtype, most + 1), 0, place).bad_argument, StatusIs(kBad, HasSubstr("overflow")));
    EXPECT_THAT(PlanSend(Send(dtype, most + 1), 0, place).bad_argument, StatusIs(kBad, HasSubstr("overflow")));
  }
  const std::vector<int64_t> sum_overflows = {kMax, 1, 0, 0};
  EXPECT_THAT(PlanAllGatherV(Send(DType::kU8, 1), Recv(DType::kU8, kMax), sum_overflows, place).bad_argument,
              StatusIs(kBad, HasSubstr("overflow: the sum of counts up to index 1 is 9223372036854775807 + 1")));
}

TEST(CallPlanTest, C13_NegativeCountsNameTheirIndex) {
  const Place place{.rank = 0, .size = 3};
  for (int index = 0; index < 3; ++index) {
    std::vector<int64_t> counts(3, 4);
    counts[index] = -2;
    const auto names =
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(absl::StrCat("counts[", index, "] is -2")));
    EXPECT_THAT(PlanAllGatherV(Send(DType::kU8, 4), Recv(DType::kU8, 6), counts, place).bad_argument, names);
    EXPECT_THAT(
        PlanReduceScatterV(Send(DType::kU8, 6), Recv(DType::kU8, 4), counts, ReduceOp::kSum, place).bad_argument,
        names);
    EXPECT_THAT(PlanAllToAllV(Send(DType::kU8, 6), counts, Recv(DType::kU8, 12), {4, 4, 4}, place).bad_argument, names);
  }
}

// Byte by byte: whether two ranges share one.
bool Meet(int64_t a, int64_t a_bytes, int64_t b, int64_t b_bytes) {
  for (int64_t i = a; i < a + a_bytes; ++i) {
    if (i >= b && i < b + b_bytes) return true;
  }
  return false;
}

// Two buffers anywhere in a small memory: accepted exactly where they are apart, or lie where the call is in place.
TEST(CallPlanTest, C13_PlacementsAgainstAnIntervalChecker) {
  alignas(16) std::byte memory[256];
  const PhiloxStream random(PhiloxKey(13));
  int64_t accepted = 0, in_place = 0, refused = 0;
  for (uint64_t run = 0; run < 40'000; ++run) {
    const uint64_t at = run * 16;
    const int size = static_cast<int>(1 + random.Below(at, 4));
    const Place place{.rank = static_cast<int>(random.Below(at + 1, static_cast<uint64_t>(size))), .size = size};
    const DType dtype = kAllDTypes[random.Below(at + 2, 7)];
    const int64_t b = SizeOf(dtype), n = static_cast<int64_t>(random.Below(at + 3, 7));
    const auto from = static_cast<int64_t>(random.Below(at + 4, 32)),
               to = static_cast<int64_t>(random.Below(at + 5, 32));
    const auto view = [&](int64_t begin, int64_t elements) {
      return TensorView(memory + begin, dtype, Shape({elements}));
    };
    CallPlan plan;
    int64_t send_bytes = n * b, recv_bytes = n * b;
    bool may_coincide = false;
    switch (random.Below(at + 6, 4)) {
      case 0:
        plan = PlanAllReduce(view(from, n), view(to, n), ReduceOp::kMax, place);
        may_coincide = from == to;
        break;
      case 1:
        recv_bytes *= size;
        plan = PlanAllGather(view(from, n), view(to, n * size), place);
        may_coincide = from == to + n * b * place.rank;
        break;
      case 2:
        send_bytes *= size;
        plan = PlanReduceScatter(view(from, n * size), view(to, n), ReduceOp::kMin, place);
        may_coincide = to == from + n * b * place.rank;
        break;
      default:
        send_bytes *= size;
        recv_bytes *= size;
        plan = PlanAllToAll(view(from, n * size), view(to, n * size), place);
    }
    const bool meet = Meet(from, send_bytes, to, recv_bytes);
    ASSERT_EQ(plan.bad_argument.ok(), !meet || may_coincide)
        << "run " << run << ": " << plan.bad_argument << ", send [" << from << ", +" << send_bytes << "), recv [" << to
        << ", +" << recv_bytes << ")";
    EXPECT_EQ(plan.in_place, meet && may_coincide);
    if (!plan.bad_argument.ok()) {
      EXPECT_THAT(plan.bad_argument, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("starts at byte")));
    }
    (!plan.bad_argument.ok() ? refused : plan.in_place ? in_place : accepted) += 1;
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(in_place, 100);
  EXPECT_GT(refused, 1000);
}

// A view is an address, a dtype and a shape: there is no way to say a stride.
TEST(CallPlanTest, C15_StridedViewsDoNotCompile) {
  static_assert(std::is_constructible_v<TensorView, void*, DType, Shape>);
  static_assert(!std::is_constructible_v<TensorView, void*, DType, Shape, Shape>);
  static_assert(!std::is_constructible_v<TensorView, void*, DType, Shape, int64_t>);
  static_assert(!std::is_constructible_v<TensorView, void*, DType, Shape, std::vector<int64_t>>);
  static_assert(!std::is_constructible_v<ConstTensorView, const void*, DType, Shape, Shape>);
  static_assert(!std::is_constructible_v<ConstTensorView, const void*, DType, Shape, std::vector<int64_t>>);
}

// Nothing overlaps nothing, wherever it points.
TEST(CallPlanTest, C13_EmptyBuffersMayLieAnywhere) {
  float data[8] = {};
  const Place place{.rank = 0, .size = 2};
  const ConstTensorView all(data, DType::kF32, Shape({8}));
  const TensorView none(data + 3, DType::kF32, Shape({0}));
  const int64_t sends[] = {4, 4}, receives[] = {0, 0};
  EXPECT_OK(PlanAllToAllV(all, sends, none, receives, place).bad_argument);
}

TEST(CallPlanTest, CountsOfARankAloneMustAgreeWithThemselves) {
  float from[4] = {}, to[4] = {};
  const int64_t sends[] = {4}, receives[] = {3};
  const CallPlan plan = PlanAllToAllV(ConstTensorView(from, DType::kF32, Shape({4})), sends,
                                      TensorView(to, DType::kF32, Shape({3})), receives, {.rank = 0, .size = 1});
  EXPECT_EQ(plan.bad_argument.code(), absl::StatusCode::kInvalidArgument) << plan.bad_argument;
}

}  // namespace
}  // namespace evenkeel::comm
