#include "evenkeel/comm/two_level.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/statusor.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {
namespace {

absl::StatusOr<std::byte*> NewScratch(int64_t bytes, Place place, CallPlan* plan) {
  return AddScratch(bytes, "the two-level form", place, plan);
}

// Steps that follow the last phase need no peers.
void AppendLocalSteps(std::vector<LocalStep> steps, Place place, CallPlan* plan) {
  PhasePlan phase = EmptyPhase(place.size);
  phase.before = std::move(steps);
  phase.is_local = true;
  plan->phases.push_back(std::move(phase));
}

}  // namespace

std::optional<NodeGrid> NodeGrid::Create(const Group& group, const Topology& topology) {
  std::map<int, std::vector<int>> members;  // by node, in group order
  for (int r = 0; r < group.size(); ++r) members[topology.node(group.ranks[r])].push_back(r);
  NodeGrid grid;
  grid.num_nodes_ = static_cast<int>(members.size());
  grid.per_node_ = static_cast<int>(members.begin()->second.size());
  if (grid.num_nodes_ == 1 || grid.per_node_ == 1) return std::nullopt;
  // Nodes in the order of their first rank, so that consecutive nodes stay consecutive.
  std::vector<std::vector<int>> nodes;
  for (const auto& [node, ranks] : members) {
    if (static_cast<int>(ranks.size()) != grid.per_node_) return std::nullopt;
    nodes.push_back(ranks);
  }
  std::sort(nodes.begin(), nodes.end());
  grid.node_.resize(group.size());
  grid.local_.resize(group.size());
  grid.nodes_are_subtrees_ = (grid.per_node_ & (grid.per_node_ - 1)) == 0;
  for (int node = 0; node < grid.num_nodes_; ++node) {
    for (int local = 0; local < grid.per_node_; ++local) {
      const int rank = nodes[node][local];
      grid.node_[rank] = node;
      grid.local_[rank] = local;
      grid.rank_at_.push_back(rank);
      grid.nodes_are_subtrees_ = grid.nodes_are_subtrees_ && rank == node * grid.per_node_ + local;
    }
  }
  return grid;
}

absl::Status AppendTwoLevelGather(const NodeGrid& grid, const std::byte* block, std::byte* into,
                                  const std::vector<int64_t>& offsets, int64_t element_bytes, Place place,
                                  CallPlan* plan) {
  const int node = grid.node(place.rank);
  const int local = grid.local(place.rank);
  const auto bytes_of = [&](int rank) { return (offsets[rank + 1] - offsets[rank]) * element_bytes; };
  const auto place_of = [&](int rank) { return into + offsets[rank] * element_bytes; };
  const auto bytes_of_column = [&](int column) {
    int64_t bytes = 0;
    for (int n = 0; n < grid.num_nodes(); ++n) bytes += bytes_of(grid.RankAt(n, column));
    return bytes;
  };

  // Between nodes: the own block to the ranks with the same local index.
  PhasePlan between = EmptyPhase(place.size);
  between.sends[place.rank] = {block, bytes_of(place.rank)};
  between.receives[place.rank] = {place_of(place.rank), bytes_of(place.rank)};
  for (int n = 0; n < grid.num_nodes(); ++n) {
    const int peer = grid.RankAt(n, local);
    if (n == node) continue;
    between.sends[peer] = {block, bytes_of(place.rank)};
    between.receives[peer] = {place_of(peer), bytes_of(peer)};
  }
  plan->phases.push_back(std::move(between));

  // Within the node: the collected column of this local index to the others.
  PhasePlan within = EmptyPhase(place.size);
  EK_ASSIGN_OR_RETURN(std::byte* const column, NewScratch(bytes_of_column(local), place, plan));
  int64_t at = 0;
  for (int n = 0; n < grid.num_nodes(); ++n) {
    const int rank = grid.RankAt(n, local);
    AddCopy(column + at, place_of(rank), bytes_of(rank), &within.before);
    at += bytes_of(rank);
  }
  std::vector<LocalStep> unpack;
  for (int l = 0; l < grid.per_node(); ++l) {
    if (l == local) continue;
    const int peer = grid.RankAt(node, l);
    EK_ASSIGN_OR_RETURN(std::byte* const arrived, NewScratch(bytes_of_column(l), place, plan));
    within.sends[peer] = {column, at};
    within.receives[peer] = {arrived, bytes_of_column(l)};
    int64_t from = 0;
    for (int n = 0; n < grid.num_nodes(); ++n) {
      const int rank = grid.RankAt(n, l);
      AddCopy(place_of(rank), arrived + from, bytes_of(rank), &unpack);
      from += bytes_of(rank);
    }
  }
  plan->phases.push_back(std::move(within));
  AppendLocalSteps(std::move(unpack), place, plan);
  return absl::OkStatus();
}

absl::Status AppendTwoLevelReduce(const NodeGrid& grid, const std::byte* from, std::byte* into,
                                  const std::vector<int64_t>& offsets, int64_t element_bytes, Place place,
                                  CallPlan* plan) {
  const int node = grid.node(place.rank);
  const int local = grid.local(place.rank);
  const Reduction reduction{static_cast<DType>(plan->dtype), static_cast<ReduceOp>(plan->reduce_op)};
  const int64_t partial_bytes = AccumulatorBytes(reduction.dtype);
  const auto elements_of = [&](int rank) { return offsets[rank + 1] - offsets[rank]; };
  const auto elements_of_column = [&](int column) {
    int64_t elements = 0;
    for (int n = 0; n < grid.num_nodes(); ++n) elements += elements_of(grid.RankAt(n, column));
    return elements;
  };

  // Within the node: to each local index the blocks of its column.
  PhasePlan within = EmptyPhase(place.size);
  std::vector<const std::byte*> columns(grid.per_node());  // what this rank holds of column `local`, by source
  for (int l = 0; l < grid.per_node(); ++l) {
    const int peer = grid.RankAt(node, l);
    EK_ASSIGN_OR_RETURN(std::byte* const packed, NewScratch(elements_of_column(l) * element_bytes, place, plan));
    int64_t at = 0;
    for (int n = 0; n < grid.num_nodes(); ++n) {
      const int rank = grid.RankAt(n, l);
      AddCopy(packed + at, from + offsets[rank] * element_bytes, elements_of(rank) * element_bytes, &within.before);
      at += elements_of(rank) * element_bytes;
    }
    if (l == local) {
      columns[l] = packed;
      continue;
    }
    within.sends[peer] = {packed, at};
    EK_ASSIGN_OR_RETURN(std::byte* const arrived, NewScratch(elements_of_column(local) * element_bytes, place, plan));
    within.receives[peer] = {arrived, elements_of_column(local) * element_bytes};
    columns[l] = arrived;
  }
  plan->phases.push_back(std::move(within));

  // Between nodes: the node's partial sum of each block to where the block belongs.
  PhasePlan between = EmptyPhase(place.size);
  std::vector<const void*> sums(grid.num_nodes());
  int64_t at = 0;
  for (int n = 0; n < grid.num_nodes(); ++n) {
    const int peer = grid.RankAt(n, local);
    EK_ASSIGN_OR_RETURN(std::byte* const partial, NewScratch(elements_of(peer) * partial_bytes, place, plan));
    LocalStep reduce{.to = partial,
                     .elements = elements_of(peer),
                     .kind = LocalStep::Kind::kReduceToPartial,
                     .reduction = reduction};
    for (int l = 0; l < grid.per_node(); ++l) reduce.sources.push_back(columns[l] + at * element_bytes);
    between.before.push_back(std::move(reduce));
    at += elements_of(peer);
    sums[n] = partial;
    if (n == node) continue;
    between.sends[peer] = {partial, elements_of(peer) * partial_bytes};
    EK_ASSIGN_OR_RETURN(std::byte* const arrived, NewScratch(elements_of(place.rank) * partial_bytes, place, plan));
    between.receives[peer] = {arrived, elements_of(place.rank) * partial_bytes};
    sums[n] = arrived;
  }
  plan->phases.push_back(std::move(between));
  AppendLocalSteps({{.to = into,
                     .elements = elements_of(place.rank),
                     .sources = std::move(sums),
                     .kind = LocalStep::Kind::kReducePartials,
                     .reduction = reduction}},
                   place, plan);
  return absl::OkStatus();
}

absl::Status AppendTwoLevelExchange(const NodeGrid& grid, const std::byte* from, std::byte* into,
                                    const std::function<int64_t(int, int)>& count, int64_t element_bytes, Place place,
                                    CallPlan* plan) {
  const int self = place.rank;
  const int node = grid.node(self);
  const int local = grid.local(self);
  const int nodes = grid.num_nodes();
  const int locals = grid.per_node();
  // Every block that passes here is part of a sum of all ranks' rows: when that has a number, so has every part.
  int64_t all_bytes = 0;
  for (int from_rank = 0; from_rank < place.size; ++from_rank) {
    for (int to = 0; to < place.size; ++to) {
      EK_ASSIGN_OR_RETURN(const int64_t block, CheckedMul(count(from_rank, to), element_bytes));
      EK_ASSIGN_OR_RETURN(all_bytes, CheckedAdd(all_bytes, block));
    }
  }
  std::vector<int64_t> send_at(place.size + 1, 0), recv_at(place.size + 1, 0);  // bytes
  for (int r = 0; r < place.size; ++r) {
    send_at[r + 1] = send_at[r] + count(self, r) * element_bytes;
    recv_at[r + 1] = recv_at[r] + count(r, self) * element_bytes;
  }
  const auto bytes = [&](int a, int b) { return count(a, b) * element_bytes; };

  // Within the node: to each local index what goes to its column.
  PhasePlan within = EmptyPhase(place.size);
  std::vector<const std::byte*> columns(locals);  // what goes to this rank's column, by local source
  for (int l = 0; l < locals; ++l) {
    const int peer = grid.RankAt(node, l);
    int64_t packed_bytes = 0;
    int64_t arrived_bytes = 0;
    for (int n = 0; n < nodes; ++n) {
      packed_bytes += bytes(self, grid.RankAt(n, l));
      arrived_bytes += bytes(peer, grid.RankAt(n, local));
    }
    EK_ASSIGN_OR_RETURN(std::byte* const packed, NewScratch(packed_bytes, place, plan));
    int64_t at = 0;
    for (int n = 0; n < nodes; ++n) {
      const int to = grid.RankAt(n, l);
      AddCopy(packed + at, from + send_at[to], bytes(self, to), &within.before);
      at += bytes(self, to);
    }
    columns[l] = packed;
    if (l == local) continue;
    within.sends[peer] = {packed, packed_bytes};
    EK_ASSIGN_OR_RETURN(std::byte* const arrived, NewScratch(arrived_bytes, place, plan));
    within.receives[peer] = {arrived, arrived_bytes};
    columns[l] = arrived;
  }
  plan->phases.push_back(std::move(within));

  // Between nodes: what all ranks of this node send to one rank, in one message.
  PhasePlan between = EmptyPhase(place.size);
  std::vector<LocalStep> unpack;
  std::vector<int64_t> column_at(locals, 0);
  for (int n = 0; n < nodes; ++n) {
    const int peer = grid.RankAt(n, local);
    int64_t outgoing = 0;
    int64_t incoming = 0;
    for (int l = 0; l < locals; ++l) {
      outgoing += bytes(grid.RankAt(node, l), peer);
      incoming += bytes(grid.RankAt(n, l), self);
    }
    EK_ASSIGN_OR_RETURN(std::byte* const packed, NewScratch(outgoing, place, plan));
    int64_t at = 0;
    for (int l = 0; l < locals; ++l) {
      const int64_t part = bytes(grid.RankAt(node, l), peer);
      AddCopy(packed + at, columns[l] + column_at[l], part, &between.before);
      column_at[l] += part;
      at += part;
    }
    const std::byte* arrived = packed;
    if (n != node) {
      EK_ASSIGN_OR_RETURN(std::byte* const received, NewScratch(incoming, place, plan));
      between.sends[peer] = {packed, outgoing};
      between.receives[peer] = {received, incoming};
      arrived = received;
    }
    int64_t read = 0;
    for (int l = 0; l < locals; ++l) {
      const int source = grid.RankAt(n, l);
      AddCopy(into + recv_at[source], arrived + read, bytes(source, self), &unpack);
      read += bytes(source, self);
    }
  }
  plan->phases.push_back(std::move(between));
  AppendLocalSteps(std::move(unpack), place, plan);
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
