// Which order is fastest here: a latency-bandwidth model of the two axes over the exact bytes of each order.
//
//   EK_ASSIGN_OR_RETURN(CostModel model, CalibrateCostModel({.tp = tp, .ep = ep}, device, clock, stream));
//   EK_ASSIGN_OR_RETURN(OrderPlan plan, PlanOrder(OrderNames(), ExpertLayout::kTensorParallel, sizes, model));
//   plan.best().name;   plan.why;
//
// A collective that sends n bytes from a rank takes alpha + n * beta on its axis; where nodes are told apart, messages
// and bytes between them have figures of their own, which is what exchanges in two levels are for. With T = E equal
// links this says what the closed forms say: drop_gather beats reference only when the TP link is faster than the EP
// link by more than E/(E-1), fused when it is by more than E/(2(E-1)); below some size the order with the fewest
// collectives wins.
#ifndef EVENKEEL_MOE_ORDER_PLANNER_H_
#define EVENKEEL_MOE_ORDER_PLANNER_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel::moe {

// One axis. Both at least 0 and finite.
struct LinkModel {
  double alpha_seconds = 0;     // of a collective, whatever its size
  double seconds_per_byte = 0;  // of what a rank sends
};

struct CostModel {
  LinkModel tp;
  LinkModel ep;
  // Of what goes over EP between nodes: alpha of each message beside that of its collective, and the time of a byte
  // there. None: as inside nodes.
  std::optional<LinkModel> ep_between = {};
  // Of this rank's experts, on worker streams. Above 0, estimates are of communication and experts together, with the
  // exchanges of overlapped orders beside them (overlap_estimate.h), and sizes need `ffn`. 0: of communication alone,
  // where nothing can be hidden and chunks only cost their latency: an overlapped order is never the fastest.
  double expert_flops_per_second = 0;
};

struct OrderEstimate {
  std::string name;
  OrderCost cost;
  double seconds = 0;  // of one forward and one backward: communication, or with CostModel's flops experts too
};

struct OrderPlan {
  std::vector<OrderEstimate> estimates;  // fastest first; equal ones in the order they were given
  std::string why;                       // one line: the winner, the runner-up, and what differs

  const OrderEstimate& best() const { return estimates.front(); }
};

// Forward plus backward of one order, without computation.
double EstimateSeconds(const OrderCost& cost, const CostModel& model);
// The same with the experts. model.expert_flops_per_second is above 0; `sizes` passed CheckOrderSizes.
double EstimateSecondsWithExperts(const TypedOrder& order, const OrderSizes& sizes, const CostModel& model);

// `names`, and for each that can run in chunks "overlapped(x)" and "overlapped(x:4)" where a rank has as many experts.
std::vector<std::string> WithChunks(absl::Span<const std::string> names, const OrderSizes& sizes);

// Compares the orders among `names` that run in `layout` (the others are left out). Deterministic: ranks that pass
// equal arguments choose equally. InvalidArgument when none is left, or sizes or model make no sense.
absl::StatusOr<OrderPlan> PlanOrder(absl::Span<const std::string> names, ExpertLayout layout, const OrderSizes& sizes,
                                    const CostModel& model);

// The bytes V of a padded buffer from which on `second` is faster than `first`: 0 when always, nothing when never.
// Both padded. The times are linear in V.
absl::StatusOr<std::optional<double>> CrossoverBytes(const TypedOrder& first, const TypedOrder& second,
                                                     const OrderSizes& sizes, const CostModel& model);

// The tokens s of a TP group from which on `second` is faster than `first`, with the capacity in proportion and ragged
// rows as balanced routing gives them: 0 when always, nothing when never. The times are linear in s but for rounding.
// Both crossovers are of communication alone, whatever the model says of experts.
absl::StatusOr<std::optional<double>> CrossoverTokens(const TypedOrder& first, const TypedOrder& second,
                                                      const OrderSizes& sizes, const CostModel& model);

// The groups to be measured; null ones cost nothing.
struct LinksToMeasure {
  comm::Communicator* tp = nullptr;
  comm::Communicator* ep = nullptr;        // where nodes are told apart: its ranks on this node
  comm::Communicator* ep_peers = nullptr;  // its ranks with this local index on every node; null: one node
  comm::Communicator* all = nullptr;       // not measured: who else must plan alike, such as other EP groups
};

// Measures each group with a few short all-gathers (milliseconds), and agrees on the slowest rank's figures over all of
// them, so that all ranks plan alike. All ranks of all groups call it. A message to a peer is taken to cost its share
// of the shortest gather among peers.
absl::StatusOr<CostModel> CalibrateCostModel(const LinksToMeasure& links, Device* device, Clock* clock, Stream& stream);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_PLANNER_H_
