#include "evenkeel/zero3/pass_peak.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace evenkeel::zero3 {
namespace {

// Books what the pass gathers and gives back. A place in the plan's arena is free at once; memory of its own is given
// back when the next gather needs some.
class Books {
 public:
  Books(const FetchPlan& plan, const PlanOptions& options)
      : plan_(plan),
        deferred_(options.deferred_free),
        live_(options.fixed_bytes),
        peak_(live_),
        units_(static_cast<size_t>(plan.num_units())) {}

  void Walk(const Visit& visit, absl::Span<const PlanAction> actions) {
    if (visit.kind == Visit::Kind::kRelease) AddUsers(visit.leaf, -1);
    for (const PlanAction& action : actions) {
      if (action.kind == PlanAction::Kind::kPrefetch) continue;
      action.kind == PlanAction::Kind::kFree ? Free(action.unit) : Gather(action.unit, !deferred_);
    }
    if (visit.kind == Visit::Kind::kRelease) return;
    Join(visit.leaf);
    for (const PlanAction& action : actions) {
      if (action.kind == PlanAction::Kind::kPrefetch) Gather(action.unit, !deferred_);
    }
  }

  void FreeUnused() {
    for (int u = 0; u < plan_.num_units(); ++u) {
      if (at(u).gathered && at(u).users == 0) Free(u);
    }
  }

  void OnDemand(const Visit& visit) {
    if (visit.kind == Visit::Kind::kRelease) {
      AddUsers(visit.leaf, -1);
      for (int u : plan_.leaf(visit.leaf).units) {
        if (at(u).gathered && at(u).users == 0) Free(u);
      }
      return;
    }
    for (int u : plan_.leaf(visit.leaf).units) {
      if (!plan_.unit(u).resident && !at(u).gathered) Gather(u, false);
    }
    Join(visit.leaf);
  }

  int64_t peak() const { return peak_; }

 private:
  struct UnitBook {
    bool gathered = false;
    bool transient = false;
    bool in_arena = false;
    int users = 0;
  };

  UnitBook& at(int u) { return units_[static_cast<size_t>(u)]; }

  void AddUsers(int leaf, int change) {
    for (int u : plan_.leaf(leaf).units) at(u).users += change;
  }

  void Join(int leaf) {
    AddUsers(leaf, 1);
    for (int u : plan_.leaf(leaf).units) ReturnTransient(u);
  }

  void Gather(int u, bool in_arena) {
    live_ -= std::exchange(pending_, 0);
    at(u).gathered = true;
    at(u).transient = true;
    at(u).in_arena = in_arena;
    live_ += plan_.unit(u).gathered_bytes + plan_.unit(u).transient_bytes;
    peak_ = std::max(peak_, live_);
  }

  void ReturnTransient(int u) {
    if (at(u).transient) GiveBack(u, plan_.unit(u).transient_bytes);
    at(u).transient = false;
  }

  void Free(int u) {
    ReturnTransient(u);
    at(u).gathered = false;
    GiveBack(u, plan_.unit(u).gathered_bytes);
  }

  void GiveBack(int u, int64_t bytes) { at(u).in_arena ? live_ -= bytes : pending_ += bytes; }

  const FetchPlan& plan_;
  const bool deferred_;
  int64_t live_;
  int64_t peak_;
  int64_t pending_ = 0;
  std::vector<UnitBook> units_;
};

}  // namespace

int64_t PeakOfLeftPass(const FetchPlan& plan, int left_at, absl::Span<const Visit> visits, const PlanOptions& options) {
  Books books(plan, options);
  for (int i = 0; i < left_at; ++i) books.Walk(plan.visit(i), plan.actions(i));
  const absl::Span<const Visit> rest = visits.subspan(static_cast<size_t>(left_at));
  for (size_t i = 0; i < rest.size(); ++i) {
    // The visit that leaves the order ends its own use before what nobody uses is dropped; no byte is gathered between.
    if (i == 0) books.FreeUnused();
    books.OnDemand(rest[i]);
  }
  return books.peak();
}

}  // namespace evenkeel::zero3
