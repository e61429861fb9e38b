// Routing decisions for tests and benchmarks, without a router: seeded, valid, as skewed as wanted.
//
//   RoutingDecision decision = RandomRouting({.tokens = 64, .experts = 8, .top_k = 2, .capacity = 20, .seed = 7});
#ifndef EVENKEEL_MOE_RANDOM_ROUTING_H_
#define EVENKEEL_MOE_RANDOM_ROUTING_H_

#include <cstdint>

#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

struct RandomRoutingOptions {
  int64_t tokens = 0;
  int experts = 1;
  int top_k = 1;
  int64_t capacity = 0;         // 0: dropless
  bool choice_classes = false;  // first choices have priority: slot_classes = top_k
  double skew = 0;              // 0: uniform; 1: every token's first choice is expert 0, its second expert 1, ...
  double masked = 0;            // share of masked tokens
  uint64_t seed = 1;
};

// Slots are given in order of (class, token) until the capacity is full. Weights are unique by route. Saved scores are
// empty. Validate() holds.
RoutingDecision RandomRouting(const RandomRoutingOptions& options);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_RANDOM_ROUTING_H_
