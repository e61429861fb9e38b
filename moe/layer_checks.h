// What a layer's configuration, groups and order must agree on. Internal to the layer.
#ifndef EVENKEEL_MOE_LAYER_CHECKS_H_
#define EVENKEEL_MOE_LAYER_CHECKS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// The sizes of a rank's groups.
struct GroupSizes {
  int tp = 1;
  int ep = 1;
  int expert_tp = 1;
};

// The layout that groups and order agree on. InvalidArgument when the expert TP size is neither 1 nor T.
absl::StatusOr<ExpertLayout> LayoutOf(const Order& order, const GroupSizes& groups);

// InvalidArgument with the numbers when sizes do not divide.
absl::Status CheckConfig(const MoeConfig& config, const GroupSizes& groups);

// The order that canonical numerics run for `order`. One that folds a token's experts while lanes still hold addends
// (dedup with expert TP: gather -> R, experts, fold, reduce_scatter) is rewritten so that the lanes' sum comes first:
// gather -> I, copy, experts, all_reduce, fold, slice. Same name, more bytes on TP. Any other is returned as it is.
Order CanonicalOrder(const Order& order);

// InvalidArgument, one line with the numbers, when canonical numerics cannot hold: sizes that are no powers of two or
// do not divide the blocks, chunks of whole experts that see only some lanes' rows, an order that adds up a token's
// experts before their lanes. OK in fast numerics.
absl::Status CheckNumerics(const MoeConfig& config, const TypedOrder& order, const GroupSizes& groups);

// InvalidArgument when an order exchanges by level and `groups` lacks the two groups for it, or they do not fit the EP
// group.
absl::Status CheckLevels(const TypedOrder& order, const MoeGroups& groups);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_LAYER_CHECKS_H_
