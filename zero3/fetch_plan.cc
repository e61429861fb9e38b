#include "evenkeel/zero3/fetch_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

constexpr int64_t kArenaAlignment = 64;

int64_t RoundUp(int64_t bytes) { return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment; }

absl::Status Error(absl::StatusCode code, absl::string_view subject, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "fetch_plan";
  where.group = std::string(subject);
  return MakeError(code, where, what);
}

}  // namespace

// Simulates the pass once, then places the units.
class PlanBuilder {
 public:
  PlanBuilder(FetchPlan& plan, const PlanOptions& options)
      : plan_(plan),
        options_(options),
        resident_(plan.units_.size(), false),
        early_(plan.units_.size(), false),
        has_transient_(plan.units_.size(), false),
        users_(plan.units_.size(), 0),
        leaf_users_(plan.leaves_.size(), 0),
        intervals_(plan.units_.size()) {}

  absl::Status Simulate() {
    live_ = options_.fixed_bytes;
    plan_.peak_bytes_ = live_;
    for (visit_ = 0; visit_ < plan_.num_visits(); ++visit_) {
      plan_.actions_.emplace_back();
      const Visit& visit = plan_.visit(visit_);
      EK_RETURN_IF_ERROR(visit.kind == Visit::Kind::kFetch ? Fetch(visit.leaf) : Release(visit.leaf));
      plan_.live_.push_back(live_);
    }
    for (size_t u = 0; u < resident_.size(); ++u) {
      if (resident_[u]) intervals_[u].back().second = plan_.num_visits();
    }
    return absl::OkStatus();
  }

  void Place() {
    const size_t n = plan_.units_.size();
    std::vector<std::vector<int>> overlaps(n);
    for (size_t a = 0; a < n; ++a) {
      for (size_t b = a + 1; b < n; ++b) {
        if (!LiveTogether(a, b)) continue;
        overlaps[a].push_back(static_cast<int>(b));
        overlaps[b].push_back(static_cast<int>(a));
      }
    }
    plan_.offsets_.assign(n, 0);
    if (!PlaceFromBothEnds(overlaps)) PlaceFirstFit(overlaps);
    FindNeighbours();
  }

 private:
  const std::vector<int>& UnitsOf(int leaf) const { return plan_.leaves_[static_cast<size_t>(leaf)].units; }
  const PlanUnit& unit(int u) const { return plan_.units_[static_cast<size_t>(u)]; }

  void Act(PlanAction::Kind kind, int u) { plan_.actions_.back().push_back({kind, u}); }

  void Grow(int64_t bytes) {
    live_ += bytes;
    plan_.peak_bytes_ = std::max(plan_.peak_bytes_, live_);
  }

  int64_t NeedOf(int u) const { return unit(u).gathered_bytes + unit(u).transient_bytes; }

  void Gather(PlanAction::Kind kind, int u) {
    const size_t i = static_cast<size_t>(u);
    live_ -= std::exchange(pending_, 0);
    Act(kind, u);
    resident_[i] = true;
    has_transient_[i] = true;
    early_[i] = kind == PlanAction::Kind::kPrefetch;
    if (early_[i]) early_bytes_ += unit(u).gathered_bytes;
    intervals_[i].push_back({visit_, visit_});
    Grow(NeedOf(u));
  }

  void Free(int u) {
    const size_t i = static_cast<size_t>(u);
    Act(PlanAction::Kind::kFree, u);
    resident_[i] = false;
    intervals_[i].back().second = visit_;
    ForgetEarly(u);
    ReturnTransient(u);
    GiveBack(unit(u).gathered_bytes);
  }

  void ForgetEarly(int u) {
    const size_t i = static_cast<size_t>(u);
    if (early_[i]) early_bytes_ -= unit(u).gathered_bytes;
    early_[i] = false;
  }

  void ReturnTransient(int u) {
    const size_t i = static_cast<size_t>(u);
    if (has_transient_[i]) GiveBack(unit(u).transient_bytes);
    has_transient_[i] = false;
  }

  void GiveBack(int64_t bytes) {
    (options_.deferred_free ? pending_ : live_) += options_.deferred_free ? bytes : -bytes;
  }

  absl::Status Fetch(int leaf) {
    if (leaf_users_[static_cast<size_t>(leaf)]++ > 0) return absl::OkStatus();
    int64_t need = 0;
    for (int u : UnitsOf(leaf)) {
      if (!unit(u).resident && !resident_[static_cast<size_t>(u)]) need += NeedOf(u);
    }
    // Early and kept units give way to what is needed now.
    for (size_t u = 0; u < resident_.size() && need > options_.max_live_bytes - (live_ - pending_); ++u) {
      const std::vector<int>& wanted = UnitsOf(leaf);
      const bool mine = std::find(wanted.begin(), wanted.end(), static_cast<int>(u)) != wanted.end();
      if (resident_[u] && users_[u] == 0 && !mine) Free(static_cast<int>(u));
    }
    if (need > options_.max_live_bytes - (live_ - pending_)) {
      return Error(absl::StatusCode::kResourceExhausted, plan_.leaves_[static_cast<size_t>(leaf)].name,
                   absl::StrCat("needs ", need, " bytes more while ", live_ - pending_, " are live; max_live_bytes is ",
                                options_.max_live_bytes));
    }
    for (int u : UnitsOf(leaf)) {
      if (!unit(u).resident && !resident_[static_cast<size_t>(u)]) Gather(PlanAction::Kind::kGather, u);
    }
    for (int u : UnitsOf(leaf)) Join(u);
    Prefetch();
    return absl::OkStatus();
  }

  void Join(int u) {
    if (unit(u).resident || users_[static_cast<size_t>(u)]++ > 0) return;
    ForgetEarly(u);
    ReturnTransient(u);
  }

  void Prefetch() {
    if (options_.prefetch_bytes <= 0) return;
    for (int next = visit_ + 1; next < plan_.num_visits(); ++next) {
      const Visit& visit = plan_.visit(next);
      if (visit.kind != Visit::Kind::kFetch) continue;
      for (int u : UnitsOf(visit.leaf)) {
        if (unit(u).resident || resident_[static_cast<size_t>(u)]) continue;
        if (early_bytes_ + unit(u).gathered_bytes > options_.prefetch_bytes) return;
        if (NeedOf(u) > options_.max_live_bytes - (live_ - pending_)) return;
        Gather(PlanAction::Kind::kPrefetch, u);
      }
    }
  }

  absl::Status Release(int leaf) {
    int& leaf_users = leaf_users_[static_cast<size_t>(leaf)];
    if (leaf_users == 0) {
      return Error(absl::StatusCode::kInvalidArgument, plan_.leaves_[static_cast<size_t>(leaf)].name,
                   absl::StrCat("visit ", visit_, " releases a leaf that is not fetched"));
    }
    if (--leaf_users > 0) return absl::OkStatus();
    for (int u : UnitsOf(leaf)) {
      if (unit(u).resident || --users_[static_cast<size_t>(u)] > 0) continue;
      if (!ReusedSoon(u)) Free(u);
    }
    return absl::OkStatus();
  }

  // Bytes of other units fetched before `u` is fetched again, within the reuse distance.
  bool ReusedSoon(int u) const {
    if (options_.reuse_distance_bytes < 0) return false;
    int64_t distance = 0;
    std::set<int> seen;
    for (int next = visit_ + 1; next < plan_.num_visits(); ++next) {
      const Visit& visit = plan_.visit(next);
      if (visit.kind != Visit::Kind::kFetch) continue;
      for (int other : UnitsOf(visit.leaf)) {
        if (other == u) return distance <= options_.reuse_distance_bytes;
        if (!unit(other).resident && seen.insert(other).second) distance += unit(other).gathered_bytes;
      }
      if (distance > options_.reuse_distance_bytes) return false;
    }
    return false;
  }

  bool LiveTogether(size_t a, size_t b) const {
    for (const auto& x : intervals_[a]) {
      for (const auto& y : intervals_[b]) {
        if (x.first < y.second && y.first < x.second) return true;
      }
    }
    return false;
  }

  int64_t Size(size_t u) const { return RoundUp(plan_.units_[u].gathered_bytes); }

  // When units can be coloured with two colours so that equal colours never live together, one colour starts at the
  // bottom and the other ends at the top: no byte is lost.
  bool PlaceFromBothEnds(const std::vector<std::vector<int>>& overlaps) {
    const size_t n = overlaps.size();
    std::vector<int> colour(n, -1);
    int64_t arena = 0;
    for (size_t start = 0; start < n; ++start) {
      if (intervals_[start].empty()) continue;
      arena = std::max(arena, Size(start));
      for (int other : overlaps[start]) arena = std::max(arena, Size(start) + Size(static_cast<size_t>(other)));
      if (colour[start] >= 0) continue;
      colour[start] = 0;
      std::vector<int> queue = {static_cast<int>(start)};
      while (!queue.empty()) {
        const size_t a = static_cast<size_t>(queue.back());
        queue.pop_back();
        for (int b : overlaps[a]) {
          int& other = colour[static_cast<size_t>(b)];
          if (other == colour[a]) return false;
          if (other < 0) {
            other = 1 - colour[a];
            queue.push_back(b);
          }
        }
      }
    }
    plan_.arena_bytes_ = arena;
    for (size_t u = 0; u < n; ++u) plan_.offsets_[u] = colour[u] == 1 ? arena - Size(u) : 0;
    return true;
  }

  void PlaceFirstFit(const std::vector<std::vector<int>>& overlaps) {
    std::vector<int> order;
    for (size_t u = 0; u < overlaps.size(); ++u) {
      if (!intervals_[u].empty()) order.push_back(static_cast<int>(u));
    }
    std::stable_sort(order.begin(), order.end(),
                     [this](int a, int b) { return Size(static_cast<size_t>(a)) > Size(static_cast<size_t>(b)); });
    std::vector<bool> placed(overlaps.size(), false);
    for (int u : order) {
      const size_t i = static_cast<size_t>(u);
      std::vector<std::pair<int64_t, int64_t>> taken;
      for (int other : overlaps[i]) {
        const size_t o = static_cast<size_t>(other);
        if (placed[o]) taken.push_back({plan_.offsets_[o], plan_.offsets_[o] + Size(o)});
      }
      std::sort(taken.begin(), taken.end());
      int64_t at = 0;
      for (const auto& range : taken) {
        if (at + Size(i) <= range.first) break;
        at = std::max(at, range.second);
      }
      plan_.offsets_[i] = at;
      placed[i] = true;
      plan_.arena_bytes_ = std::max(plan_.arena_bytes_, at + Size(i));
    }
  }

  void FindNeighbours() {
    const size_t n = plan_.units_.size();
    plan_.neighbours_.assign(n, {});
    for (size_t a = 0; a < n; ++a) {
      if (intervals_[a].empty()) continue;
      for (size_t b = 0; b < n; ++b) {
        if (intervals_[b].empty()) continue;
        const bool overlap =
            plan_.offsets_[a] < plan_.offsets_[b] + Size(b) && plan_.offsets_[b] < plan_.offsets_[a] + Size(a);
        if (overlap || a == b) plan_.neighbours_[a].push_back(static_cast<int>(b));
      }
    }
  }

  FetchPlan& plan_;
  const PlanOptions& options_;
  int visit_ = 0;
  int64_t live_ = 0;
  int64_t pending_ = 0;
  int64_t early_bytes_ = 0;
  std::vector<bool> resident_;
  std::vector<bool> early_;
  std::vector<bool> has_transient_;
  std::vector<int> users_;
  std::vector<int> leaf_users_;
  std::vector<std::vector<std::pair<int, int>>> intervals_;
};

absl::StatusOr<FetchPlan> FetchPlan::Build(std::vector<PlanUnit> units, std::vector<PlanLeaf> leaves,
                                           std::vector<Visit> visits, const PlanOptions& options) {
  FetchPlan plan;
  plan.units_ = std::move(units);
  plan.leaves_ = std::move(leaves);
  plan.visits_ = std::move(visits);
  for (const PlanLeaf& leaf : plan.leaves_) {
    for (int u : leaf.units) {
      if (u < 0 || u >= static_cast<int>(plan.units_.size())) {
        return Error(absl::StatusCode::kInvalidArgument, leaf.name, absl::StrCat("has no unit ", u));
      }
    }
  }
  for (const Visit& visit : plan.visits_) {
    if (visit.leaf < 0 || visit.leaf >= static_cast<int>(plan.leaves_.size())) {
      return Error(absl::StatusCode::kInvalidArgument, "visits", absl::StrCat("there is no leaf ", visit.leaf));
    }
  }
  PlanBuilder builder(plan, options);
  EK_RETURN_IF_ERROR(builder.Simulate());
  builder.Place();
  return plan;
}

std::string FetchPlan::ToString() const {
  std::string out;
  for (int i = 0; i < num_visits(); ++i) {
    const bool fetch = visit(i).kind == Visit::Kind::kFetch;
    absl::StrAppendFormat(&out, "%4d %-7s %-32s live %12d", i, fetch ? "fetch" : "release",
                          leaves_[static_cast<size_t>(visit(i).leaf)].name, live_bytes(i));
    for (const PlanAction& action : actions(i)) {
      const char* verb = action.kind == PlanAction::Kind::kGather     ? "gather"
                         : action.kind == PlanAction::Kind::kPrefetch ? "prefetch"
                                                                      : "free";
      absl::StrAppend(&out, "  ", verb, " ", units_[static_cast<size_t>(action.unit)].name);
      if (action.kind != PlanAction::Kind::kFree) absl::StrAppend(&out, "@", offset(action.unit));
    }
    absl::StrAppend(&out, "\n");
  }
  absl::StrAppend(&out, "peak ", peak_bytes_, " bytes, arena ", arena_bytes_, " bytes\n");
  return out;
}

}  // namespace evenkeel::zero3
