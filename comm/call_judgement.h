// Whether the ranks of a group agree on a call. Pure: every rank comes to the same verdict.
#ifndef EVENKEEL_COMM_CALL_JUDGEMENT_H_
#define EVENKEEL_COMM_CALL_JUDGEMENT_H_

#include <optional>

#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// Whether the ranks agree on `plan`, from what Agree gathered. Nothing when they do. `agreement` of a pair has two
// ranks: one must send, the other receive.
std::optional<Disagreement> Judge(const CallPlan& plan, const Agreement& agreement);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_CALL_JUDGEMENT_H_
