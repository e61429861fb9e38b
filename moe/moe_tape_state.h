// What a forward of the layer leaves for its backward. Internal to the layer.
#ifndef EVENKEEL_MOE_MOE_TAPE_STATE_H_
#define EVENKEEL_MOE_MOE_TAPE_STATE_H_

#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_executor.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/moe/row_maps.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {

// What lies between a forward and its backward.
struct MoeTapeState {
  RoutingDecision decision;
  RouterStep step;
  RouterInput router_input;
  RowMaps maps;
  Schedules schedules;
  IndexPool indices;
  std::vector<std::unique_ptr<Event>> events;
  OrderTraffic forward_traffic;
  OrderTraffic backward_traffic;
  OrderMemory memory;
  Tensor all_tokens;                            // the router's input where the caller's is sliced
  Tensor wide_tokens;                           // the input in f32, where a 16-bit layer computes in f32
  std::vector<std::pair<int, Tensor>> carried;  // by number in the backward schedule
  std::vector<float> route_gradient;            // [s, k]
  std::vector<float> fold_gradient;             // [entries of the fold]
  bool ready = false;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_MOE_TAPE_STATE_H_
