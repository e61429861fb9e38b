// Several collectives of one group of ranks as one call: one agreement, one message to each peer for all that is small.
// Pure but for scratch memory.
//
// The plan's fingerprint carries the number of the calls and a digest of what all ranks must have equal in each, so
// ranks that differ are found as in any other call; FindGroupedDifference then asks which call it is. When there are
// all_to_all_v among the calls, the first phase brings everybody's counts and nothing else, and they are judged before
// any payload moves. The phases of the calls then go level by level: what is small of every call's first phase in one
// packed exchange, the larger blocks call by call, then the second phases likewise.
#ifndef EVENKEEL_COMM_GROUPED_PLAN_H_
#define EVENKEEL_COMM_GROUPED_PLAN_H_

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// Blocks to one peer of at most so many bytes are packed: copying them costs less than a message of their own.
inline constexpr int64_t kMostPackedBytes = 4096;

// The plan of `calls` as one: parts[i] is that of calls[i] alone, without its phases. Refused (`bad_argument`) when one
// of the calls is, naming its number, or when one writes memory of another.
CallPlan PlanGrouped(absl::Span<const GroupedCall> calls, Place place);

// Whether all ranks take part in grouped calls and differ in these only.
bool DifferOnlyInside(const Agreement& agreement);

// Which call it is, when DifferOnlyInside: `agree` makes one more agreement with the fingerprint and row of part i. The
// same on all ranks, which make equally many. An error is one of `agree`.
absl::StatusOr<Disagreement> FindGroupedDifference(
    const CallPlan& plan, const Agreement& agreement,
    absl::FunctionRef<absl::Status(const CallPlan& part, Agreement* agreement)> agree);

// After the first phase of a plan with `grouped_counts`: whether the counts agree. When they do, phases that they leave
// empty on all ranks become local.
std::optional<Disagreement> JudgeGroupedCounts(Place place, CallPlan* plan);

// Adds the phases of all_to_all_v in the two-level form, after JudgeGroupedCounts, to a plan that needs them.
// ResourceExhausted when there is no memory for them.
absl::Status CompleteGroupedPlan(Place place, CallPlan* plan);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_GROUPED_PLAN_H_
