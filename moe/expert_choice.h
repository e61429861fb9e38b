// Expert-choice routing: every expert takes its best tokens, so load is balanced by construction and a token may get
// any number of experts, also none (Zhou et al., arXiv 2202.09368).
#ifndef EVENKEEL_MOE_EXPERT_CHOICE_H_
#define EVENKEEL_MOE_EXPERT_CHOICE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Every expert takes the `tokens_per_expert` active tokens (all of them if fewer) with the best scores; ties: lowest
// token. Fills top_k (the most experts any token got, at least 1), expert, slot, slot_classes, assigned, kept and
// balance_count. A token's experts come best first, then unused ones (slot -1) in order of id. Scores are there
// already. InvalidArgument when there are 2^31 tokens or more. Cost: s * e.
absl::Status ChooseTokens(int64_t tokens_per_expert, RoutingDecision* decision);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXPERT_CHOICE_H_
