// Orders made from other orders: the same rows and the same bits, exchanged in another way.
//
//   EK_ASSIGN_OR_RETURN(Order pipelined, InChunks(*FindOrder("fused"), 4));
//   EK_ASSIGN_OR_RETURN(Order by_level, InTwoLevels(*FindOrder("token_sliced")));
#ifndef EVENKEEL_MOE_ORDER_REWRITES_H_
#define EVENKEEL_MOE_ORDER_REWRITES_H_

#include "absl/status/statusor.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// `order` in that many chunks of each rank's experts (OrderProto::chunks). InvalidArgument when the number is not in
// [1, kMaxOrderChunks], or the order cannot be cut.
absl::StatusOr<Order> InChunks(Order order, int chunks);

// `order` with every exchange as two steps: out between nodes among peers, then inside the node; back the other way
// round. InvalidArgument when the order is ill-typed, has no exchange, or exchanges by level already.
absl::StatusOr<Order> InTwoLevels(const Order& order);

// `order`, which sends a row per (token, destination), with one row per (token, node) between nodes: it is expanded to
// destinations half way, and their sums are added up there on the way back. Where nodes have a power of two of the EP
// group's ranks, sums follow the same tree, so the bits are those of `order`. InvalidArgument as InTwoLevels, and for
// an order that sends other rows.
absl::StatusOr<Order> OncePerNode(const Order& order);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_REWRITES_H_
