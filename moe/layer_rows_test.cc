// The layer where rows are missing: ranks without tokens, experts without rows, dropped routes, ranks that stop.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// Trail 22 and 23: a rank without tokens takes part in every collective, forward and backward, and keeps its shapes.
TEST(LayerRowsTest, Trail22_Trail23_ZeroTokensOnARank) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2};
  c.tokens_of = [](int replica) { return replica == 0 ? 0 : 5; };
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    ASSERT_EQ(run.ranks.size(), 4u);
    EXPECT_TRUE(run.ranks[0].values.y.empty());
    EXPECT_EQ(run.ranks[0].taps.size(), run.ranks[3].taps.size());
    ExpectCounts(run, order);
  }
  c.whole = true;
  for (const char* order : {"unsharded", "token_sliced", "dedup"}) ExpectLikeDense(c, RunOrder(c, order), order);
}

TEST(LayerRowsTest, Trail22_Trail23_NoTokensAnywhere) {
  LayerCase c = {.tp = 2, .ep = 2, .tokens = 0};
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    for (const RankRun& rank : run.ranks) EXPECT_THAT(rank.values.w_in, Each(0.0)) << order;
  }
}

// Fewer tokens than lanes: some lanes own none.
TEST(LayerRowsTest, FewerTokensThanLanes) {
  LayerCase c = {.tp = 4, .ep = 2, .top_k = 2, .tokens = 2};
  const LayerRun reference = RunOrder(c, "reference");
  for (const std::string& order : TensorParallelOrders()) ExpectBitwiseEqual(reference, RunOrder(c, order), order);
}

// Trail 24: experts that see no row have exactly zero gradients; the favourite gets everything.
TEST(LayerRowsTest, Trail24_AllTokensToOneExpert) {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 1, .tokens = 9};
  c.mode = CapacityMode::kNoDrop;
  c.favourite_expert = 2;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) {
      const std::vector<double>& w = rank.values.w_in;
      const std::vector<double> first(w.begin(), w.begin() + w.size() / 2), second(w.begin() + w.size() / 2, w.end());
      if (rank.ep_rank == 0) {
        EXPECT_THAT(w, Each(0.0)) << order;
      } else {
        EXPECT_GT(MaxAbs(first), 0) << order;
        EXPECT_THAT(second, Each(0.0)) << order;
      }
    }
  }
}

// A token whose routes were all dropped gets exactly zero and sends nothing back but through nothing.
TEST(LayerRowsTest, DroppedTokensAreExactlyZero) {
  LayerCase c = {.tp = 1, .ep = 2, .experts = 4, .top_k = 1, .tokens = 12, .capacity_factor = 0.1};
  c.favourite_expert = 1;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) {
      int dropped = 0;
      for (int64_t token = 0; token < 12; ++token) {
        if (rank.decision.slot[token] >= 0) continue;
        ++dropped;
        for (int64_t i = 0; i < c.hidden; ++i) {
          EXPECT_EQ(rank.values.y[token * c.hidden + i], 0) << order;
          EXPECT_EQ(rank.values.dx[token * c.hidden + i], 0) << order;
        }
      }
      EXPECT_EQ(dropped, 11) << order;
    }
  }
}

// Dropless: ragged orders have no capacity at all; padded ones are as wide as the fullest expert needs.
TEST(LayerRowsTest, DroplessDropsNothing) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 7};
  c.mode = CapacityMode::kDropless;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) EXPECT_EQ(rank.decision.num_kept(), 14) << order;
  }
}

// Trail 28: sources that disagree on the capacity bring unequal all-to-alls. Here routes recorded at two capacities are
// replayed on two ranks; the exchange is refused with both sizes before a byte moves.
TEST(LayerRowsTest, Trail28_UnequalExchangesAreRefused) {
  LayerCase narrow = {.tp = 1, .ep = 2, .top_k = 2, .tokens = 8};
  LayerCase wide = narrow;
  wide.capacity_factor = 2;
  const RoutingDecision few = RunOrder(narrow, "reference").ranks[0].decision;
  const RoutingDecision many = RunOrder(wide, "reference").ranks[1].decision;
  ASSERT_LT(few.capacity, many.capacity);
  for (const char* order : {"reference", "drop_gather", "fused"}) {
    LayerCase c = narrow;
    c.replay = [&](int replica) { return replica == 0 ? &few : &many; };
    const absl::Status status = RunLayer(c, *FindOrder(order)).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << order << ": " << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("all_to_all"), HasSubstr("group=ep"))) << order;
  }
}

// Trail 13: one rank has fewer batches than the others. They get an error that says who is absent and where, in the
// next collective of the layer, instead of waiting for ever.
TEST(LayerRowsTest, Trail13_ARankThatStopsEarlyIsNamed) {
  for (const std::string& order : AllTensorParallelOrders()) {
    LayerCase c = {.tp = 1, .ep = 2, .top_k = 2};
    c.deadline_ms = 1000;
    c.passes_of = [](int replica) { return replica == 0 ? 2 : 1; };
    const absl::Status status = RunLayer(c, *FindOrder(order)).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << order << ": " << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("group=control_ep"), HasSubstr("rank 1"))) << order;
  }
}

}  // namespace
}  // namespace evenkeel::moe
