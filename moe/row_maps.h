// The index lists that an order's maps use at one routing: which token a row comes from, which row a route has, how
// rows are permuted. Pure; host memory.
//
//   RowMaps maps = {.sizes = sizes, .ragged = false, .padded = plan};
//   std::vector<int32_t> tokens = maps.TokenOfRow(type, nesting);
#ifndef EVENKEEL_MOE_ROW_MAPS_H_
#define EVENKEEL_MOE_ROW_MAPS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/lane_merge.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_sizes.h"
#include "evenkeel/moe/ragged_plan.h"

namespace evenkeel::moe {

// A value: the plans of one routing, and the sizes they were made for.
struct RowMaps {
  OrderSizes sizes;
  bool ragged = false;
  DispatchPlan padded;
  RaggedSendPlan send;
  std::vector<RaggedReceivePlan> receive;  // by chunk
  bool deduplicated = false;
  DedupSendPlan dedup_send;
  DedupReceivePlan dedup_receive;
  bool once_per_node = false;  // deduplicated also by node
  NodeSendPlan node_send;
  NodeMiddlePlan node_middle;
  std::vector<int32_t> expert_of_route;  // [tokens, k] of all tokens; canonical numerics only
  LaneMerge lane_merge;                  // where sizes.merges_lanes
  // Of ragged orders that exchange by level: rows at this rank half way. [chunks, node of the source, local index of
  // the destination]
  std::vector<int64_t> middle;

  // For each row at the source, in `nesting`, its token (counted from the lane's first where the type is sliced by
  // tokens), -1: empty slot.
  std::vector<int32_t> TokenOfRow(const ValueType& type, const RowNesting& nesting) const;
  // For each route, its row in `nesting`, -1: dropped, or in another lane's slots.
  std::vector<int32_t> RowOfRoute(const ValueType& type, const RowNesting& nesting) const;
  // Each token's rows by expert id, the tokens from `first_token` on; `weights`, by route of all tokens, may be null.
  RowLists RowsByExpert(const ValueType& type, const RowNesting& nesting, int64_t first_token,
                        const float* weights) const;
  // For each row in nesting `to`, its number in nesting `from`. `chunk` as in Action, here and below.
  std::vector<int32_t> Permutation(const ValueType& type, const RowNesting& from, const RowNesting& to,
                                   int chunk) const;
  // For each row of blocks [local index][node], its number in blocks [node][local index]; with `back`, the inverse.
  std::vector<int32_t> Regrouping(const ValueType& type, int chunk, bool back) const;
  // Rows that a ragged exchange of a value of type `before` sends to and gets from each rank of its group.
  struct ExchangeCounts {
    std::vector<int64_t> sent, received;
  };
  ExchangeCounts CountsOf(const ValueType& before, Level level, int chunk) const;
  // Rows of each local expert, for values of that type at the experts.
  std::vector<int64_t> RowsOfExpert(const ValueType& type, int chunk) const;
  // Rows of each token's sums at the source, of deduplicated orders.
  const RowLists& RowsOfToken() const { return once_per_node ? node_send.rows_of_token : dedup_send.rows_of_token; }
  // Rows that each lane has of such a value, where rows belong to lanes.
  const std::vector<int64_t>& RowsOfLane(int chunk) const {
    return deduplicated ? dedup_receive.rows_of_lane : receive[chunk].rows_of_lane;
  }
  // Of grouped rows; empty: 0, 1, 2, .. inside each expert.
  absl::Span<const int64_t> Positions(int chunk) const {
    if (deduplicated) return dedup_receive.canonical_position;
    return ragged ? absl::MakeConstSpan(receive[chunk].canonical_position) : absl::Span<const int64_t>();
  }
  // Positions of one source in an expert's canonical order.
  int64_t PositionsPerSource() const { return sizes.capacity > 0 ? sizes.capacity : kDroplessPositions; }

 private:
  // For each row of a padded value at the source its row in the plan.
  std::vector<int32_t> PlanRows(const ValueType& type, const RowNesting& nesting) const;
  // Rows by destination, by source, and half way, of ragged orders.
  absl::Span<const int64_t> RowsTo(int chunk) const;
  absl::Span<const int64_t> RowsFrom(int chunk) const;
  absl::Span<const int64_t> Middle(int chunk) const;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROW_MAPS_H_
