#include "evenkeel/moe/order_rewrites.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

enum class Direction : uint8_t { kNone, kOut, kBack };

// Which way the exchange at each step goes, in whatever layout it runs.
absl::StatusOr<std::vector<Direction>> Directions(const Order& order) {
  std::vector<Direction> directions(order.steps.size(), Direction::kNone);
  for (ExpertLayout layout : {ExpertLayout::kTensorParallel, ExpertLayout::kWhole}) {
    if (order.expert_layout != ExpertLayout::kAny && order.expert_layout != layout) continue;
    EK_ASSIGN_OR_RETURN(const TypedOrder typed, CheckOrder(order, layout));
    for (const TypedStep& step : typed.forward) {
      if (!IsExchange(step.step.kind)) continue;
      directions[step.origin - 1] = step.before.ep.dim == Dim::kSources ? Direction::kOut : Direction::kBack;
    }
  }
  return directions;
}

}  // namespace

absl::StatusOr<Order> InChunks(Order order, int chunks) {
  if (chunks < 1 || chunks > kMaxOrderChunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", order.name, "': the number of chunks must be 1 to ", kMaxOrderChunks));
  }
  order.chunks = chunks;
  order.note = absl::StrCat(order.name, " in ", chunks, " chunks of experts, exchanges beside them");
  EK_RETURN_IF_ERROR(CheckOrder(order).status());
  return order;
}

absl::StatusOr<Order> InTwoLevels(const Order& order) {
  EK_ASSIGN_OR_RETURN(const std::vector<Direction> directions, Directions(order));
  Order split = order;
  split.note = absl::StrCat(order.name, " with exchanges between nodes among peers, then inside nodes");
  split.steps.clear();
  for (size_t i = 0; i < order.steps.size(); ++i) {
    Step step = order.steps[i];
    if (step.level != Level::kAll) {
      return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' exchanges by level already"));
    }
    if (directions[i] == Direction::kNone) {
      split.steps.push_back(step);
      continue;
    }
    const bool out = directions[i] == Direction::kOut;
    for (Level level : {out ? Level::kPeers : Level::kNode, out ? Level::kNode : Level::kPeers}) {
      step.level = level;
      split.steps.push_back(step);
    }
  }
  if (split.steps.size() == order.steps.size()) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' has no exchange to split"));
  }
  EK_RETURN_IF_ERROR(CheckOrder(split).status());
  return split;
}

absl::StatusOr<Order> OncePerNode(const Order& order) {
  EK_ASSIGN_OR_RETURN(const Order by_level, InTwoLevels(order));
  Order once = order;
  once.note = absl::StrCat(order.name, " with a row per token and node between nodes, expanded and summed half way");
  once.steps.clear();
  bool dispatched = false;
  for (Step step : by_level.steps) {
    if (step.kind == StepKind::kDispatch && step.dim == Dim::kDestinations) {
      step.dim = Dim::kNodes;
      dispatched = true;
    }
    Step map = {.kind = StepKind::kFold, .when = step.when, .line = step.line};
    const bool outward = std::none_of(once.steps.begin(), once.steps.end(),
                                      [](const Step& before) { return before.kind == StepKind::kExperts; });
    if (step.level == Level::kPeers && !outward) once.steps.push_back(map);
    once.steps.push_back(step);
    map.kind = StepKind::kExpand;
    if (step.level == Level::kPeers && outward) once.steps.push_back(map);
  }
  if (!dispatched) {
    return absl::InvalidArgumentError(
        absl::StrCat("order '", order.name, "' does not dispatch destinations, so none share a row"));
  }
  EK_RETURN_IF_ERROR(CheckOrder(once).status());
  return once;
}

}  // namespace evenkeel::moe
