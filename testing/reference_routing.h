// Routing in double, written out plainly: the other side of what moe's router decides.
#ifndef EVENKEEL_TESTING_REFERENCE_ROUTING_H_
#define EVENKEEL_TESTING_REFERENCE_ROUTING_H_

#include <cstdint>
#include <vector>

#include "evenkeel/testing/reference_math.h"

namespace evenkeel::testutil {

// Which routes of an over-full expert stay: what DeepSpeed's gates do for this k (position for 1, choices first for 2,
// probabilities above), the most probable ones, the first in token order, or all first choices in token order, then
// all second ones.
enum class ReferenceDrop : uint8_t { kByTopK, kProbabilities, kPosition, kChoicesFirst };

// The numbers that routing depends on.
struct ReferenceRouterConfig {
  int64_t experts = 1;
  int64_t top_k = 1;
  bool sigmoid = false;    // scores; else softmax
  double route_scale = 1;  // of the route weights
  // Only experts of the `groups_kept` best of `groups` equal groups may be chosen. A group is worth its best score, or
  // the sum of its two best. 1 and 1: no limit.
  int64_t groups = 1;
  int64_t groups_kept = 1;
  bool group_top_two = false;
  // Slots per expert and source: ceil(tokens * top_k * numerator / (denominator * experts)), at least min_capacity,
  // the largest over the replicas of one exchange, rounded up to capacity_multiple. numerator 0: nothing is dropped.
  int64_t capacity_numerator = 0;
  int64_t capacity_denominator = 1;
  int64_t min_capacity = 0;
  int64_t capacity_multiple = 1;
  ReferenceDrop drop = ReferenceDrop::kByTopK;
  double balance_coefficient = 0;
  double z_coefficient = 0;
};

// The experts that the tokens of one replica chose, token by token, best first; and which routes were kept.
struct ReferenceRoutes {
  std::vector<int64_t> expert;  // [tokens * top_k]
  std::vector<uint8_t> kept;    // [tokens * top_k]
};

// What routing computed, kept for the backward.
struct ReferenceRouting {
  ReferenceRoutes chosen;  // by these probabilities
  ReferenceRoutes used;    // chosen, or the replayed ones
  reference::Matrix logits;
  reference::Matrix probabilities;  // scores, [tokens, experts]
  reference::Matrix weights;        // [tokens, top_k], zero where dropped
  std::vector<double> share;        // fraction of tokens per expert that the balance loss counts
  double balance_loss = 0;          // without its coefficient
  double z_loss = 0;
  int64_t capacity = 0;
};

// Slots per expert for the largest of `tokens` (one entry per source of the exchange); tokens of the largest when
// nothing is dropped.
int64_t ReferenceCapacity(const ReferenceRouterConfig& config, const std::vector<int64_t>& tokens);

// Top-k of each row of `probabilities` among the best groups, the lower expert on a tie, and the routes kept at
// `capacity` by config.drop, ties to the lower token.
ReferenceRoutes ChooseRoutes(const ReferenceRouterConfig& config, const reference::Matrix& probabilities,
                             int64_t capacity);

// The kept marks that follow from `expert` (as in ReferenceRoutes) at `capacity`.
std::vector<uint8_t> KeptRoutes(const ReferenceRouterConfig& config, const reference::Matrix& probabilities,
                                const std::vector<int64_t>& expert, int64_t capacity);

// x [tokens, hidden], weight [experts, hidden]. `replay`, when given, fixes the routes.
ReferenceRouting Route(const ReferenceRouterConfig& config, const reference::Matrix& x, const reference::Matrix& weight,
                       int64_t capacity, const ReferenceRoutes* replay, const reference::Rounding& rounding);

// dweights [tokens, top_k]: gradient of the route weights. Adds the router's weight gradient and returns the gradient
// of x, the two auxiliary losses included. `depth` as in AddTransposedProduct.
reference::Matrix RouteBackward(const ReferenceRouterConfig& config, const ReferenceRouting& routing,
                                const reference::Matrix& x, const reference::Matrix& weight,
                                const reference::Matrix& dweights, int64_t depth, const reference::Rounding& rounding,
                                reference::Matrix* dweight);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_ROUTING_H_
