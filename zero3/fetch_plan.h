// What to gather, keep and free at every visit of a pass, and where: computed before the pass, only walked during it.
//
// A pass is the recorded order of leaf fetches and releases between two weight updates. From it and the sizes follow
// the demand gathers, the early ones (prefetch, under a byte budget), what stays for a near reuse, the live bytes after
// every visit, the peak, and a fixed place for every unit, so that addresses are stable and memory is never asked for.
//
//   EK_ASSIGN_OR_RETURN(FetchPlan plan, FetchPlan::Build(units, leaves, visits, options));
//   plan.peak_bytes();  plan.offset(unit);  plan.ToString();
#ifndef EVENKEEL_ZERO3_FETCH_PLAN_H_
#define EVENKEEL_ZERO3_FETCH_PLAN_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace evenkeel::zero3 {

struct PlanUnit {
  std::string name;
  int64_t gathered_bytes = 0;   // while gathered
  int64_t transient_bytes = 0;  // more, between gather and the reclaim after its first use
  bool resident = false;        // always there: replicated or persistent
};

struct PlanLeaf {
  std::string name;
  std::vector<int> units;
};

struct Visit {
  enum class Kind : uint8_t { kFetch, kRelease };
  Kind kind = Kind::kFetch;
  int leaf = -1;
  friend bool operator==(const Visit&, const Visit&) = default;
};

struct PlanOptions {
  int64_t prefetch_bytes = 0;
  int64_t reuse_distance_bytes = -1;
  int64_t max_live_bytes = std::numeric_limits<int64_t>::max();
  int64_t fixed_bytes = 0;  // live at any time: persistent units and staging
  // Memory of a released unit is only given back when the next gather needs some (policies that allocate).
  bool deferred_free = false;
};

struct PlanAction {
  enum class Kind : uint8_t { kGather, kPrefetch, kFree };
  Kind kind = Kind::kGather;
  int unit = -1;
  friend bool operator==(const PlanAction&, const PlanAction&) = default;
};

// Immutable value.
class FetchPlan {
 public:
  // Pure. ResourceExhausted naming the leaf when max_live_bytes cannot hold what is fetched at once;
  // InvalidArgument when a release has no fetch, or an index is out of range.
  static absl::StatusOr<FetchPlan> Build(std::vector<PlanUnit> units, std::vector<PlanLeaf> leaves,
                                         std::vector<Visit> visits, const PlanOptions& options);

  int num_units() const { return static_cast<int>(units_.size()); }
  const PlanUnit& unit(int i) const { return units_[static_cast<size_t>(i)]; }
  const PlanLeaf& leaf(int i) const { return leaves_[static_cast<size_t>(i)]; }
  int num_visits() const { return static_cast<int>(visits_.size()); }
  const Visit& visit(int i) const { return visits_[static_cast<size_t>(i)]; }
  // In order: at a fetch what gives way under max_live_bytes, demand gathers, early gathers; at a release what is
  // freed.
  absl::Span<const PlanAction> actions(int visit) const { return actions_[static_cast<size_t>(visit)]; }
  // After the visit's actions.
  int64_t live_bytes(int visit) const { return live_[static_cast<size_t>(visit)]; }
  // The most at any time, fixed bytes included.
  int64_t peak_bytes() const { return peak_bytes_; }

  // Placement: units that are live together never overlap. arena_bytes >= peak of the placed units; equal up to
  // 64-byte rounding when no more than two are live together along the order (plain chains with prefetch depth 1).
  int64_t arena_bytes() const { return arena_bytes_; }
  int64_t offset(int unit) const { return offsets_[static_cast<size_t>(unit)]; }
  // Units whose place overlaps the place of `unit`: a gather into it waits for their release.
  absl::Span<const int> neighbours(int unit) const { return neighbours_[static_cast<size_t>(unit)]; }

  // A line per visit: leaf, actions, live bytes; then peak and arena.
  std::string ToString() const;

 private:
  friend class PlanBuilder;
  std::vector<PlanUnit> units_;
  std::vector<PlanLeaf> leaves_;
  std::vector<Visit> visits_;
  std::vector<std::vector<PlanAction>> actions_;
  std::vector<int64_t> live_;
  int64_t peak_bytes_ = 0;
  int64_t arena_bytes_ = 0;
  std::vector<int64_t> offsets_;
  std::vector<std::vector<int>> neighbours_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_FETCH_PLAN_H_
