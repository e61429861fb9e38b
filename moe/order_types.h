// The type checker of orders: what lies where before and after each step.
//
//   absl::StatusOr<TypedOrder> typed = CheckOrder(order, ExpertLayout::kTensorParallel);
//   // InvalidArgument: order 'mine' step 6 (combine): tp is P, wants I or V(rows): ...
#ifndef EVENKEEL_MOE_ORDER_TYPES_H_
#define EVENKEEL_MOE_ORDER_TYPES_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// The steps of `order` that run in `layout`, with types, and the derived backward. `layout` is kTensorParallel or
// kWhole, or kAny for the order's own (kTensorParallel when that is kAny too).
// InvalidArgument naming the step's number and kind, the type found and the type wanted; or when the order does not
// support `layout`; or when dispatch, experts or combine is missing or doubled.
absl::StatusOr<TypedOrder> CheckOrder(const Order& order, ExpertLayout layout = ExpertLayout::kAny);

// The type after one step of a forward program, or what is wrong ("tp is P, wants I").
absl::StatusOr<ValueType> TypeAfter(const Step& step, const ValueType& before, ExpertLayout layout);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_TYPES_H_
