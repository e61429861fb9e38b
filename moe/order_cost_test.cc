// What orders cost: the worked table to the byte, closed forms, and the schedule's memory.
#include "evenkeel/moe/order_cost.h"

#include <string>

#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_text.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TypedOrder Typed(const std::string& name, ExpertLayout layout = ExpertLayout::kAny) {
  absl::StatusOr<Order> order = FindOrder(name);
  EK_CHECK_OK(order);
  absl::StatusOr<TypedOrder> typed = CheckOrder(*order, layout);
  EK_CHECK_OK(typed);
  return *typed;
}

// s 4096, h 4096, k 2, f 1.25, b 2: V = 83,886,080 bytes.
OrderSizes WorkedSizes(int tp, int ep) {
  return {.tokens = 4096,
          .hidden = 4096,
          .experts = 8,
          .top_k = 2,
          .capacity = 1280,
          .dtype = DType::kBF16,
          .tp = tp,
          .ep = ep};
}

OrderCost Cost(const std::string& name, const OrderSizes& sizes) {
  absl::StatusOr<OrderCost> cost = ComputeOrderCost(Typed(name), sizes);
  EK_CHECK_OK(cost);
  return *cost;
}

TEST(OrderCostTest, WorkedTableToTheByte) {
  constexpr int64_t kV = 83'886'080;
  struct Row {
    const char* order;
    int tp, ep;
    int64_t ep_bytes, tp_bytes;
  };
  const Row rows[] = {
      {"reference", 2, 4, kV * 3 / 2, kV},
      {"reference", 4, 8, kV * 7 / 4, kV * 3 / 2},
      {"reference", 2, 2, kV, kV},
      {"drop_gather", 2, 4, kV * 3 / 4, kV * 2},
      {"drop_gather", 4, 8, kV * 7 / 16, kV * 3},
      {"drop_gather", 2, 2, kV / 2, kV * 2},
      {"fused", 2, 4, kV * 3 / 4, kV * 3 / 2},
      {"fused", 4, 8, kV * 7 / 16, kV * 9 / 4},
      {"fused", 2, 2, kV / 2, kV * 3 / 2},
      {"unsharded", 2, 4, kV * 3 / 4, kV / 2},
      {"unsharded", 4, 8, kV * 7 / 16, kV * 3 / 4},
      {"unsharded", 2, 2, kV / 2, kV / 2},
  };
  for (const Row& row : rows) {
    const OrderCost cost = Cost(row.order, WorkedSizes(row.tp, row.ep));
    EXPECT_EQ(cost.forward.ep.bytes, row.ep_bytes) << row.order << " T=" << row.tp << " E=" << row.ep;
    EXPECT_EQ(cost.forward.tp.bytes, row.tp_bytes) << row.order << " T=" << row.tp << " E=" << row.ep;
    EXPECT_EQ(cost.backward.ep, cost.forward.ep) << row.order;
    EXPECT_EQ(cost.backward.tp.bytes, cost.forward.tp.bytes) << row.order;
  }
  // The figures as printed in the notes, in MB.
  EXPECT_EQ(Cost("reference", WorkedSizes(2, 4)).forward.ep.bytes, 125'829'120);
  EXPECT_EQ(Cost("unsharded", WorkedSizes(4, 8)).forward.ep.bytes, 36'700'160);
  EXPECT_EQ(Cost("unsharded", WorkedSizes(4, 8)).forward.tp.bytes, 62'914'560);
}

TEST(OrderCostTest, CollectivesOfTheTable) {
  const auto collectives = [](const char* name) {
    const OrderTraffic traffic = Cost(name, WorkedSizes(2, 4)).forward;
    return std::make_pair(traffic.ep.collectives, traffic.tp.collectives);
  };
  EXPECT_EQ(collectives("reference"), std::make_pair(2, 1));
  EXPECT_EQ(collectives("drop_gather"), std::make_pair(2, 3));
  EXPECT_EQ(collectives("fused"), std::make_pair(2, 3));
  EXPECT_EQ(collectives("unsharded"), std::make_pair(2, 1));
}

TEST(OrderCostTest, ClosedFormsAreThoseOfTheTable) {
  const auto forms = [](const char* name, ExpertLayout layout, bool backward) {
    const AxisFormula formula = ClosedForms(Typed(name, layout), backward);
    return formula.ep + " | " + formula.tp;
  };
  constexpr ExpertLayout kOwn = ExpertLayout::kAny;
  for (bool backward : {false, true}) {
    EXPECT_EQ(forms("reference", kOwn, backward), "2(E-1)/E V | 2(T-1)/T V");
    EXPECT_EQ(forms("drop_gather", kOwn, backward), "2(E-1)/(ET) V | 4(T-1)/T V");
    EXPECT_EQ(forms("fused", kOwn, backward), "2(E-1)/(ET) V | 3(T-1)/T V");
    EXPECT_EQ(forms("unsharded", kOwn, backward), "2(E-1)/(ET) V | (T-1)/T V");
    EXPECT_EQ(forms("token_sliced", ExpertLayout::kTensorParallel, backward),
              "2(E-1)/(ET) k s h b | (T-1)/T (2R + s) h b");
    EXPECT_EQ(forms("token_sliced", ExpertLayout::kWhole, backward), "2(E-1)/(ET) k s h b | (T-1)/T s h b");
  }
}

// drop_gather always sends more in total than reference, by 2 V (T-1) / (T E).
TEST(OrderCostTest, DropGatherAlwaysSendsMoreInTotal) {
  for (int tp : {2, 4, 8}) {
    for (int ep : {1, 2, 4, 8}) {
      const OrderTraffic reference = Cost("reference", WorkedSizes(tp, ep)).forward;
      const OrderTraffic drop_gather = Cost("drop_gather", WorkedSizes(tp, ep)).forward;
      const int64_t volume = int64_t{8} * 1280 * 4096 * 2;
      EXPECT_EQ(drop_gather.ep.bytes + drop_gather.tp.bytes - reference.ep.bytes - reference.tp.bytes,
                2 * volume * (tp - 1) / (tp * ep));
    }
  }
}

TEST(OrderCostTest, GroupsOfOneMoveNothing) {
  for (const std::string name : {"reference", "drop_gather", "fused", "unsharded", "token_sliced"}) {
    const OrderCost cost = Cost(name, WorkedSizes(1, 1));
    EXPECT_EQ(cost.forward, OrderTraffic()) << name;
    EXPECT_EQ(cost.backward, OrderTraffic()) << name;
  }
}

TEST(OrderCostTest, RefusesSizesThatDoNotFit) {
  OrderSizes sizes = WorkedSizes(2, 3);
  EXPECT_THAT(ComputeOrderCost(Typed("fused"), sizes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("8 experts")));
  sizes = WorkedSizes(2, 4);
  sizes.capacity = 5;
  EXPECT_THAT(ComputeOrderCost(Typed("fused"), sizes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("capacity 5")));
  sizes.capacity = int64_t{1} << 60;
  EXPECT_THAT(ComputeOrderCost(Typed("fused"), sizes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
  sizes.capacity = -2;
  EXPECT_THAT(ComputeOrderCost(Typed("fused"), sizes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("negative")));
}

TEST(OrderScheduleTest, PermutationIndexIsTheTranspose) {
  const RowExtents extents = {.lanes = 2, .sources = 1, .experts = 3, .slots = 2};
  using enum RowTag;
  EXPECT_THAT(PermutationIndex({kLane, kExpert, kSlot}, {kExpert, kLane, kSlot}, extents),
              ElementsAre(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11));
  EXPECT_THAT(PermutationIndex({kExpert, kLane, kSlot}, {kExpert, kLane, kSlot}, extents),
              ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
  EXPECT_TRUE(PermutationIndex({kExpert, kSlot}, {kExpert, kSlot}, {.experts = 4, .slots = 0}).empty());
  // Chunks of two and one of a rank's three experts, on two ranks.
  const RowExtents uneven = {.experts = 4, .slots = 1, .chunks = 2, .chunk_experts = {2, 1}};
  EXPECT_THAT(PermutationIndex({kExpert, kChunk, kSlot}, {kChunk, kExpert, kSlot}, uneven),
              ElementsAre(0, 2, 3, 5, 1, 4));
}

TEST(OrderScheduleTest, BlockTransposeAndBack) {
  // [2 nodes][3 local indices].
  EXPECT_THAT(BlockTransposeIndex({2, 0, 1, 1, 2, 0}, 3, false), ElementsAre(0, 1, 3, 4, 5, 2));
  EXPECT_THAT(BlockTransposeIndex({2, 0, 1, 1, 2, 0}, 3, true), ElementsAre(0, 1, 5, 2, 3, 4));
  EXPECT_TRUE(BlockTransposeIndex({0, 0}, 1, true).empty());
}

// The built-in orders slice without copying, and permute only around the experts.
TEST(OrderScheduleTest, PermutesOnlyAroundExperts) {
  OrderSizes sizes = WorkedSizes(2, 4);
  sizes.ffn = 64;
  for (const std::string name : {"reference", "drop_gather", "fused"}) {
    const Schedules schedules = BuildSchedules(Typed(name), sizes);
    for (const Schedule* schedule : {&schedules.forward, &schedules.backward}) {
      for (const Action& action : schedule->actions) {
        EXPECT_NE(action.kind, ActionKind::kCopy) << name;
        if (action.kind != ActionKind::kPermute) continue;
        const StepKind kind =
            (schedule == &schedules.forward ? Typed(name).forward : Typed(name).backward)[action.step].step.kind;
        EXPECT_EQ(kind, StepKind::kExperts) << name;
      }
    }
  }
}

// One local expert: its rows are contiguous as they arrive.
TEST(OrderScheduleTest, OneLocalExpertNeedsNoPermutation) {
  OrderSizes sizes = WorkedSizes(1, 8);
  sizes.ffn = 64;
  const Schedules schedules = BuildSchedules(Typed("fused"), sizes);
  for (const Action& action : schedules.forward.actions) EXPECT_NE(action.kind, ActionKind::kPermute);
}

TEST(OrderScheduleTest, PeakCountsEveryBufferOnce) {
  // T = E = 1: dispatch buffer (kept as the experts' input), pre (kept), hidden, out (kept for combine).
  OrderSizes sizes = {.tokens = 8, .hidden = 4, .experts = 2, .top_k = 1, .capacity = 4, .ffn = 16};
  const OrderMemory memory = BuildSchedules(Typed("reference"), sizes).memory();
  const int64_t rows = 8, row = rows * 4 * 4, middle = rows * 16 * 4;
  EXPECT_EQ(memory.forward_peak, 2 * row + 2 * middle);
  EXPECT_EQ(memory.tape, 2 * row + middle);
  EXPECT_EQ(memory.backward_peak, std::max(memory.tape + row, row + middle + row + 2 * middle + row));
}

TEST(OrderTextTest, SaysWhereItBeatsReference) {
  // E/(E-1) and E/(2(E-1)) at E = 4.
  ASSERT_OK_AND_ASSIGN(const std::string drop_gather, DescribeOrder(Typed("drop_gather"), WorkedSizes(2, 4)));
  EXPECT_THAT(drop_gather, HasSubstr("more than 1.333 times"));
  ASSERT_OK_AND_ASSIGN(const std::string fused, DescribeOrder(Typed("fused"), WorkedSizes(2, 4)));
  EXPECT_THAT(fused, HasSubstr("more than 0.667 times"));
}

TEST(OrderTextTest, DescribesBothProgramsAndNumbers) {
  ASSERT_OK_AND_ASSIGN(std::string text, DescribeOrder(Typed("reference"), WorkedSizes(2, 4)));
  for (const char* part : {"order reference", "all_reduce(tp)", "experts'", "2(E-1)/E V", "125,829,120", "83,886,080",
                           "backward (derived)", "forward peak"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

}  // namespace
}  // namespace evenkeel::moe
