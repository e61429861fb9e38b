// The layer under orders that nobody built in: whatever the type checker accepts computes the same layer.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

TEST(LayerOrdersTest, AnyWellTypedOrderRuns) {
  const char* kOrders[] = {// Folded after the sum over lanes instead of before it.
                           R"pb(name: "late_fold"
                                step { kind: SLICE dim: TOKENS }
                                step { kind: DISPATCH dim: DESTINATIONS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: ALL_GATHER dim: DESTINATIONS to: INVARIANT }
                                step { kind: EXPAND }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: FOLD }
                                step { kind: SLICE dim: SUMS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb",
                           // Deduplicated, all lanes the same.
                           R"pb(name: "dedup_reference"
                                step { kind: DISPATCH dim: DESTINATIONS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COPY }
                                step { kind: EXPAND }
                                step { kind: EXPERTS }
                                step { kind: FOLD }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE })pb",
                           // Partial tokens are summed at the very end.
                           R"pb(name: "late_sum"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE to: PARTIAL }
                                step { kind: ALL_REDUCE })pb",
                           // The input gradient is summed as tokens.
                           R"pb(name: "early_copy"
                                step { kind: COPY }
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE })pb",
                           // Each lane combines its own slots; the sums are scattered and gathered as tokens.
                           R"pb(name: "slot_sums"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: SLICE dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: ALL_GATHER dim: SLOTS to: REPLICATED }
                                step { kind: EXPERTS }
                                step { kind: REDUCE_SCATTER dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE to: PARTIAL }
                                step { kind: REDUCE_SCATTER dim: TOKENS }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb",
                           // Slices at the experts instead of at the source.
                           R"pb(name: "late_slice"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: SLICE dim: SLOTS }
                                step { kind: ALL_GATHER dim: SLOTS to: REPLICATED }
                                step { kind: EXPERTS }
                                step { kind: REDUCE_SCATTER dim: SLOTS }
                                step { kind: ALL_GATHER dim: SLOTS to: INVARIANT }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE })pb",
                           // Real rows, all lanes the same.
                           R"pb(name: "ragged_reference"
                                step { kind: DISPATCH dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE })pb",
                           // drop_gather on real rows.
                           R"pb(name: "ragged_drop_gather"
                                step { kind: SLICE dim: TOKENS }
                                step { kind: DISPATCH dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: ALL_GATHER dim: ROWS to: INVARIANT }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: SLICE dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb"};
  for (const char* text : kOrders) {
    ASSERT_OK_AND_ASSIGN(const Order order, ParseOrder(text, "test"));
    for (int tp : {1, 2, 4}) {
      for (int ep : {1, 2}) {
        LayerCase c = {.tp = tp, .ep = ep, .experts = 4, .top_k = 2, .tokens = 7};
        const std::string what = Name(c, order.name);
        absl::StatusOr<LayerRun> run = RunLayer(c, order);
        ASSERT_OK(run) << what;
        ExpectLikeDense(c, *run, what);
        ExpectLanesAgree(*run, what);
        ExpectCounts(*run, what);
      }
    }
  }
}

// A sequence-parallel caller: each lane brings and gets its own tokens; the first slice and the last gather fall away.
TEST(LayerOrdersTest, SlicedTokensAtBothEnds) {
  ASSERT_OK_AND_ASSIGN(const Order order,
                       ParseOrder(R"pb(
                                    name: "sequence_parallel"
                                    expert_layout: ANY_LAYOUT
                                    input: SLICED_TOKENS
                                    output: SLICED_TOKENS
                                    step { kind: DISPATCH dim: ROWS }
                                    step { kind: ALL_TO_ALL_V }
                                    step { kind: ALL_GATHER dim: ROWS to: REPLICATED when: TENSOR_PARALLEL_EXPERTS }
                                    step { kind: EXPERTS }
                                    step { kind: REDUCE_SCATTER dim: ROWS when: TENSOR_PARALLEL_EXPERTS }
                                    step { kind: ALL_TO_ALL_V }
                                    step { kind: COMBINE })pb",
                                  "test"));
  for (bool whole : {false, true}) {
    for (int tp : {1, 2, 4}) {
      LayerCase c = {.tp = tp, .ep = 2, .experts = 4, .top_k = 2, .tokens = 7};
      c.whole = whole;
      const std::string what = Name(c, order.name);
      absl::StatusOr<LayerRun> run = RunLayer(c, order);
      ASSERT_OK(run) << what;
      const DenseResult dense = RunDense(c, *run);
      const LayerRun replicated = RunOrder(c, "token_sliced");
      for (size_t r = 0; r < run->ranks.size(); ++r) {
        const RankRun& rank = run->ranks[r];
        const int64_t first = rank.lane * (7 / tp) + std::min(rank.lane, 7 % tp);
        const auto own = [&](const std::vector<double>& all) {
          const auto begin = all.begin() + first * c.hidden;
          return std::vector<double>(begin, begin + rank.values.y.size());
        };
        EXPECT_LE(MaxDifference(rank.values.y, own(dense.y[rank.replica])), 1e-12) << what;
        EXPECT_LE(MaxDifference(rank.values.dx, own(dense.dx[rank.replica])), 2e-5) << what;
        EXPECT_EQ(rank.values.router, replicated.ranks[r].values.router) << what;
        EXPECT_EQ(rank.values.w_in, replicated.ranks[r].values.w_in) << what;
      }
      ExpectCounts(*run, what);
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
