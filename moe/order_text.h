// An order as text for people: steps with placements, the derived backward, closed forms, numbers.
//
//   std::cout << DescribeOrder(typed, sizes);
#ifndef EVENKEEL_MOE_ORDER_TEXT_H_
#define EVENKEEL_MOE_ORDER_TEXT_H_

#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"

namespace evenkeel::moe {

// Both programs, a line per step: number, name, types after it, bytes it sends at `sizes`. Then the closed forms, the
// bytes per axis and in total, the number of collectives, the bandwidth ratio from which on the order beats reference,
// and the peak memory. InvalidArgument as ComputeOrderCost.
absl::StatusOr<std::string> DescribeOrder(const TypedOrder& order, const OrderSizes& sizes);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_TEXT_H_
