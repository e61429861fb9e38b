#include "evenkeel/zero3/coordinator.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

absl::Status Error(absl::StatusCode code, absl::string_view operation, absl::string_view leaf, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = std::string(operation);
  where.group = std::string(leaf);
  return MakeError(code, where, what);
}

// Adds the host operations that this thread issues while it lives.
class HostOperations {
 public:
  explicit HostOperations(int64_t* total) : total_(total), before_(WorkCounters::HostOperationsOfThisThread()) {}
  ~HostOperations() { *total_ += WorkCounters::HostOperationsOfThisThread() - before_; }

 private:
  int64_t* const total_;
  const int64_t before_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Create(std::vector<Unit*> units,
                                                                 absl::Span<const Leaf> leaves,
                                                                 const FetchPolicy* policy,
                                                                 const CoordinatorOptions& options, OrderLog* log,
                                                                 Device* device, Stream* compute, Stream* comm) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(options, device, compute, comm));
  EK_ASSIGN_OR_RETURN(coordinator->units_, GatheredUnits::Create(std::move(units), policy, options.poison_released, log,
                                                                 device, compute, comm));
  coordinator->AddLeaves(leaves);
  EK_RETURN_IF_ERROR(coordinator->CheckLeavesFit());
  coordinator->CreateRecorder();
  return coordinator;
}

void Coordinator::AddLeaves(absl::Span<const Leaf> leaves) {
  leaves_ = std::vector<LeafState>(leaves.size());
  for (size_t l = 0; l < leaves.size(); ++l) {
    LeafState& leaf = leaves_[l];
    leaf.name = leaves[l].name;
    leaf.ready = device_->CreateEvent();
    leaf.early = device_->CreateEvent();
    leaf.released = device_->CreateEvent();
    BindLeaf(leaves[l], leaf);
    leaf.views.resize(leaf.sources.size());
    leaf.bound_versions.assign(leaf.units.size(), ~uint64_t{0});
  }
}

// Which unit and position every parameter of the leaf has.
void Coordinator::BindLeaf(const Leaf& from, LeafState& leaf) const {
  for (int p : from.parameters) {
    for (int u = 0; u < units_->size(); ++u) {
      const std::vector<int>& of_unit = units_->unit(u).members().parameters;
      const auto found = std::find(of_unit.begin(), of_unit.end(), p);
      if (found == of_unit.end()) continue;
      leaf.sources.push_back({u, static_cast<int>(found - of_unit.begin())});
      if (std::find(leaf.units.begin(), leaf.units.end(), u) == leaf.units.end()) leaf.units.push_back(u);
    }
  }
  std::sort(leaf.units.begin(), leaf.units.end());
}

absl::Status Coordinator::CheckLeavesFit() const {
  for (const LeafState& leaf : leaves_) {
    int64_t need = units_->fixed_bytes();
    for (int u : leaf.units) {
      if (units_->stays(u)) continue;
      need += units_->unit(u).layout().gathered_bytes + units_->unit(u).layout().transient_bytes;
    }
    if (need > options_.max_live_bytes) {
      return Error(absl::StatusCode::kResourceExhausted, "create", leaf.name,
                   absl::StrCat("needs ", need, " gathered bytes (", units_->fixed_bytes(),
                                " of them at any time), max_live_bytes is ", options_.max_live_bytes));
    }
  }
  return absl::OkStatus();
}

void Coordinator::CreateRecorder() {
  std::vector<PlanUnit> units;
  for (int u = 0; u < units_->size(); ++u) {
    const UnitLayout& layout = units_->unit(u).layout();
    units.push_back({units_->unit(u).name(), layout.gathered_bytes, layout.transient_bytes, units_->stays(u)});
  }
  std::vector<PlanLeaf> leaves;
  for (const LeafState& leaf : leaves_) leaves.push_back({leaf.name, leaf.units});
  PlanOptions recording;
  recording.max_live_bytes = options_.max_live_bytes;
  recording.fixed_bytes = units_->fixed_bytes();
  recording.deferred_free = true;
  PlanOptions walking = recording;
  walking.deferred_free = units_->brings_own_memory();
  walking.prefetch_bytes = options_.prefetch_bytes;
  walking.reuse_distance_bytes = options_.reuse_distance_bytes;
  recorder_ = std::make_unique<PassRecorder>(std::move(units), std::move(leaves), recording, walking);
}

absl::StatusOr<PassRecorder::Step> Coordinator::Visited(Visit visit) {
  const PassRecorder::Step step = recorder_->Next(visit);
  if (step.leaves_order) EK_RETURN_IF_ERROR(DropUnused());
  return step;
}

// The recorded order is left: what was gathered early or kept is of no use.
absl::Status Coordinator::DropUnused() {
  ++counts_.trace_changes;
  std::vector<int> unused;
  for (int u = 0; u < units_->size(); ++u) {
    if (units_->unused(u)) unused.push_back(u);
  }
  return units_->Free(unused, dropped_.get());
}

absl::StatusOr<FetchedLeaf> Coordinator::Fetch(int index) {
  LeafState& leaf = leaves_[static_cast<size_t>(index)];
  if (leaf.users == 0) {
    if (std::exchange(persistent_stale_, false)) EK_RETURN_IF_ERROR(units_->RefreshPersistent());
    HostOperations count(&counts_.fetch_host_operations);
    EK_RETURN_IF_ERROR(FetchFirst(leaf, index));
  }
  ++leaf.users;
  return FetchedLeaf{leaf.views, &leaf.generation, leaf.generation};
}

absl::Status Coordinator::FetchFirst(LeafState& leaf, int index) {
  EK_ASSIGN_OR_RETURN(const PassRecorder::Step step, Visited({Visit::Kind::kFetch, index}));
  CountFetch(leaf);
  std::vector<int> wanted;
  std::vector<int> early;
  std::vector<int> dropped;
  if (step.planned) {
    for (const PlanAction& action : step.actions) {
      std::vector<int>& list = action.kind == PlanAction::Kind::kGather     ? wanted
                               : action.kind == PlanAction::Kind::kPrefetch ? early
                                                                            : dropped;
      list.push_back(action.unit);
    }
  } else {
    absl::StatusOr<std::vector<int>> missing = MissingUnits(leaf);
    if (!missing.ok()) {
      recorder_->TakeBack();
      return missing.status();
    }
    wanted = *std::move(missing);
  }
  const FetchPlan* plan = recorder_->walking() ? &recorder_->plan() : nullptr;
  EK_RETURN_IF_ERROR(units_->Free(dropped, leaf.released.get()));
  EK_RETURN_IF_ERROR(units_->Gather(wanted, plan, leaf.ready.get()));
  EK_RETURN_IF_ERROR(units_->Join(leaf.units));
  for (int u : leaf.units) units_->AddUser(u);
  BindViews(leaf);
  EK_RETURN_IF_ERROR(units_->Gather(early, plan, leaf.early.get()));
  for (int u : early) units_->MarkEarly(u);
  counts_.prefetched += static_cast<int64_t>(early.size());
  return absl::OkStatus();
}

void Coordinator::CountFetch(const LeafState& leaf) {
  ++counts_.fetches;
  bool gathers = false;
  for (int u : leaf.units) {
    if (units_->stays(u)) continue;
    gathers = true;
    if (units_->unused(u) && !units_->early(u)) ++counts_.reused;
  }
  if (gathers) ++counts_.fetch_cycles;
}

absl::StatusOr<std::vector<int>> Coordinator::MissingUnits(const LeafState& leaf) const {
  std::vector<int> missing;
  int64_t need = 0;
  for (int u : leaf.units) {
    if (units_->resident(u) || units_->gathered(u)) continue;
    missing.push_back(u);
    need += units_->unit(u).layout().gathered_bytes + units_->unit(u).layout().transient_bytes;
  }
  const int64_t live = units_->needed_bytes();
  if (need > options_.max_live_bytes - live) {
    return Error(absl::StatusCode::kResourceExhausted, "fetch", leaf.name,
                 absl::StrCat("needs ", need, " bytes more while ", live, " are live; max_live_bytes is ",
                              options_.max_live_bytes));
  }
  return missing;
}

void Coordinator::BindViews(LeafState& leaf) {
  bool same = true;
  for (size_t i = 0; i < leaf.units.size(); ++i) {
    const uint64_t version = units_->bind_version(leaf.units[i]);
    same = same && leaf.bound_versions[i] == version;
    leaf.bound_versions[i] = version;
  }
  if (same) return;
  for (size_t i = 0; i < leaf.sources.size(); ++i) {
    leaf.views[i] = units_->views(leaf.sources[i].first)[static_cast<size_t>(leaf.sources[i].second)];
  }
}

absl::Status Coordinator::Release(int index) {
  LeafState& leaf = leaves_[static_cast<size_t>(index)];
  if (leaf.users == 0) {
    return Error(absl::StatusCode::kFailedPrecondition, "release", leaf.name, "the leaf is not fetched");
  }
  if (--leaf.users > 0) return absl::OkStatus();
  ++leaf.generation;
  HostOperations count(&counts_.fetch_host_operations);
  return ReleaseLast(leaf, index);
}

absl::Status Coordinator::ReleaseLast(LeafState& leaf, int index) {
  for (int u : leaf.units) units_->RemoveUser(u);
  EK_ASSIGN_OR_RETURN(const PassRecorder::Step step, Visited({Visit::Kind::kRelease, index}));
  std::vector<int> unused;
  if (step.planned) {
    for (const PlanAction& action : step.actions) unused.push_back(action.unit);
  } else {
    for (int u : leaf.units) {
      if (units_->unused(u)) unused.push_back(u);
    }
  }
  return units_->Free(unused, leaf.released.get());
}

absl::Status Coordinator::CheckNothingFetched() const {
  for (const LeafState& leaf : leaves_) {
    if (leaf.users > 0) {
      return Error(absl::StatusCode::kFailedPrecondition, "step", leaf.name,
                   absl::StrCat("the leaf is still fetched by ", leaf.users, " users"));
    }
  }
  return absl::OkStatus();
}

absl::Status Coordinator::EndPass() {
  if (recorder_->LeaveIfShort()) EK_RETURN_IF_ERROR(DropUnused());
  {
    HostOperations count(&counts_.fetch_host_operations);
    EK_RETURN_IF_ERROR(units_->Reclaim());
  }
  EK_ASSIGN_OR_RETURN(const PassRecorder::PassEnd end, recorder_->EndPass());
  int64_t& predicted = counts_.predicted_peak_gathered_bytes;
  predicted = std::max(predicted, end.peak_bytes);
  if (end.recorded) predicted = std::max(predicted, units_->fixed_bytes() + units_->persistent_transient_bytes());
  if (!end.learned || units_->brings_own_memory()) return absl::OkStatus();
  return units_->ReserveArena(recorder_->plan().arena_bytes());
}

absl::Status Coordinator::UseTrace(absl::string_view name) {
  EK_RETURN_IF_ERROR(CheckNothingFetched());
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  EK_RETURN_IF_ERROR(compute_->Synchronize());
  EK_RETURN_IF_ERROR(EndPass());
  recorder_->UseOrder(name);
  return absl::OkStatus();
}

CoordinatorCounts Coordinator::counts() const {
  CoordinatorCounts counts = counts_;
  counts.gathers = units_->counts().gathers;
  counts.prefetch_wasted = units_->counts().prefetch_wasted;
  counts.gathered_bytes = units_->counts().gathered_bytes;
  counts.peak_gathered_bytes = units_->counts().peak_gathered_bytes;
  counts.arena_bytes = units_->arena_bytes();
  return counts;
}

void Coordinator::ResetPeak() {
  units_->ResetPeak();
  counts_.predicted_peak_gathered_bytes = units_->counts().gathered_bytes;
}

}  // namespace evenkeel::zero3
