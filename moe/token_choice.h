// From logits to scores to chosen experts. Pure functions, one token at a time, so a token's choice never depends on
// its neighbours.
#ifndef EVENKEEL_MOE_TOKEN_CHOICE_H_
#define EVENKEEL_MOE_TOKEN_CHOICE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/philox.h"

namespace evenkeel::moe {

// e^x in double from additions and multiplications only: the same bits on every machine and with every libm.
// Relative error below 1e-14 for x in [-700, 700]; 0 below, clamped above.
double PortableExp(double x);

// Bits that sort like the float: a < b iff OrderedBits(a) < OrderedBits(b). -0 and +0 are equal. No NaN.
uint32_t OrderedBits(float value);

// Fills score, softmax (where needed) and log_sum_exp of `decision` from logits [s, e]. The decision's num_tokens,
// num_experts and token_mask are set. InvalidArgument naming layer, token and expert for the first logit of an active
// token that is not finite.
absl::Status ScoreTokens(const RouterConfig& config, const float* logits, RoutingDecision* decision);

// Chooses decision->top_k experts for every active token (masked tokens get 0, 1, .., k-1) and counts `assigned` and
// `balance_count`. selection_bias: [e] or null. Scores are there already.
absl::Status ChooseExperts(const RouterConfig& config, const RouterStep& step, const float* logits,
                           const float* selection_bias, RoutingDecision* decision);

// The key of a router's random numbers for one purpose ("noise", "drop", "jitter").
PhiloxKey RouterKey(const RouterConfig& config, const RouterStep& step, absl::string_view purpose);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_TOKEN_CHOICE_H_
