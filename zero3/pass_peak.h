// The peak of a pass that left its recorded order, from the visits alone.
//
//   FetchPlan::peak_bytes() predicts a pass that is walked to its end. A pass that leaves the order at visit k follows
//   the plan before k, drops what nobody uses, and gathers on demand from there on, into memory of its own:
//   int64_t bytes = PeakOfLeftPass(plan, k, visits, options);
#ifndef EVENKEEL_ZERO3_PASS_PEAK_H_
#define EVENKEEL_ZERO3_PASS_PEAK_H_

#include <cstdint>

#include "absl/types/span.h"
#include "evenkeel/zero3/fetch_plan.h"

namespace evenkeel::zero3 {

// The most gathered bytes at any time of the pass `visits`, fixed bytes included, in bytes. `visits` begins with the
// first `left_at` visits of `plan` and goes on as it likes; `options` are those the plan was built with. Pure.
int64_t PeakOfLeftPass(const FetchPlan& plan, int left_at, absl::Span<const Visit> visits, const PlanOptions& options);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_PASS_PEAK_H_
