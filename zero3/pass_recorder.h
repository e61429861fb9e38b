// Which order the visits of a pass have, by name of the order: recorded first, then compared with its plan.
//
// Pure: it knows sizes and visits, no memory and no streams.
//
//   PassRecorder recorder(units, leaves, recording, walking);
//   const PassRecorder::Step step = recorder.Next({Visit::Kind::kFetch, leaf});
//   if (step.leaves_order) ...       // drop what nobody uses: from here on demand
//   if (step.planned) Do(step.actions);
//   EK_ASSIGN_OR_RETURN(const PassRecorder::PassEnd end, recorder.EndPass());
#ifndef EVENKEEL_ZERO3_PASS_RECORDER_H_
#define EVENKEEL_ZERO3_PASS_RECORDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/zero3/fetch_plan.h"

namespace evenkeel::zero3 {

// Not thread-safe.
class PassRecorder {
 public:
  // `recording`: the options that describe a pass on demand (no prefetch, no reuse); `walking`: those of plans.
  PassRecorder(std::vector<PlanUnit> units, std::vector<PlanLeaf> leaves, const PlanOptions& recording,
               const PlanOptions& walking);

  // True while the order is known and the pass has kept to it.
  bool walking() const;
  // The plan being walked; only while walking.
  const FetchPlan& plan() const { return orders_.at(name_); }

  struct Step {
    bool planned = false;  // the visit is the plan's next one: `actions` says what to do
    absl::Span<const PlanAction> actions;
    bool leaves_order = false;  // with this visit the pass leaves the order it was walking
  };
  // Notes a visit.
  Step Next(Visit visit);
  // Forgets the last visit: it was refused.
  void TakeBack() { visits_.pop_back(); }
  // Before EndPass: true when the pass ends before its order does. It has left the order then.
  bool LeaveIfShort();

  struct PassEnd {
    int64_t peak_bytes = 0;  // predicted for the pass that ends; 0 for an empty one
    bool recorded = false;   // nothing was known of the order
    bool learned = false;    // there is a new plan: its arena must exist before the next pass
  };
  // Ends the pass: learns the order where it was recorded or left. Errors of FetchPlan::Build.
  absl::StatusOr<PassEnd> EndPass();
  // The following passes belong to the order called `name`. Between passes.
  void UseOrder(absl::string_view name) { name_ = std::string(name); }

 private:
  const std::vector<PlanUnit> units_;
  const std::vector<PlanLeaf> leaves_;
  const PlanOptions recording_;
  const PlanOptions walking_;
  std::map<std::string, FetchPlan> orders_;  // of orders that are known
  std::string name_ = "step";
  std::vector<Visit> visits_;  // of this pass so far
  int left_at_ = -1;           // position in visits_, in this pass
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_PASS_RECORDER_H_
