// How long an order takes with its experts, when exchanges of one chunk may pass beside the experts of another.
//
// A rank has two queues that run side by side, as the executor fills them: the exchange stream, and the compute stream
// with the experts and all else. With chunks i = 0 .. C - 1 the exchange stream runs
//   out 0, out 1, back 0, out 2, back 1, .., out C - 1, back C - 2, back C - 1
// and the experts of chunk i start when out i and those of chunk i - 1 are done, back i when the experts of i are. With
// equal exchanges of x and experts of m per chunk that takes 2 C x where m <= x (all of the experts are hidden), and
// x + C m + x where m >= 2 x. One chunk takes x + m + x. Holds on worker streams; on an inline stream nothing runs
// beside anything.
#ifndef EVENKEEL_MOE_OVERLAP_ESTIMATE_H_
#define EVENKEEL_MOE_OVERLAP_ESTIMATE_H_

#include <functional>

#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_sizes.h"

namespace evenkeel::moe {

// Seconds of the traffic of one axis.
using TrafficTime = std::function<double(const AxisTraffic& traffic)>;

// Seconds of all steps of one pass (`backward` says which) with its experts at `flops_per_second`, above 0; control
// traffic is not in it. Chunks are taken to be equal. `sizes` passed CheckOrderSizes, with ffn set.
double EstimatePassSeconds(const TypedOrder& order, const OrderSizes& sizes, bool backward, const TrafficTime& tp,
                           const TrafficTime& ep, double flops_per_second);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_OVERLAP_ESTIMATE_H_
