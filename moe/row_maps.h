// The index lists that an order's maps use at one routing: which token a row comes from, which row a route has, how
// rows are permuted. Pure; host memory.
//
//   RowMaps maps = {.sizes = sizes, .ragged = false, .padded = plan};
//   std::vector<int32_t> tokens = maps.TokenOfRow(type, nesting);
#ifndef EVENKEEL_MOE_ROW_MAPS_H_
#define EVENKEEL_MOE_ROW_MAPS_H_

#include <cstdint>
#include <vector>

#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/ragged_plan.h"

namespace evenkeel::moe {

// A value: the plans of one routing, and the sizes they were made for.
struct RowMaps {
  OrderSizes sizes;
  bool ragged = false;
  DispatchPlan padded;
  RaggedSendPlan send;
  RaggedReceivePlan receive;
  bool deduplicated = false;
  DedupSendPlan dedup_send;
  DedupReceivePlan dedup_receive;
  std::vector<int32_t> expert_of_route;  // [tokens, k] of all tokens; canonical numerics only

  // For each row at the source, in `nesting`, its token (counted from the lane's first where the type is sliced by
  // tokens), -1: empty slot.
  std::vector<int32_t> TokenOfRow(const ValueType& type, const RowNesting& nesting) const;
  // For each route, its row in `nesting`, -1: dropped, or in another lane's slots.
  std::vector<int32_t> RowOfRoute(const ValueType& type, const RowNesting& nesting) const;
  // Each token's rows by expert id, the tokens from `first_token` on; `weights`, by route of all tokens, may be null.
  RowLists RowsByExpert(const ValueType& type, const RowNesting& nesting, int64_t first_token,
                        const float* weights) const;
  // For each row in nesting `to`, its number in nesting `from`.
  std::vector<int32_t> Permutation(const ValueType& type, const RowNesting& from, const RowNesting& to) const;
  // Rows of each local expert, for values of that type at the experts.
  std::vector<int64_t> RowsOfExpert(const ValueType& type) const;
  // Of grouped rows; empty: 0, 1, 2, .. inside each expert.
  const std::vector<int64_t>& Positions() const {
    return deduplicated ? dedup_receive.canonical_position : receive.canonical_position;
  }
  // Positions of one source in an expert's canonical order.
  int64_t PositionsPerSource() const { return sizes.capacity > 0 ? sizes.capacity : kDroplessPositions; }

 private:
  // For each row of a padded value at the source its row in the plan.
  std::vector<int32_t> PlanRows(const ValueType& type, const RowNesting& nesting) const;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROW_MAPS_H_
