// Which routes stay when an expert is over-full, which slot each gets, and what it weighs. Pure functions.
#ifndef EVENKEEL_MOE_SLOT_ASSIGNMENT_H_
#define EVENKEEL_MOE_SLOT_ASSIGNMENT_H_

#include "absl/status/status.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Fills slot, kept and slot_classes from expert, score, capacity and dropless. Slots are the exclusive count of kept
// routes of the same expert in order of (class, token). Policies: DropPolicy. Cost: s * k, plus selection inside
// over-full experts. InvalidArgument when a slot would not fit 31 bits.
absl::Status AssignSlots(const RouterConfig& config, const RouterStep& step, RoutingDecision* decision);

// Fills weight: the scores of the kept routes, normalised and scaled as configured.
void ComputeWeights(const RouterConfig& config, RoutingDecision* decision);

// Fills balance_loss and z_loss; both are 0 without active tokens.
void ComputeLosses(const RouterConfig& config, RoutingDecision* decision);

// dlogits [s, e], overwritten: the gradient of <weight, dweight> + balance * balance_loss + z * z_loss. dweight: [s,
// k]; entries of dropped routes are ignored. Where routes were chosen, and dropped, is constant.
void LogitGradients(const RouterConfig& config, const RoutingDecision& decision, const float* dweight, float balance,
                    float z, float* dlogits);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_SLOT_ASSIGNMENT_H_
