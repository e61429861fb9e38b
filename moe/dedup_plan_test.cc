// Row lists of deduplicated orders, and the tree they are summed in.
#include "evenkeel/moe/dedup_plan.h"

#include <cstring>
#include <vector>

#include "evenkeel/moe/tree_sum.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two tokens, three routes each, four experts on two ranks; one route dropped.
RoutingDecision Decision() {
  RoutingDecision d;
  d.num_tokens = 2;
  d.num_experts = 4;
  d.top_k = 3;
  d.capacity = 2;
  d.expert = {3, 0, 1, 2, 3, 0};
  d.slot = {0, 0, 0, 0, 1, -1};
  d.weight = {0.5f, 0.25f, 0.125f, 1.0f, 2.0f, 0.0f};
  return d;
}

TEST(DedupPlanTest, SendsATokenOncePerDestination) {
  ASSERT_OK_AND_ASSIGN(DedupSendPlan plan,
                       BuildDedupSendPlan(Decision(), {.ep_size = 2, .tp_size = 1, .lane = 0}, false));
  // Rank 0 (experts 0, 1) needs token 0 once; rank 1 needs both tokens.
  EXPECT_THAT(plan.token_of_row, ElementsAre(0, 0, 1));
  EXPECT_THAT(plan.rows_to, ElementsAre(1, 2));
  EXPECT_THAT(plan.rows_of_token.rows, ElementsAre(0, 1, 2, -1));
  EXPECT_THAT(plan.header, ElementsAre(1, 2, 2, 3));
  EXPECT_THAT(plan.route_of_record, ElementsAre(1, 2, 0, 3, 4));
  EXPECT_THAT(plan.record_ints_to, ElementsAre(8, 12));
}

TEST(DedupPlanTest, TheDestinationSeesExpertsSlotsAndWeights) {
  ASSERT_OK_AND_ASSIGN(DedupSendPlan send,
                       BuildDedupSendPlan(Decision(), {.ep_size = 2, .tp_size = 1, .lane = 0}, false));
  // Rank 1 hears the same from two sources.
  const std::vector<int64_t> header = {2, 3, 2, 3};
  std::vector<int32_t> records(send.records.begin() + 8, send.records.end());
  records.insert(records.end(), send.records.begin() + 8, send.records.end());
  RaggedReceiver receiver;
  receiver.local_experts = 2;
  receiver.capacity = 2;
  receiver.source_lane = {0, 0};
  receiver.source_replica = {0, 1};
  ASSERT_OK_AND_ASSIGN(DedupReceivePlan plan, BuildDedupReceivePlan(receiver, 0, header, records));
  EXPECT_THAT(plan.rows_from, ElementsAre(2, 2));
  EXPECT_THAT(plan.rows_of_expert, ElementsAre(2, 4));
  EXPECT_THAT(plan.arrival_of_expert_row, ElementsAre(1, 3, 0, 1, 2, 3));
  EXPECT_THAT(plan.canonical_position, ElementsAre(0, 2, 0, 1, 2, 3));
  EXPECT_EQ(plan.expert_rows_of_arrival.width, 2);
  EXPECT_THAT(plan.expert_rows_of_arrival.rows, ElementsAre(2, -1, 0, 3, 4, -1, 1, 5));
  EXPECT_THAT(plan.expert_rows_of_arrival.weights, ElementsAre(0.5f, 0.0f, 1.0f, 2.0f, 0.5f, 0.0f, 1.0f, 2.0f));
}

TEST(DedupPlanTest, RefusesRecordsThatCannotBe) {
  RaggedReceiver receiver;
  receiver.local_experts = 2;
  receiver.source_lane = {0};
  receiver.source_replica = {0};
  const auto status = [&](std::vector<int64_t> header, std::vector<int32_t> records) {
    return BuildDedupReceivePlan(receiver, 0, header, records).status();
  };
  constexpr absl::StatusCode kFailed = absl::StatusCode::kFailedPrecondition;
  EXPECT_OK(status({1, 2}, {0, 0, 0, 0, 0, 1, 0, 0}));
  EXPECT_THAT(status({1, 1}, {0, 2, 0, 0}), StatusIs(kFailed, HasSubstr("local expert 2")));
  EXPECT_THAT(status({1, 1}, {1, 0, 0, 0}), StatusIs(kFailed, HasSubstr("row 1")));
  EXPECT_THAT(status({1, 1}, {0, 0, -1, 0}), StatusIs(kFailed, HasSubstr("slot -1")));
  EXPECT_THAT(status({1, 2}, {0, 0, 0, 0, 0, 0, 1, 0}), StatusIs(kFailed, HasSubstr("twice")));
  EXPECT_THAT(status({2, 2}, {0, 0, 0, 0, 1, 0, 0, 0}), StatusIs(kFailed, HasSubstr("have slot 0")));
  EXPECT_THAT(status({1, 1}, {}), StatusIs(kFailed, HasSubstr("0 numbers arrived")));
  EXPECT_THAT(status({2, 1}, {0, 0, 0, 0}), StatusIs(kFailed, HasSubstr("announces 2 rows with 1 routes")));
  EXPECT_THAT(status({-1, 0}, {}), StatusIs(kFailed, HasSubstr("announces -1")));
  EXPECT_THAT(status({int64_t{1} << 40, int64_t{1} << 40}, {}), StatusIs(kFailed, HasSubstr("announces")));
  EXPECT_THAT(status({1}, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no plan")));
}

// Keys 0..7 with holes: the sum of a half may be taken first.
TEST(TreeSumTest, SumsOfHalvesAddUpToTheWhole) {
  auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(auto stream, device->CreateStream("s"));
  const std::vector<float> rows = {1e8f, 1.0f, -1e8f, 3.0f, 0.1f, 0.7f};
  const ConstTensorView source(rows.data(), DType::kF32, Shape({6, 1}));
  const auto sum = [&](std::vector<int32_t> entries, std::vector<int32_t> keys, int first, int end) {
    RowLists lists;
    lists.width = static_cast<int64_t>(entries.size());
    lists.rows = entries;
    lists.keys = keys;
    lists.first_key = first;
    lists.end_key = end;
    float out = -1;
    EXPECT_OK(TreeSumRows(source, lists, TensorView(&out, DType::kF32, Shape({1, 1})), *stream));
    return out;
  };
  const float low = sum({0, 1, 2}, {0, 1, 3}, 0, 4), high = sum({3, 4, 5}, {4, 6, 7}, 4, 8);
  EXPECT_EQ(low, (1e8f + 1.0f) + -1e8f);
  EXPECT_EQ(high, 3.0f + (0.1f + 0.7f));
  EXPECT_EQ(sum({0, 1, 2, 3, 4, 5}, {0, 1, 3, 4, 6, 7}, 0, 8), low + high);
  EXPECT_EQ(sum({-1, -1}, {0, 0}, 0, 8), 0);
}

TEST(TreeSumTest, RefusesListsThatDoNotFit) {
  auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(auto stream, device->CreateStream("s"));
  const std::vector<float> rows = {1, 2};
  float out = 0;
  RowLists lists;
  lists.width = 2;
  lists.keys = {0, 0};
  lists.end_key = 4;
  for (const std::vector<int32_t>& bad : {std::vector<int32_t>{0, 2}, {0, 1}, {-1, 1}}) {
    lists.rows = bad;
    EXPECT_THAT(TreeSumRows(ConstTensorView(rows.data(), DType::kF32, Shape({2, 1})), lists,
                            TensorView(&out, DType::kF32, Shape({1, 1})), *stream),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("entry")));
  }
}

// A token goes once to a node, with bits for the ranks there; the node's rank hands it on and adds up what comes back.
TEST(NodePlanTest, OneRowPerTokenAndNode) {
  // Two nodes of two ranks; token 0 goes to ranks 0, 2 and 3, token 1 to 3, token 2 nowhere.
  DedupSendPlan send;
  send.own = {0, 3};
  send.rows_of_token.width = 3;
  send.token_of_row = {0, 0, 0, 1};
  send.rows_to = {1, 0, 1, 2};
  const NodeSendPlan plan = BuildNodeSendPlan(send, 2);
  EXPECT_THAT(plan.token_of_row, ElementsAre(0, 0, 1));
  EXPECT_THAT(plan.rows_to, ElementsAre(1, 2));
  EXPECT_THAT(plan.masks, ElementsAre(1, 3, 2));
  EXPECT_THAT(plan.rows_of_token.rows, ElementsAre(0, 1, 2, -1, -1, -1));
  EXPECT_THAT(plan.rows_of_token.keys, ElementsAre(0, 1, 1, 0, 0, 0));
  // The second node gets both rows from here, and one for its first rank from itself.
  ASSERT_OK_AND_ASSIGN(const NodeMiddlePlan middle, BuildNodeMiddlePlan(2, {2, 1}, {3, 2, 1}));
  EXPECT_THAT(middle.passed_on, ElementsAre(1, 2, 1, 0));
  EXPECT_THAT(middle.arrival_of_row, ElementsAre(0, 0, 1, 2));
  EXPECT_THAT(middle.rows_of_arrival.rows, ElementsAre(0, 1, 2, -1, 3, -1));
  EXPECT_THAT(middle.rows_of_arrival.keys, ElementsAre(0, 1, 1, 0, 0, 0));
}

TEST(NodePlanTest, RefusesMasksThatDoNotFit) {
  constexpr absl::StatusCode kDisagree = absl::StatusCode::kFailedPrecondition;
  EXPECT_THAT(BuildNodeMiddlePlan(2, {1, 1}, {1}), StatusIs(kDisagree, HasSubstr("2 rows are announced, 1 masks")));
  EXPECT_THAT(BuildNodeMiddlePlan(2, {-1, 1}, {}), StatusIs(kDisagree, HasSubstr("announces -1 rows")));
  EXPECT_THAT(BuildNodeMiddlePlan(2, {0, 2}, {1, 0}), StatusIs(kDisagree, HasSubstr("row 1 of the peer in node 1")));
  EXPECT_THAT(BuildNodeMiddlePlan(2, {1, 0}, {5}), StatusIs(kDisagree, HasSubstr("row 0 of the peer in node 0")));
  // More ranks than one word has bits.
  ASSERT_OK_AND_ASSIGN(const NodeMiddlePlan wide, BuildNodeMiddlePlan(33, {1}, {1, 1}));
  EXPECT_THAT(wide.arrival_of_row, ElementsAre(0, 0));
  EXPECT_EQ(wide.passed_on[32], 1);
}

}  // namespace
}  // namespace evenkeel::moe
