#include "evenkeel/zero3/pass_recorder.h"

#include <cstddef>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/pass_peak.h"

namespace evenkeel::zero3 {

PassRecorder::PassRecorder(std::vector<PlanUnit> units, std::vector<PlanLeaf> leaves, const PlanOptions& recording,
                           const PlanOptions& walking)
    : units_(std::move(units)), leaves_(std::move(leaves)), recording_(recording), walking_(walking) {}

bool PassRecorder::walking() const { return left_at_ < 0 && orders_.count(name_) != 0; }

PassRecorder::Step PassRecorder::Next(Visit visit) {
  const int position = static_cast<int>(visits_.size());
  visits_.push_back(visit);
  Step step;
  if (!walking()) return step;
  if (position < plan().num_visits() && plan().visit(position) == visit) {
    step.planned = true;
    step.actions = plan().actions(position);
    return step;
  }
  left_at_ = position;
  step.leaves_order = true;
  return step;
}

bool PassRecorder::LeaveIfShort() {
  const int position = static_cast<int>(visits_.size());
  if (position == 0 || !walking() || position == plan().num_visits()) return false;
  left_at_ = position;
  return true;
}

absl::StatusOr<PassRecorder::PassEnd> PassRecorder::EndPass() {
  PassEnd end;
  if (visits_.empty()) {
    left_at_ = -1;  // of a visit that was taken back
    return end;
  }
  const std::vector<Visit> visits = std::exchange(visits_, {});
  if (walking()) {
    end.peak_bytes = plan().peak_bytes();
    return end;
  }
  const int left_at = std::exchange(left_at_, -1);
  if (left_at >= 0) {
    end.peak_bytes = PeakOfLeftPass(plan(), left_at, visits, walking_);
  } else {
    EK_ASSIGN_OR_RETURN(const FetchPlan recorded, FetchPlan::Build(units_, leaves_, visits, recording_));
    end.peak_bytes = recorded.peak_bytes();
    end.recorded = true;
  }
  orders_.erase(name_);
  EK_ASSIGN_OR_RETURN(FetchPlan learned, FetchPlan::Build(units_, leaves_, visits, walking_));
  orders_.emplace(name_, std::move(learned));
  end.learned = true;
  return end;
}

}  // namespace evenkeel::zero3
