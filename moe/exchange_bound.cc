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

// Distinct EP ranks that hold kept experts of one token, but for those that have the token.
std::vector<int> RemoteDestinations(const RoutingDecision& d, int64_t token, int64_t experts_per_rank,
                                    const std::vector<int>& home) {
  std::vector<int> ranks;
  for (int64_t route = token * d.top_k; route < (token + 1) * d.top_k; ++route) {
    if (d.slot[route] < 0) continue;
    const int rank = static_cast<int>(d.expert[route] / experts_per_rank);
    if (std::find(home.begin(), home.end(), rank) == home.end()) ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

}  // namespace

absl::StatusOr<ExchangeBound> BoundExchange(const RoutingDecision& decision, const ExchangePlaces& places) {
  EK_RETURN_IF_ERROR(CheckPlaces(decision, places));
  std::vector<int> home = places.home_ranks;
  if (home.empty()) home.push_back(places.ep_rank);
  std::vector<int> home_nodes;
  for (int rank : home) home_nodes.push_back(places.node_of_rank[rank]);
  const int64_t experts_per_rank = decision.num_experts / static_cast<int64_t>(places.node_of_rank.size());
  ExchangeBound bound;
  for (int64_t token = 0; token < decision.num_tokens; ++token) {
    std::vector<int> remote_nodes;
    for (int rank : RemoteDestinations(decision, token, experts_per_rank, home)) {
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

}  // namespace evenkeel::moe
