// The two groups over which an exchange in two levels goes, from where the ranks of an EP group sit.
//
//   EK_ASSIGN_OR_RETURN(ExchangeLevels levels, LevelsOf(mesh.GroupOf(Axis::kEp, rank), backend.topology(), rank));
//   EK_ASSIGN_OR_RETURN(auto node, backend.CreateGroup(levels.node));      // all ranks, node then peers
//   EK_ASSIGN_OR_RETURN(auto peers, backend.CreateGroup(levels.peers));
#ifndef EVENKEEL_MOE_EXCHANGE_LEVELS_H_
#define EVENKEEL_MOE_EXCHANGE_LEVELS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::moe {

// A value. Both groups keep the axis of the EP group, so that their bytes are booked with its.
struct ExchangeLevels {
  comm::Group node;   // "ep.node": the L ranks of the EP group on this rank's node
  comm::Group peers;  // "ep.peers": those with its local index, one on each of the N nodes
};

// The levels of `world_rank`, a member of `ep`. One of them has one rank where the group is on one node, or has one
// rank on each. InvalidArgument naming the nodes when the group is not N blocks of L consecutive members, each on a
// node of its own.
absl::StatusOr<ExchangeLevels> LevelsOf(const comm::Group& ep, const comm::Topology& topology, int world_rank);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXCHANGE_LEVELS_H_
