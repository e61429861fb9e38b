// Whether grouped calls may run in any order.
#ifndef EVENKEEL_COMM_GROUPED_OVERLAP_H_
#define EVENKEEL_COMM_GROUPED_OVERLAP_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/grouped_call.h"

namespace evenkeel::comm {

// InvalidArgument naming two of `calls` when one writes memory that the other reads or writes. What a call does with
// its own memory is its own matter. n log n for n calls.
absl::Status CheckApart(absl::Span<const GroupedCall> calls);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_GROUPED_OVERLAP_H_
