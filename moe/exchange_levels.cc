#include "evenkeel/moe/exchange_levels.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::moe {
namespace {

// L, or 0 when nodes are not equal blocks.
int RanksPerNode(const std::vector<int>& nodes) {
  const int size = static_cast<int>(nodes.size());
  const int per_node = static_cast<int>(std::count(nodes.begin(), nodes.end(), nodes[0]));
  for (int rank = 0; rank < size; ++rank) {
    const int first = rank - rank % per_node;
    if (nodes[rank] != nodes[first]) return 0;
    if (rank == first && std::find(nodes.begin(), nodes.begin() + first, nodes[first]) != nodes.begin() + first)
      return 0;
  }
  return size % per_node == 0 ? per_node : 0;
}

}  // namespace

absl::StatusOr<ExchangeLevels> LevelsOf(const comm::Group& ep, const comm::Topology& topology, int world_rank) {
  const int me = ep.IndexOf(world_rank);
  if (me < 0) return absl::InvalidArgumentError(absl::StrCat("rank ", world_rank, " is not in the EP group"));
  std::vector<int> nodes;
  for (int rank : ep.ranks) nodes.push_back(topology.node(rank));
  const int per_node = RanksPerNode(nodes);
  if (per_node == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an exchange in two levels needs equally many consecutive ranks of the EP group on each node; they "
        "are on nodes ",
        absl::StrJoin(nodes, ", ")));
  }
  ExchangeLevels levels;
  levels.node.axis = levels.peers.axis = ep.axis;
  levels.node.name = absl::StrCat(ep.name, ".node");
  levels.peers.name = absl::StrCat(ep.name, ".peers");
  for (int rank = 0; rank < ep.size(); ++rank) {
    if (rank / per_node == me / per_node) levels.node.ranks.push_back(ep.ranks[rank]);
    if (rank % per_node == me % per_node) levels.peers.ranks.push_back(ep.ranks[rank]);
  }
  return levels;
}

}  // namespace evenkeel::moe
