// Row maps between tokens and the slots of a padded dispatch buffer [e, c, h].
//
// Pure: made from a RoutingDecision alone, without ranks, streams or devices, so it is equal on every lane. Memory is
// linear in s * k + e * c; there is no [s, e, c] anything. The maps feed runtime/ops/rows.h as they are:
//
//   dispatch            GatherRows(x, plan.token_of_row) -> [e * c, h]           empty slots are zero rows
//   combine             CombineRows(rows, plan.row_of_route, weight) -> [s, h]
//   adjoint of dispatch GatherSumRows(drows, plan.row_of_route) -> dx
//   adjoint of combine  CombineRowsBackward(rows, plan.row_of_route, weight, dy) -> drows, dweight
//
// The ragged forms (own tokens of a lane, real rows only) are in ragged_plan.h.
#ifndef EVENKEEL_MOE_DISPATCH_PLAN_H_
#define EVENKEEL_MOE_DISPATCH_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// A value. Row of (expert, slot) = expert * capacity + slot. Row numbers are i32 (fewer than 2^31 rows); everything
// that is computed from them (offsets, bytes) is 64-bit.
struct DispatchPlan {
  int64_t num_tokens = 0;   // s
  int32_t num_experts = 0;  // e
  int32_t top_k = 1;        // k
  int64_t capacity = 0;     // c

  std::vector<int32_t> row_of_route;  // [s, k] -> row in [e * c], -1: dropped
  std::vector<int32_t> token_of_row;  // [e * c] -> token, -1: empty slot
  std::vector<int32_t> route_of_row;  // [e * c] -> token * k + choice, -1: empty slot

  int64_t num_rows() const { return num_experts * capacity; }
};

// The plan of a decision with a capacity. InvalidArgument when the decision is dropless (it has no padded form), has
// inconsistent extents, a slot outside its block or a slot taken twice, or when e * c or s * k is 2^31 or more.
absl::StatusOr<DispatchPlan> BuildDispatchPlan(const RoutingDecision& decision);

// Every kept route has exactly one row and every row at most one route, both ways round, and the number of kept routes
// is the decision's: Internal naming the first break otherwise. O(s * k + e * c).
absl::Status CheckConservation(const DispatchPlan& plan, const RoutingDecision& decision);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_DISPATCH_PLAN_H_
