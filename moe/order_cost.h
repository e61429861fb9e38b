// What an order costs: bytes sent by a rank per axis, forward and backward, as closed forms and as exact numbers, the
// number of collectives, and the peak of temporary memory. All from the typed program alone.
//
//   OrderSizes sizes{.tokens = 4096, .hidden = 4096, .experts = 8, .top_k = 2, .capacity = 1280, .tp = 2, .ep = 4};
//   EK_ASSIGN_OR_RETURN(OrderCost cost, ComputeOrderCost(typed, sizes));
//   cost.forward.ep.bytes;            // 125829120
//   cost.forward_formula.ep;          // "2(E-1)/E V"
//
// Symbols of the formulas: T, E group sizes; V = e c h b bytes of one padded buffer; s tokens of a TP group, h hidden,
// b bytes per element; R rows that arrive at this rank's experts (after a gather over TP); D rows, one per (token of
// this rank, distinct remote destination), G those that lie at this rank's experts after a gather; w bytes of an
// element of a partial sum: 4 where b is 2, else b. Where exchanges go by level: N nodes with L of the EP group's ranks
// each; M rows, one per (own token, distinct remote node); Dn the rows of D that go to other nodes, Dl those that go on
// to another rank inside a node. all_reduce counts as reduce_scatter plus all_gather, 2(T-1)/T of the buffer; an
// exchange keeps 1/E at home. A group of one moves nothing.
#ifndef EVENKEEL_MOE_ORDER_COST_H_
#define EVENKEEL_MOE_ORDER_COST_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_sizes.h"

namespace evenkeel::moe {

struct AxisTraffic {
  int64_t bytes = 0;  // sent by this rank to others
  int collectives = 0;
  // Of an exchange over EP, the part between nodes (OrderSizes::ep_per_node): bytes, and messages where none is empty.
  // A TP group is taken to lie inside a node.
  int64_t inter_node_bytes = 0;
  int64_t inter_node_messages = 0;
  friend bool operator==(const AxisTraffic&, const AxisTraffic&) = default;
};

struct OrderTraffic {
  AxisTraffic tp;
  AxisTraffic ep;
  // Not payload: row counts and records of ragged orders (forward), route-weight gradients (backward).
  AxisTraffic control_tp;
  AxisTraffic control_ep;
  friend bool operator==(const OrderTraffic&, const OrderTraffic&) = default;
};

// Bytes of the layer's own device buffers, above what was live before the forward.
struct OrderMemory {
  int64_t forward_peak = 0;
  int64_t tape = 0;           // kept between forward and backward
  int64_t backward_peak = 0;  // the tape included
  friend bool operator==(const OrderMemory&, const OrderMemory&) = default;
};

struct AxisFormula {
  std::string tp;
  std::string ep;
};

struct OrderCost {
  OrderTraffic forward;
  OrderTraffic backward;
  AxisFormula forward_formula;
  AxisFormula backward_formula;
  OrderMemory memory;
};

// The bytes of one program, "forward" or "backward" being which of `order`'s two.
OrderTraffic ComputeTraffic(const TypedOrder& order, const OrderSizes& sizes, bool backward);

// One step's share of that. No collectives: a step without traffic.
AxisTraffic ComputeStepTraffic(const TypedOrder& order, const OrderSizes& sizes, const TypedStep& step, bool backward);

// All of the above, after CheckOrderSizes.
absl::StatusOr<OrderCost> ComputeOrderCost(const TypedOrder& order, const OrderSizes& sizes);

// The closed forms of one program, terms added up: "2(E-1)/(ET) V", "(T-1)/T (2R + s) h b".
AxisFormula ClosedForms(const TypedOrder& order, bool backward);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_COST_H_
