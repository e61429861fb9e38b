#include "evenkeel/moe/exchange_bound.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

absl::Status CheckPlaces(const RoutingDecision& decision, const ExchangePlaces& places) {
  const int ep_size = static_cast<int>(places.node_of_rank.size());
  if (ep_size < 1 || decision.num_experts % ep_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(decision.num_experts, " experts are not divisible by ep ", ep_size));
  }
  std::vector<int> ranks = places.home_ranks;
  ranks.push_back(places.ep_rank);
  for (int rank : ranks) {
    if (rank >= 0 && rank < ep_size) continue;
    return absl::InvalidArgumentError(absl::StrCat("EP rank ", rank, " is not one of ", ep_size));
  }
  return absl::OkStatus();
}

// Distinct EP ranks that hold kept experts of one token: those that have the token, and the others.
struct Destinations {
  std::vector<int> home, remote;
};

Destinations DestinationsOf(const RoutingDecision& d, int64_t token, int64_t experts_per_rank,
                            const std::vector<int>& home) {
  std::vector<int> ranks;
  for (int64_t route = token * d.top_k; route < (token + 1) * d.top_k; ++route) {
    if (d.slot[route] >= 0) ranks.push_back(static_cast<int>(d.expert[route] / experts_per_rank));
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  Destinations destinations;
  for (int rank : ranks) {
    const bool at_home = std::find(home.begin(), home.end(), rank) != home.end();
    (at_home ? destinations.home : destinations.remote).push_back(rank);
  }
  return destinations;
}

std::vector<int> HomeOf(const ExchangePlaces& places) {
  return places.home_ranks.empty() ? std::vector<int>{places.ep_rank} : places.home_ranks;
}

// One token of a source with T lanes.
LaneBound BoundToken(const Destinations& to, const LanePlaces& lanes) {
  const int64_t others = lanes.tp - 1, remote = static_cast<int64_t>(to.remote.size());
  const int64_t home = static_cast<int64_t>(to.home.size());
  if (home + remote == 0) return {};
  if (lanes.whole_experts) {
    if (lanes.sliced_tokens) return {};
    return {.rows = 0, .rows_at_least_exchange = std::max<int64_t>(home, 1) - 1 + others};
  }
  const int64_t at_home = home > 0 ? others : 0;
  if (lanes.sliced_tokens) {
    return {.rows = 2 * others, .rows_at_least_exchange = 2 * (others * remote + at_home)};
  }
  return {.rows = 2 * others, .rows_at_least_exchange = 2 * others * remote + others + at_home};
}

}  // namespace

absl::StatusOr<ExchangeBound> BoundExchange(const RoutingDecision& decision, const ExchangePlaces& places) {
  EK_RETURN_IF_ERROR(CheckPlaces(decision, places));
  const std::vector<int> home = HomeOf(places);
  std::vector<int> home_nodes;
  for (int rank : home) home_nodes.push_back(places.node_of_rank[rank]);
  const int64_t experts_per_rank = decision.num_experts / static_cast<int64_t>(places.node_of_rank.size());
  ExchangeBound bound;
  for (int64_t token = 0; token < decision.num_tokens; ++token) {
    std::vector<int> remote_nodes;
    for (int rank : DestinationsOf(decision, token, experts_per_rank, home).remote) {
      const int node = places.node_of_rank[rank];
      const bool at_home = std::find(home_nodes.begin(), home_nodes.end(), node) != home_nodes.end();
      const bool reached = std::find(remote_nodes.begin(), remote_nodes.end(), node) != remote_nodes.end();
      if (at_home || reached) {
        ++bound.intra_node_rows;
      } else {
        ++bound.inter_node_rows;
        remote_nodes.push_back(node);
      }
    }
  }
  return bound;
}

absl::StatusOr<LaneBound> BoundLanes(const RoutingDecision& decision, const ExchangePlaces& places,
                                     const LanePlaces& lanes) {
  EK_RETURN_IF_ERROR(CheckPlaces(decision, places));
  if (lanes.tp < 1) return absl::InvalidArgumentError(absl::StrCat("no TP group of ", lanes.tp, " lanes"));
  const std::vector<int> home = HomeOf(places);
  const int64_t experts_per_rank = decision.num_experts / static_cast<int64_t>(places.node_of_rank.size());
  LaneBound bound;
  for (int64_t token = 0; token < decision.num_tokens; ++token) {
    const LaneBound one = BoundToken(DestinationsOf(decision, token, experts_per_rank, home), lanes);
    bound.rows += one.rows;
    bound.rows_at_least_exchange += one.rows_at_least_exchange;
  }
  return bound;
}

}  // namespace evenkeel::moe
