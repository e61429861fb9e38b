// Exchanges in two levels: the bits of the order they were made from, fewer messages between nodes, the predicted bytes
// on each class of links; and orders on groups of one.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/exchange_bound.h"
#include "evenkeel/moe/exchange_levels.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_rewrites.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

std::string TwoLevel(const std::string& order) { return absl::StrCat("two_level(", order, ")"); }

comm::LedgerEntry Sent(const comm::LedgerCounts& counts, comm::LinkClass link) {
  return counts.sent[static_cast<int>(comm::Axis::kEp)][static_cast<int>(link)];
}

// N nodes with L ranks of each EP group.
struct Nodes {
  int num_nodes, per_node;
  int ep() const { return num_nodes * per_node; }
};

class LevelsTest : public ::testing::TestWithParam<std::tuple<Nodes, int>> {
 protected:
  // Nodes of whole TP groups; with whole experts the EP group spans lanes.
  LayerCase Case(bool whole) const {
    const Nodes nodes = std::get<0>(GetParam());
    LayerCase c = {.tp = std::get<1>(GetParam()), .ep = nodes.ep(), .top_k = 3, .tokens = 7, .dtype = DType::kF32};
    c.experts = 2 * nodes.ep();
    c.whole = whole;
    if (whole) c.dp = nodes.ep();
    c.ranks_per_node = nodes.per_node * (whole ? 1 : c.tp);
    c.bias = true;
    c.seed = 5;
    return c;
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, LevelsTest,
                         ::testing::Combine(::testing::Values(Nodes{2, 2}, Nodes{3, 2}, Nodes{2, 3}, Nodes{4, 1},
                                                              Nodes{1, 4}),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           const Nodes nodes = std::get<0>(info.param);
                           return absl::StrCat("N", nodes.num_nodes, "L", nodes.per_node, "T", std::get<1>(info.param));
                         });

TEST_P(LevelsTest, BitsOfTheOrderAndPredictedBytesByLinkClass) {
  for (bool whole : {false, true}) {
    const LayerCase c = Case(whole);
    std::vector<std::string> orders = {"token_sliced", "dedup"};
    if (whole) orders.push_back("unsharded");
    if (!whole) orders.insert(orders.end(), {"reference", "drop_gather", "fused"});
    for (const std::string& order : orders) {
      const LayerRun plain = RunOrder(c, order), run = RunOrder(c, TwoLevel(order));
      const std::string what = Name(c, TwoLevel(order));
      ExpectBitwiseEqual(plain, run, what);
      ExpectCounts(plain, what + " (plain)");
      ExpectCounts(run, what);
    }
  }
}

// Between nodes the same bytes in N - 1 messages per exchange instead of (N - 1) L, forward and backward.
TEST_P(LevelsTest, PaddedOrdersAreAtTheClosedForms) {
  const LayerCase c = Case(false);
  const Nodes nodes = std::get<0>(GetParam());
  const int64_t N = nodes.num_nodes, L = nodes.per_node, E = nodes.ep(), T = c.tp;
  for (const char* order : {"reference", "fused"}) {
    const LayerRun plain = RunOrder(c, order), run = RunOrder(c, TwoLevel(order));
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      const int64_t slices = std::string(order) == "fused" ? T : 1;
      const int64_t V = c.experts * run.ranks[r].decision.capacity * c.hidden * SizeOf(c.dtype) / slices;
      for (auto counts : {&RankRun::forward, &RankRun::backward}) {
        const comm::LedgerEntry direct = Sent(plain.ranks[r].*counts, comm::LinkClass::kInterNode);
        const comm::LedgerEntry by_level = Sent(run.ranks[r].*counts, comm::LinkClass::kInterNode);
        EXPECT_EQ(direct.bytes_sent, 2 * (N - 1) * L * V / E) << Name(c, order);
        EXPECT_EQ(by_level.bytes_sent, 2 * (N - 1) * V / N) << Name(c, order);
        EXPECT_EQ(direct.messages_sent, 2 * (N - 1) * L) << Name(c, order);
        EXPECT_EQ(by_level.messages_sent, 2 * (N - 1)) << Name(c, order);
        EXPECT_EQ(Sent(plain.ranks[r].*counts, comm::LinkClass::kIntraNode).bytes_sent, 2 * (L - 1) * V / E);
        EXPECT_EQ(Sent(run.ranks[r].*counts, comm::LinkClass::kIntraNode).bytes_sent, 2 * (L - 1) * V / L);
      }
      EXPECT_EQ(run.ranks[r].predicted_forward.ep.inter_node_messages, 2 * (N - 1));
      EXPECT_EQ(plain.ranks[r].predicted_forward.ep.inter_node_messages, 2 * (N - 1) * L);
    }
  }
}

// Real rows: between nodes exactly those of the direct exchange, in at most N - 1 messages per exchange.
TEST_P(LevelsTest, RaggedOrdersSendTheSameRowsBetweenNodes) {
  const LayerCase c = Case(false);
  const Nodes nodes = std::get<0>(GetParam());
  for (const char* order : {"token_sliced", "dedup"}) {
    const LayerRun plain = RunOrder(c, order), run = RunOrder(c, TwoLevel(order));
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      const comm::LedgerEntry direct = Sent(plain.ranks[r].forward, comm::LinkClass::kInterNode);
      const comm::LedgerEntry by_level = Sent(run.ranks[r].forward, comm::LinkClass::kInterNode);
      EXPECT_LE(by_level.messages_sent, 2 * (nodes.num_nodes - 1));
      EXPECT_LE(by_level.messages_sent, direct.messages_sent);
    }
    int64_t direct_bytes = 0, bytes = 0;
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      direct_bytes += Sent(plain.ranks[r].forward, comm::LinkClass::kInterNode).bytes_sent;
      bytes += Sent(run.ranks[r].forward, comm::LinkClass::kInterNode).bytes_sent;
    }
    EXPECT_EQ(bytes, direct_bytes) << Name(c, order);
    EXPECT_EQ(bytes > 0, nodes.num_nodes > 1);
  }
}

// One row per (token, node) between nodes, out and back: the least that any order sends there.
TEST_P(LevelsTest, PerNodeIsAtTheBoundBetweenNodes) {
  const Nodes nodes = std::get<0>(GetParam());
  for (bool whole : {false, true}) {
    for (double factor : {0.6, 2.0}) {
      LayerCase c = Case(whole);
      c.capacity_factor = factor;
      const LayerRun dedup = RunOrder(c, "dedup"), run = RunOrder(c, "per_node(dedup)");
      const std::string what = Name(c, "per_node(dedup)");
      // Sums over a node's ranks are nodes of the tree over all where they are a power of two.
      if (nodes.per_node != 3) ExpectBitwiseEqual(dedup, run, what);
      ExpectLikeDense(c, run, what);
      ExpectLanesAgree(run, what);
      ExpectCounts(run, what);
      if (whole) continue;
      int64_t bytes = 0, bound = 0;
      for (const RankRun& rank : run.ranks) {
        bytes += Sent(rank.forward, comm::LinkClass::kInterNode).bytes_sent;
        if (rank.lane != 0) continue;
        ExchangePlaces places = {.ep_rank = rank.ep_rank, .node_of_rank = {}, .home_ranks = {}};
        for (int r = 0; r < c.ep; ++r) places.node_of_rank.push_back(r / nodes.per_node);
        ASSERT_OK_AND_ASSIGN(const ExchangeBound rows, BoundExchange(rank.decision, places));
        bound += 2 * rows.inter_node_rows;
      }
      EXPECT_EQ(bytes, bound * c.hidden * SizeOf(c.dtype)) << what;
    }
  }
}

// Routing that no average describes: all to one expert, and every token to all of one node.
TEST(PerNodeTest, IsAtTheBoundBetweenNodesForAnyRouting) {
  for (int kind = 0; kind < 3; ++kind) {
    LayerCase c = {.tp = 2, .ep = 4, .experts = 8, .top_k = 4, .tokens = 9, .dtype = DType::kF32};
    c.ranks_per_node = 4;
    c.mode = CapacityMode::kNoDrop;
    if (kind == 1) c.favourite_expert = 6;
    std::vector<RoutingDecision> forced(c.ep);
    if (kind == 2) {
      for (int replica = 0; replica < c.ep; ++replica) {
        RoutingDecision& d = forced[replica];
        d = RunOrder(c, "token_sliced").ranks[replica * c.tp].decision;
        // Experts 4 to 7 are on the second node, two on each of its ranks.
        std::fill(d.kept.begin(), d.kept.end(), 0);
        for (int64_t r = 0; r < d.num_routes(); ++r) {
          d.expert[r] = 4 + static_cast<int32_t>(r % 4);
          d.slot[r] = static_cast<int32_t>(d.kept[d.expert[r]]++);
        }
        d.assigned = d.kept;
        d.capacity = 10;
      }
      c.replay = [&](int replica) { return &forced[replica]; };
    }
    const LayerRun run = RunOrder(c, "per_node(dedup)");
    ExpectBitwiseEqual(RunOrder(c, "dedup"), run, absl::StrCat("kind ", kind));
    ExpectCounts(run, absl::StrCat("kind ", kind));
    int64_t bytes = 0, bound = 0;
    for (const RankRun& rank : run.ranks) {
      bytes += Sent(rank.forward, comm::LinkClass::kInterNode).bytes_sent;
      if (rank.lane != 0) continue;
      ASSERT_OK_AND_ASSIGN(
          const ExchangeBound rows,
          BoundExchange(rank.decision, {.ep_rank = rank.ep_rank, .node_of_rank = {0, 0, 1, 1}, .home_ranks = {}}));
      bound += 2 * rows.inter_node_rows;
    }
    EXPECT_EQ(bytes, bound * c.hidden * SizeOf(c.dtype)) << kind;
    EXPECT_GT(bytes, 0);
  }
}

TEST_P(LevelsTest, GoWithChunksWorkerStreamsAndOtherDtypes) {
  LayerCase c = Case(false);
  c.experts = 3 * c.ep;
  c.activation = ExpertActivation::kSwiGlu;
  for (const char* order : {"fused", "token_sliced"}) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      c.dtype = dtype;
      const LayerRun plain = RunOrder(c, order);
      for (const std::string& name :
           {absl::StrCat("overlapped(two_level(", order, "))"), absl::StrCat("two_level(overlapped(", order, ":3))")}) {
        const LayerRun run = RunOrder(c, name);
        ExpectBitwiseEqual(plain, run, Name(c, name));
        ExpectCounts(run, Name(c, name));
        LayerCase worker = c;
        worker.worker_stream = true;
        ExpectBitwiseEqual(plain, RunOrder(worker, name), Name(c, name) + " on a worker stream");
      }
    }
  }
}

// The same code on the simulated network, which runs its ranks in another order for each seed.
TEST(LevelsOnSimulatedRanksTest, HaveTheBitsOfThreads) {
  for (const char* order : {"two_level(fused)", "two_level(token_sliced)", "two_level(dedup)", "per_node(dedup)"}) {
    for (uint64_t seed : {1, 2, 3}) {
      LayerCase c = {.tp = 2, .ep = 4, .experts = 8, .top_k = 2, .tokens = 5, .dtype = DType::kF32};
      c.ranks_per_node = 4;
      c.seed = seed;
      const LayerRun threads = RunOrder(c, order);
      c.simulated = true;
      const LayerRun simulated = RunOrder(c, order);
      ExpectBitwiseEqual(threads, simulated, Name(c, order));
      ExpectCounts(simulated, Name(c, order));
    }
  }
}

// Zero rows on a rank, one expert for all, nothing at all: peers still take part.
TEST(LevelsWithFewRowsTest, LikeTheOrder) {
  LayerCase c = {.tp = 2, .ep = 4, .experts = 8, .top_k = 2, .dtype = DType::kF32};
  c.ranks_per_node = 4;
  c.mode = CapacityMode::kDropless;
  for (const char* order : {"token_sliced", "dedup"}) {
    c.tokens_of = [](int replica) { return replica % 2 == 0 ? 0 : 3; };
    c.favourite_expert = -1;
    ExpectBitwiseEqual(RunOrder(c, order), RunOrder(c, TwoLevel(order)), "zero rows on ranks");
    c.favourite_expert = 5;
    ExpectBitwiseEqual(RunOrder(c, order), RunOrder(c, TwoLevel(order)), "one expert for all");
    c.tokens_of = [](int) { return 0; };
    ExpectBitwiseEqual(RunOrder(c, order), RunOrder(c, TwoLevel(order)), "nothing");
  }
  c.tokens_of = [](int replica) { return replica % 2 == 0 ? 0 : 3; };
  for (int favourite : {-1, 5}) {
    c.favourite_expert = favourite;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      c.dtype = dtype;
      ExpectBitwiseEqual(RunOrder(c, "dedup"), RunOrder(c, "per_node(dedup)"), "per node");
      c.worker_stream = true;
      ExpectBitwiseEqual(RunOrder(c, "dedup"), RunOrder(c, "per_node(dedup)"), "per node on worker streams");
      c.worker_stream = false;
    }
  }
}

// A sequence-parallel caller.
TEST(LevelsWithSlicedTokensTest, LikeTheOrder) {
  ASSERT_OK_AND_ASSIGN(std::string text, FindOrderText("token_sliced"));
  text = absl::StrReplaceAll(
      text, {{"step { kind: SLICE axis: TP dim: TOKENS }", ""},
             {"step { kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT }", ""},
             {"expert_layout: ANY_LAYOUT", "expert_layout: ANY_LAYOUT input: SLICED_TOKENS output: SLICED_TOKENS"}});
  ASSERT_OK_AND_ASSIGN(const Order order, ParseOrder(text, "sliced"));
  ASSERT_OK_AND_ASSIGN(const Order by_level, InTwoLevels(order));
  ASSERT_OK_AND_ASSIGN(const Order both, InChunks(by_level, 2));
  for (bool whole : {false, true}) {
    LayerCase c = {.tp = 2, .ep = 4, .experts = 8, .top_k = 2, .tokens = 7, .dtype = DType::kF32};
    c.whole = whole;
    c.ranks_per_node = whole ? 2 : 4;
    ASSERT_OK_AND_ASSIGN(const LayerRun plain, RunLayer(c, order));
    for (const Order& rewritten : {by_level, both}) {
      ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, rewritten));
      ExpectBitwiseEqual(plain, run, rewritten.name);
      ExpectCounts(run, rewritten.name);
    }
  }
  ASSERT_OK_AND_ASSIGN(text, FindOrderText("dedup"));
  text = absl::StrReplaceAll(
      text, {{"step { kind: SLICE axis: TP dim: TOKENS }", ""},
             {"step { kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT }", ""},
             {"expert_layout: ANY_LAYOUT", "expert_layout: ANY_LAYOUT input: SLICED_TOKENS output: SLICED_TOKENS"}});
  ASSERT_OK_AND_ASSIGN(const Order dedup, ParseOrder(text, "sliced dedup"));
  ASSERT_OK_AND_ASSIGN(const Order per_node, OncePerNode(dedup));
  for (bool whole : {false, true}) {
    LayerCase c = {.tp = 2, .ep = 4, .experts = 8, .top_k = 3, .tokens = 7, .dtype = DType::kF32};
    c.whole = whole;
    c.recompute = true;
    c.ranks_per_node = whole ? 2 : 4;
    ASSERT_OK_AND_ASSIGN(const LayerRun plain, RunLayer(c, dedup));
    ASSERT_OK_AND_ASSIGN(const LayerRun run, RunLayer(c, per_node));
    ExpectBitwiseEqual(plain, run, "per node");
    ExpectCounts(run, "per node");
  }
}

// E = 1 and T = 1: not a byte and not a call, whatever the order, on the payload's groups and on those beside them.
TEST(GroupsOfOneTest, SendNothingInAnyOrder) {
  std::vector<std::string> orders = OrderNames();
  orders.push_back("per_node(dedup)");
  for (const std::string& name : OrderNames()) {
    orders.push_back(TwoLevel(name));
    if (name != "dedup") orders.push_back(absl::StrCat("overlapped(", name, ":3)"));
  }
  for (const std::string& order : orders) {
    LayerCase c = {.tp = 1, .ep = 1, .dp = 2, .experts = 4, .top_k = 2, .tokens = 5, .dtype = DType::kF32};
    ASSERT_OK_AND_ASSIGN(const Order found, FindOrder(order));
    const bool padded_layout = found.expert_layout != ExpertLayout::kWhole;
    c.whole = !padded_layout;
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, Name(c, order));
    for (const RankRun& rank : run.ranks) {
      for (const comm::LedgerCounts* counts : {&rank.forward, &rank.backward}) {
        EXPECT_EQ(counts->total_collectives(), 0) << order;
        EXPECT_EQ(counts->control_bytes, 0) << order;
      }
      EXPECT_EQ(rank.predicted_forward, OrderTraffic()) << order;
      EXPECT_EQ(rank.predicted_backward, OrderTraffic()) << order;
    }
    ExpectCounts(run, Name(c, order));
  }
}

// ---- What does not fit ----

TEST(ExchangeLevelsTest, AreBlocksOfConsecutiveRanks) {
  const comm::Group ep = {.axis = comm::Axis::kEp, .name = "ep", .ranks = {1, 3, 5, 7, 9, 11}};
  ASSERT_OK_AND_ASSIGN(const comm::Topology blocks, comm::Topology::Blocks(12, 4));
  ASSERT_OK_AND_ASSIGN(const ExchangeLevels levels, LevelsOf(ep, blocks, 7));
  EXPECT_THAT(levels.node.ranks, ElementsAre(5, 7));
  EXPECT_THAT(levels.peers.ranks, ElementsAre(3, 7, 11));
  EXPECT_EQ(levels.node.axis, comm::Axis::kEp);
  EXPECT_EQ(levels.peers.name, "ep.peers");
  ASSERT_OK_AND_ASSIGN(const ExchangeLevels one, LevelsOf(ep, comm::Topology::SingleNode(12), 1));
  EXPECT_EQ(one.node.size(), 6);
  EXPECT_THAT(one.peers.ranks, ElementsAre(1));
  EXPECT_THAT(LevelsOf(ep, blocks, 2), StatusIs(kInvalid, HasSubstr("rank 2 is not in")));
  // Unequal, interleaved, and a node that comes twice.
  ASSERT_OK_AND_ASSIGN(const comm::Topology uneven, comm::Topology::Blocks(12, 8));
  EXPECT_THAT(LevelsOf(ep, uneven, 1), StatusIs(kInvalid, HasSubstr("on nodes 0, 0, 0, 0, 1, 1")));
  EXPECT_THAT(LevelsOf(ep, comm::Topology({0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1}), 1),
              StatusIs(kInvalid, HasSubstr("on nodes 0, 1, 0, 1, 0, 1")));
  EXPECT_THAT(LevelsOf(ep, comm::Topology({0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0}), 1),
              StatusIs(kInvalid, HasSubstr("on nodes 0, 0, 1, 1, 0, 0")));
}

TEST(LevelsRefusalsTest, NamesWhatIsMissing) {
  LayerCase c = {.tp = 1, .ep = 4};
  c.node_of_rank = {0, 1, 0, 1};
  EXPECT_THAT(RunLayer(c, *FindOrder("two_level(reference)")).status(),
              StatusIs(kInvalid, HasSubstr("on nodes 0, 1, 0, 1")));
  EXPECT_OK(RunLayer(c, *FindOrder("reference")));
  c.node_of_rank = {};
  c.ranks_per_node = 2;
  c.level_groups = LayerCase::LevelGroups::kNone;
  EXPECT_THAT(RunLayer(c, *FindOrder("two_level(reference)")).status(),
              StatusIs(kInvalid, HasSubstr("exchanges by level: MoeGroups needs ep_node and ep_peers")));
  c.level_groups = LayerCase::LevelGroups::kNodeTwice;
  c.ep = 8;
  c.experts = 8;
  EXPECT_THAT(RunLayer(c, *FindOrder("two_level(reference)")).status(),
              StatusIs(kInvalid, HasSubstr("EP rank 0 of 8 cannot be rank 0 of 2 on its node and rank 0 of 2")));
}

}  // namespace
}  // namespace evenkeel::moe
