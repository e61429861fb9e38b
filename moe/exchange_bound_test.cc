// The bounds against a search over all transfers.
#include "evenkeel/moe/exchange_bound.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <queue>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// The fewest transfers after which all `wanted` ranks have a row that `home` starts with: breadth first over sets of
// ranks. `between` counts transfers between nodes at their minimum.
struct Fewest {
  int total = 0, between = 0;
};
Fewest BruteForce(const std::set<int>& home, const std::set<int>& wanted, const std::vector<int>& node) {
  const int ranks = static_cast<int>(node.size());
  const auto mask_of = [](const std::set<int>& set) {
    int mask = 0;
    for (int rank : set) mask |= 1 << rank;
    return mask;
  };
  const auto shortest = [&](auto weight) {
    std::vector<int> cost(1 << ranks, 1 << 20);
    cost[mask_of(home)] = 0;
    for (int mask = 0; mask < 1 << ranks; ++mask) {  // transfers only add ranks, so masks grow
      for (int from = 0; from < ranks; ++from) {
        for (int to = 0; to < ranks; ++to) {
          if (!(mask >> from & 1) || (mask >> to & 1)) continue;
          cost[mask | 1 << to] = std::min(cost[mask | 1 << to], cost[mask] + weight(from, to));
        }
      }
    }
    int best = 1 << 20;
    for (int mask = 0; mask < 1 << ranks; ++mask) {
      if ((mask & mask_of(wanted)) == mask_of(wanted)) best = std::min(best, cost[mask]);
    }
    return best;
  };
  return {shortest([](int, int) { return 1; }),
          shortest([&](int from, int to) { return node[from] != node[to] ? 1 : 0; })};
}

TEST(ExchangeBoundTest, IsTheBruteForceMinimum) {
  const std::vector<std::vector<int>> places = {{0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 1, 2}, {0, 1, 0, 1}};
  const PhiloxStream stream(PhiloxKey(3));
  uint64_t at = 0;
  for (const std::vector<int>& nodes : places) {
    const int E = static_cast<int>(nodes.size());
    for (int trial = 0; trial < 40; ++trial) {
      RoutingDecision d;
      d.num_tokens = 1;
      d.num_experts = 2 * E;
      d.top_k = std::min(3, 2 * E);
      std::set<int> wanted;
      for (int j = 0; j < d.top_k; ++j) {
        d.expert.push_back(static_cast<int>(stream.Below(at++, 2 * E)));
        d.slot.push_back(stream.Below(at++, 4) == 0 ? -1 : 0);
        if (d.slot.back() >= 0) wanted.insert(d.expert.back() / 2);
      }
      const int rank = static_cast<int>(stream.Below(at++, E));
      ASSERT_OK_AND_ASSIGN(const ExchangeBound bound,
                           BoundExchange(d, {.ep_rank = rank, .node_of_rank = nodes, .home_ranks = {}}));
      const Fewest fewest = BruteForce({rank}, wanted, nodes);
      EXPECT_EQ(bound.total(), fewest.total);
      EXPECT_EQ(bound.inter_node_rows, fewest.between);
    }
  }
}

TEST(ExchangeBoundTest, LanesOfTheSourceAreHome) {
  RoutingDecision d;
  d.num_tokens = 1;
  d.num_experts = 4;
  d.top_k = 3;
  d.expert = {0, 1, 3};
  d.slot = {0, 0, 0};
  ASSERT_OK_AND_ASSIGN(ExchangeBound bound,
                       BoundExchange(d, {.ep_rank = 0, .node_of_rank = {0, 0, 0, 0}, .home_ranks = {0, 1}}));
  EXPECT_EQ(bound.total(), 1);
  EXPECT_THAT(BoundExchange(d, {.ep_rank = 4, .node_of_rank = {0, 0, 0, 0}, .home_ranks = {}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("EP rank 4")));
  EXPECT_THAT(BoundExchange(d, {.ep_rank = 0, .node_of_rank = {0, 0, 0}, .home_ranks = {}}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not divisible")));
}

// ---- TP links ----

// T lanes on E ranks each. Place (lane, rank); TP joins the lanes of a rank, EP the ranks of a lane, or all places of
// rank 0's group and all other ranks where experts are whole.
struct Link {
  int from, to;
  bool is_tp;
};

std::vector<Link> LinksOf(int tp, int ep) {
  std::vector<Link> links;
  const auto place = [&](int lane, int rank) { return rank * tp + lane; };
  for (int rank = 0; rank < ep; ++rank) {
    for (int lane = 0; lane < tp; ++lane) {
      for (int other = 0; other < tp; ++other) {
        if (other != lane) links.push_back({place(lane, rank), place(other, rank), true});
      }
      for (int other = 0; other < ep; ++other) {
        if (other != rank) links.push_back({place(lane, rank), place(lane, other), false});
      }
    }
  }
  return links;
}

// What every place knows: the sums (sets of addends, as bits of a mask over their 2^n - 1 sums) it can form.
using Knowledge = std::vector<uint32_t>;

uint32_t Closed(uint32_t known, int addends) {
  for (bool grown = true; grown;) {
    grown = false;
    for (int a = 1; a < 1 << addends; ++a) {
      for (int b = a + 1; b < 1 << addends; ++b) {
        if (!(known >> a & 1) || !(known >> b & 1) || (a & b) != 0 || (known >> (a | b) & 1)) continue;
        known |= 1u << (a | b);
        grown = true;
      }
    }
  }
  return known;
}

// The cheapest way to make every place of `wanted` know the sum of all addends: uniform-cost search over what all
// places know, where a transfer sends one known sum over one link. `limit` cuts the search: costs above it are not
// looked at.
int Cheapest(const Knowledge& start, const std::vector<int>& wanted, const std::vector<Link>& links, int addends,
             bool ep_first, int limit) {
  constexpr int kEp = 16;  // of an EP transfer, where EP comes first: more than all TP transfers
  // Where EP costs nothing, all that may go over it goes at once: knowing more never hurts.
  const auto spread = [&](Knowledge state) {
    for (bool grown = !ep_first; grown;) {
      grown = false;
      for (const Link& link : links) {
        const uint32_t known = link.is_tp ? state[link.to] : Closed(state[link.to] | state[link.from], addends);
        grown = grown || known != state[link.to];
        state[link.to] = known;
      }
    }
    return state;
  };
  std::map<Knowledge, int> best = {{spread(start), 0}};
  std::priority_queue<std::pair<int, Knowledge>> queue;  // by the negated cost
  queue.push({0, spread(start)});
  while (!queue.empty()) {
    const int cost = -queue.top().first;
    const Knowledge state = queue.top().second;
    queue.pop();
    if (best[state] < cost) continue;
    const auto knows_all = [&](int place) { return (state[place] >> ((1 << addends) - 1) & 1) != 0; };
    if (std::all_of(wanted.begin(), wanted.end(), knows_all)) return cost;
    for (const Link& link : links) {
      const int next_cost = cost + (link.is_tp ? 1 : kEp);
      if (next_cost > limit || (!link.is_tp && !ep_first)) continue;
      for (int sum = 1; sum < 1 << addends; ++sum) {
        if (!(state[link.from] >> sum & 1) || (state[link.to] >> sum & 1)) continue;
        Knowledge next = state;
        next[link.to] = Closed(next[link.to] | 1u << sum, addends);
        next = spread(std::move(next));
        const auto known = best.find(next);
        if (known != best.end() && known->second <= next_cost) continue;
        best[next] = next_cost;
        queue.push({-next_cost, std::move(next)});
      }
    }
  }
  return -1;
}

// One token of rank 0 that goes to `ranks`.
RoutingDecision TokenTo(const std::vector<int>& ranks, int ep) {
  RoutingDecision d;
  d.num_tokens = 1;
  d.num_experts = ep;
  d.top_k = std::max<int>(1, static_cast<int>(ranks.size()));
  for (int rank : ranks) {
    d.expert.push_back(rank);
    d.slot.push_back(0);
  }
  if (ranks.empty()) {
    d.expert.push_back(0);
    d.slot.push_back(-1);
  }
  return d;
}

struct LaneCase {
  int tp, ep;
  std::vector<int> ranks;
  bool sliced_tokens;
};

// The cheapest out and the cheapest back. Out is the same search with the token as the only addend.
int CheapestBothWays(const LaneCase& c, bool ep_first, int limit) {
  const std::vector<Link> links = LinksOf(c.tp, c.ep);
  const auto place = [&](int lane, int rank) { return rank * c.tp + lane; };
  Knowledge token(c.tp * c.ep, 0), addends(c.tp * c.ep, 0);
  std::vector<int> slices, home;
  int count = 0;
  for (int lane = 0; lane < (c.sliced_tokens ? 1 : c.tp); ++lane) {
    token[place(lane, 0)] = 1u << 1;
    home.push_back(place(lane, 0));
  }
  for (int rank : c.ranks) {
    for (int lane = 0; lane < c.tp; ++lane) {
      slices.push_back(place(lane, rank));
      addends[place(lane, rank)] = 1u << (1 << count++);
    }
  }
  const int out = Cheapest(token, slices, links, 1, ep_first, limit);
  const int back = Cheapest(addends, home, links, count, ep_first, limit);
  EXPECT_GE(out, 0);
  EXPECT_GE(back, 0);
  return out + back;
}

TEST(LaneBoundTest, IsTheBruteForceMinimum) {
  std::vector<LaneCase> cases;
  for (bool sliced : {false, true}) {
    for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{0}, {1}, {0, 1}})
      cases.push_back({2, 2, ranks, sliced});
    for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{0}, {1}})
      cases.push_back({3, 2, ranks, sliced});
    cases.push_back({4, 1, {0}, sliced});
    cases.push_back({2, 3, {2}, sliced});
    cases.push_back({1, 3, {0, 1, 2}, sliced});
  }
  for (const LaneCase& c : cases) {
    const std::string what = absl::StrCat("T=", c.tp, " E=", c.ep, " to ", c.ranks.size(), " from ", c.ranks[0],
                                          c.sliced_tokens ? " sliced" : "");
    const std::vector<int> one_node(c.ep, 0);
    const ExchangePlaces places = {.ep_rank = 0, .node_of_rank = one_node, .home_ranks = {}};
    ASSERT_OK_AND_ASSIGN(const LaneBound bound,
                         BoundLanes(TokenTo(c.ranks, c.ep), places, {.tp = c.tp, .sliced_tokens = c.sliced_tokens}));
    EXPECT_EQ(bound.rows, CheapestBothWays(c, /*ep_first=*/false, 7)) << what;
    ASSERT_OK_AND_ASSIGN(const ExchangeBound exchange, BoundExchange(TokenTo(c.ranks, c.ep), places));
    EXPECT_EQ(bound.rows_at_least_exchange + 2 * 16 * exchange.total(), CheapestBothWays(c, /*ep_first=*/true, 200))
        << what;
  }
}

// Two remote ranks: too many states to search both ways at once, so the way back with EP at its least.
TEST(LaneBoundTest, TwoRemoteRanksBack) {
  const std::vector<Link> links = LinksOf(2, 3);
  const Knowledge addends = {0, 0, 1u << 1, 1u << 2, 1u << 4, 1u << 8};
  const int back = Cheapest(addends, {0, 1}, links, 4, /*ep_first=*/true, 2 * 16 + 3);
  EXPECT_EQ(back, 2 * 16 + 3);  // two rows over EP; one over TP at each remote rank, one at home
  const ExchangePlaces places = {.ep_rank = 0, .node_of_rank = {0, 0, 0}, .home_ranks = {}};
  ASSERT_OK_AND_ASSIGN(const LaneBound bound, BoundLanes(TokenTo({1, 2}, 3), places, {.tp = 2}));
  EXPECT_EQ(bound.rows_at_least_exchange, 2 + 3);
}

// Whole experts on the lanes of the source: the sums of m lanes have to reach all T.
TEST(LaneBoundTest, WholeExpertsAtHome) {
  for (int tp : {2, 3, 4}) {
    for (int holders = 1; holders <= std::min(tp, 3); ++holders) {
      std::vector<int> ranks, all, lanes;
      Knowledge addends(tp, 0);
      for (int lane = 0; lane < tp; ++lane) {
        all.push_back(lane);
        if (lane < holders) ranks.push_back(lane);
        if (lane < holders) addends[lane] = 1u << (1 << lane);
      }
      const ExchangePlaces places = {.ep_rank = 0, .node_of_rank = std::vector<int>(tp, 0), .home_ranks = all};
      ASSERT_OK_AND_ASSIGN(const LaneBound bound,
                           BoundLanes(TokenTo(ranks, tp), places, {.tp = tp, .whole_experts = true}));
      EXPECT_EQ(bound.rows, 0);
      EXPECT_EQ(bound.rows_at_least_exchange, Cheapest(addends, all, LinksOf(tp, 1), holders, false, 8))
          << "T=" << tp << " holders " << holders;
    }
  }
}

TEST(LaneBoundTest, DroppedTokensAndSingleLanesNeedNothing) {
  const ExchangePlaces places = {.ep_rank = 0, .node_of_rank = {0, 0}, .home_ranks = {}};
  ASSERT_OK_AND_ASSIGN(LaneBound bound, BoundLanes(TokenTo({}, 2), places, {.tp = 4}));
  EXPECT_EQ(bound.rows + bound.rows_at_least_exchange, 0);
  ASSERT_OK_AND_ASSIGN(bound, BoundLanes(TokenTo({0, 1}, 2), places, {.tp = 1}));
  EXPECT_EQ(bound.rows + bound.rows_at_least_exchange, 0);
  EXPECT_THAT(BoundLanes(TokenTo({0}, 2), places, {.tp = 0}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 lanes")));
}

}  // namespace
}  // namespace evenkeel::moe
