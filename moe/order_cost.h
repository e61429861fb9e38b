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
// element of a partial sum: 4 where b is 2, else b. all_reduce counts as reduce_scatter plus all_gather, 2(T-1)/T of
// the buffer; an exchange keeps 1/E at home. A group of one moves nothing.
#ifndef EVENKEEL_MOE_ORDER_COST_H_
#define EVENKEEL_MOE_ORDER_COST_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::moe {

// Real rows, for orders without padding; from the routing at hand.
struct RaggedRows {
  int64_t sent = 0;             // rows this rank dispatches
  int64_t sent_remote = 0;      // of them, to other ranks of the EP group
  int64_t arrived = 0;          // rows the exchange brings to this rank
  int64_t arrived_remote = 0;   // of them, from other ranks
  int64_t gathered = 0;         // R: rows at this rank's experts; `arrived` where nothing is gathered over TP
  int64_t gathered_before = 0;  // of them, those of lanes before this one
};

// The sizes of one layer on one rank.
struct OrderSizes {
  int64_t tokens = 0;  // s
  int64_t hidden = 0;
  int64_t experts = 0;
  int64_t top_k = 1;
  int64_t capacity = 0;       // c: slots per expert and source; padded orders only
  int64_t ffn = 0;            // F: full width of an expert; for memory only
  bool gated = false;         // SwiGLU; for memory only
  bool recompute = false;     // the experts' middle is computed again in backward; for memory only
  int canonical_sources = 0;  // canonical numerics: replicas of the EP group; 0: fast numerics. For memory only
  DType dtype = DType::kF32;
  int tp = 1;
  int ep = 1;
  int lane = 0;
  int slot_classes = 1;                         // of the router's decisions
  int chunks = 1;                               // of the order: set by whoever has it (the functions below do)
  std::optional<RaggedRows> rows = {};          // none: balanced routing without drops is assumed
  std::optional<RaggedRows> destinations = {};  // the same of rows per (token, destination), where tokens travel so
};

struct AxisTraffic {
  int64_t bytes = 0;  // sent by this rank to others
  int collectives = 0;
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

// InvalidArgument when the sizes do not fit: a negative extent, E that does not divide e, a capacity that is not a
// multiple of T, or numbers that overflow.
absl::Status CheckOrderSizes(const TypedOrder& order, const OrderSizes& sizes);

// `sizes.rows`, or what balanced routing without drops gives this rank.
RaggedRows RowsOrExpected(const TypedOrder& order, const OrderSizes& sizes);
// `sizes.destinations`, or what routing to k experts at random gives this rank.
RaggedRows DestinationsOrExpected(const TypedOrder& order, const OrderSizes& sizes);
// The element type of a value of that form: partial sums of bf16 rows are f32.
DType ElementType(Dim form, DType dtype, bool backward);

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
