// The two-level form of the collectives over a group that covers several nodes: first or last through the ranks of the
// own node, and between nodes only among ranks with the same local index. Pure: adds phases to a call's plan.
//
// N nodes of L ranks, blocks of B bytes; sent by one rank:
//                      within the node        between nodes
//   all_gather         N (L - 1) B            (N - 1) B          directly: (L - 1) B and (N - 1) L B
//   reduce_scatter     N (L - 1) B            (N - 1) B'         B' = B, or 2 B for 16-bit types (f32 partial sums)
//   all_to_all         N (L - 1) B            (N - 1) L B        in N - 1 messages instead of (N - 1) L
// Results have the bits of the direct form: partial sums within a node are subtrees of the canonical tree where the
// node's ranks are consecutive, as many as a power of two; elsewhere reductions stay direct.
#ifndef EVENKEEL_COMM_TWO_LEVEL_H_
#define EVENKEEL_COMM_TWO_LEVEL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

// A group as a grid of nodes and local indices. Immutable value.
class NodeGrid {
 public:
  // Nothing when the group lies on one node, has one rank on each, or not equally many on all.
  static std::optional<NodeGrid> Create(const Group& group, const Topology& topology);

  int num_nodes() const { return num_nodes_; }
  int per_node() const { return per_node_; }
  int node(int rank) const { return node_[rank]; }
  int local(int rank) const { return local_[rank]; }
  int RankAt(int node, int local) const { return rank_at_[node * per_node_ + local]; }
  // The ranks of each node are a subtree of the canonical tree.
  bool nodes_are_subtrees() const { return nodes_are_subtrees_; }

 private:
  int num_nodes_ = 0;
  int per_node_ = 0;
  std::vector<int> node_, local_, rank_at_;
  bool nodes_are_subtrees_ = false;
};

// All three get their scratch from place.scratch: ResourceExhausted when there is none, InvalidArgument when a sum of
// bytes has no number; the plan is then not to be used.

// Rank r's block of `offsets[r + 1] - offsets[r]` elements lies in `block` there and comes to offsets[r] of `into`
// everywhere. `block` may be exactly its place in `into`.
absl::Status AppendTwoLevelGather(const NodeGrid& grid, const std::byte* block, std::byte* into,
                                  const std::vector<int64_t>& offsets, int64_t element_bytes, Place place,
                                  CallPlan* plan);

// Block r of every rank's `from` is reduced into `into` of rank r. Needs nodes_are_subtrees().
absl::Status AppendTwoLevelReduce(const NodeGrid& grid, const std::byte* from, std::byte* into,
                                  const std::vector<int64_t>& offsets, int64_t element_bytes, Place place,
                                  CallPlan* plan);

// count(i, j) elements go from rank i to rank j, blocks back to back on both sides.
absl::Status AppendTwoLevelExchange(const NodeGrid& grid, const std::byte* from, std::byte* into,
                                    const std::function<int64_t(int, int)>& count, int64_t element_bytes, Place place,
                                    CallPlan* plan);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TWO_LEVEL_H_
