#include "evenkeel/moe/dispatch_plan.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

absl::Status CheckExtents(const RoutingDecision& decision) {
  if (decision.dropless) {
    return absl::InvalidArgumentError(
        "a dropless decision has no capacity, so no padded plan; use a ragged order, or capacity mode no-drop");
  }
  if (decision.num_tokens < 0 || decision.num_experts < 1 || decision.top_k < 1 || decision.capacity < 0) {
    return absl::InvalidArgumentError(absl::StrCat("no plan for ", decision.num_tokens, " tokens, k ", decision.top_k,
                                                   ", ", decision.num_experts, " experts, capacity ",
                                                   decision.capacity));
  }
  EK_ASSIGN_OR_RETURN(const int64_t rows, CheckedMul(decision.num_experts, decision.capacity));
  EK_ASSIGN_OR_RETURN(const int64_t routes, CheckedMul(decision.num_tokens, decision.top_k));
  if (rows > kMaxRows || routes > kMaxRows) {
    return absl::InvalidArgumentError(absl::StrCat("a plan has at most 2^31 - 1 rows and routes, got ", rows, " rows (",
                                                   decision.num_experts, " experts x capacity ", decision.capacity,
                                                   ") and ", routes, " routes"));
  }
  if (static_cast<int64_t>(decision.expert.size()) != routes || static_cast<int64_t>(decision.slot.size()) != routes) {
    return absl::InvalidArgumentError(absl::StrCat("the decision says ", routes, " routes but holds ",
                                                   decision.expert.size(), " experts and ", decision.slot.size(),
                                                   " slots"));
  }
  return absl::OkStatus();
}

absl::Status Misplaced(int64_t route, int32_t expert, int32_t slot, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("route ", route, " (expert ", expert, ", slot ", slot, "): ", what));
}

}  // namespace

absl::StatusOr<DispatchPlan> BuildDispatchPlan(const RoutingDecision& decision) {
  EK_RETURN_IF_ERROR(CheckExtents(decision));
  DispatchPlan plan{.num_tokens = decision.num_tokens,
                    .num_experts = decision.num_experts,
                    .top_k = decision.top_k,
                    .capacity = decision.capacity,
                    .row_of_route = std::vector<int32_t>(decision.num_routes(), -1),
                    .token_of_row = std::vector<int32_t>(decision.num_experts * decision.capacity, -1),
                    .route_of_row = std::vector<int32_t>(decision.num_experts * decision.capacity, -1)};
  for (int64_t r = 0; r < decision.num_routes(); ++r) {
    const int32_t expert = decision.expert[r];
    const int32_t slot = decision.slot[r];
    if (slot == -1) continue;
    if (expert < 0 || expert >= decision.num_experts || slot < 0 || slot >= decision.capacity) {
      return Misplaced(r, expert, slot, absl::StrCat("outside [", decision.num_experts, ", ", decision.capacity, "]"));
    }
    const int64_t row = expert * decision.capacity + slot;
    if (plan.route_of_row[row] != -1) {
      return Misplaced(r, expert, slot, absl::StrCat("the slot is taken by route ", plan.route_of_row[row]));
    }
    plan.row_of_route[r] = static_cast<int32_t>(row);
    plan.route_of_row[row] = static_cast<int32_t>(r);
    plan.token_of_row[row] = static_cast<int32_t>(r / decision.top_k);
  }
  return plan;
}

absl::Status CheckConservation(const DispatchPlan& plan, const RoutingDecision& decision) {
  int64_t routes_with_row = 0;
  for (int64_t r = 0; r < static_cast<int64_t>(plan.row_of_route.size()); ++r) {
    const int32_t row = plan.row_of_route[r];
    if (row == -1) continue;
    ++routes_with_row;
    if (row < 0 || row >= plan.num_rows() || plan.route_of_row[row] != r || plan.token_of_row[row] != r / plan.top_k) {
      return absl::InternalError(absl::StrCat("route ", r, " points to row ", row, ", which does not point back"));
    }
  }
  int64_t rows_with_route = 0;
  for (const int32_t route : plan.route_of_row) rows_with_route += route != -1 ? 1 : 0;
  if (routes_with_row != rows_with_route || routes_with_row != decision.num_kept()) {
    return absl::InternalError(absl::StrCat("tokens are lost or doubled: ", routes_with_row, " routes have a row, ",
                                            rows_with_route, " rows have a route, ", decision.num_kept(),
                                            " routes were kept"));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::moe
