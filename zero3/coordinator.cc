#include "evenkeel/zero3/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

constexpr int kPoison = 0xff;

absl::Status Error(absl::StatusCode code, absl::string_view operation, absl::string_view leaf, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = std::string(operation);
  where.group = std::string(leaf);
  return MakeError(code, where, what);
}

// Adds the host operations issued while it lives.
class HostOperations {
 public:
  HostOperations(Device* device, int64_t* total)
      : device_(device), total_(total), before_(device->counters().Snapshot().host_operations) {}
  ~HostOperations() { *total_ += device_->counters().Snapshot().host_operations - before_; }

 private:
  Device* const device_;
  int64_t* const total_;
  const int64_t before_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Create(std::vector<Unit*> units,
                                                                 absl::Span<const Leaf> leaves,
                                                                 const FetchPolicy* policy,
                                                                 const CoordinatorOptions& options, Device* device,
                                                                 Stream* compute, Stream* comm) {
  std::unique_ptr<Coordinator> coordinator(new Coordinator(policy, options, device, compute, comm));
  coordinator->refreshed_ = device->CreateEvent();
  coordinator->dropped_ = device->CreateEvent();
  EK_RETURN_IF_ERROR(coordinator->AddUnits(std::move(units)));
  EK_RETURN_IF_ERROR(coordinator->AddLeaves(leaves));
  EK_RETURN_IF_ERROR(coordinator->CheckLeavesFit());
  absl::MutexLock lock(&coordinator->mutex_);
  coordinator->counts_.gathered_bytes = coordinator->fixed_bytes_;
  coordinator->counts_.peak_gathered_bytes = coordinator->fixed_bytes_;
  return coordinator;
}

// Queued work may still use the memory.
Coordinator::~Coordinator() {
  comm_->Synchronize().IgnoreError();
  compute_->Synchronize().IgnoreError();
}

absl::Status Coordinator::AddUnits(std::vector<Unit*> units) {
  int64_t staging = 0;
  for (const Unit* unit : units) staging = std::max(staging, unit->resident() ? 0 : unit->layout().staging_bytes);
  EK_ASSIGN_OR_RETURN(staging_, device_->Allocate(staging));
  fixed_bytes_ = staging;
  units_.resize(units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    UnitState& state = units_[i];
    state.unit = units[i];
    if (state.unit->resident()) continue;
    GathererContext context;
    context.parameters.assign(state.unit->specs().begin(), state.unit->specs().end());
    context.layout = state.unit->layout();
    context.rank = state.unit->rank();
    context.group = state.unit->group();
    context.device = device_;
    context.staging = TensorView(staging_.data(), DType::kU8, Shape({staging}));
    EK_ASSIGN_OR_RETURN(state.gatherer, policy_->CreateGatherer(std::move(context)));
    if (!state.unit->members().persistent) continue;
    const UnitLayout& layout = state.unit->layout();
    fixed_bytes_ += layout.gathered_bytes;
    persistent_transient_bytes_ = std::max(persistent_transient_bytes_, layout.transient_bytes);
    if (layout.planned_memory) {
      EK_ASSIGN_OR_RETURN(state.memory, device_->Allocate(layout.gathered_bytes));
    }
  }
  return absl::OkStatus();
}

absl::Status Coordinator::AddLeaves(absl::Span<const Leaf> leaves) {
  leaves_.resize(leaves.size());
  for (size_t l = 0; l < leaves.size(); ++l) {
    LeafState& leaf = leaves_[l];
    leaf.name = leaves[l].name;
    leaf.ready = device_->CreateEvent();
    leaf.early = device_->CreateEvent();
    leaf.released = device_->CreateEvent();
    for (int p : leaves[l].parameters) {
      for (size_t u = 0; u < units_.size(); ++u) {
        const std::vector<int>& of_unit = units_[u].unit->members().parameters;
        const auto found = std::find(of_unit.begin(), of_unit.end(), p);
        if (found == of_unit.end()) continue;
        leaf.sources.push_back({static_cast<int>(u), static_cast<int>(found - of_unit.begin())});
        if (std::find(leaf.units.begin(), leaf.units.end(), static_cast<int>(u)) == leaf.units.end()) {
          leaf.units.push_back(static_cast<int>(u));
        }
      }
    }
    std::sort(leaf.units.begin(), leaf.units.end());
    leaf.views.resize(leaf.sources.size());
    leaf.bound_versions.assign(leaf.units.size(), ~uint64_t{0});
  }
  return absl::OkStatus();
}

absl::Status Coordinator::CheckLeavesFit() const {
  for (const LeafState& leaf : leaves_) {
    int64_t need = fixed_bytes_;
    for (int u : leaf.units) {
      const Unit& unit = *units_[static_cast<size_t>(u)].unit;
      if (unit.resident() || unit.members().persistent) continue;
      need += unit.layout().gathered_bytes + unit.layout().transient_bytes;
    }
    if (need > options_.max_live_bytes) {
      return Error(absl::StatusCode::kResourceExhausted, "create", leaf.name,
                   absl::StrCat("needs ", need, " gathered bytes (", fixed_bytes_,
                                " of them at any time), max_live_bytes is ", options_.max_live_bytes));
    }
  }
  return absl::OkStatus();
}

PlanOptions Coordinator::PlanOptionsFor(bool recording) const {
  PlanOptions plan;
  plan.max_live_bytes = options_.max_live_bytes;
  plan.fixed_bytes = fixed_bytes_;
  plan.deferred_free = recording;
  for (const UnitState& state : units_) {
    if (!state.unit->resident() && !state.unit->layout().planned_memory) plan.deferred_free = true;
  }
  if (recording) return plan;
  plan.prefetch_bytes = options_.prefetch_bytes;
  plan.reuse_distance_bytes = options_.reuse_distance_bytes;
  return plan;
}

absl::StatusOr<FetchPlan> Coordinator::BuildPlan(const std::vector<Visit>& visits, bool recording) const {
  std::vector<PlanUnit> units;
  for (const UnitState& state : units_) {
    const UnitLayout& layout = state.unit->layout();
    units.push_back({state.unit->name(), layout.gathered_bytes, layout.transient_bytes,
                     state.unit->resident() || state.unit->members().persistent});
  }
  std::vector<PlanLeaf> leaves;
  for (const LeafState& leaf : leaves_) leaves.push_back({leaf.name, leaf.units});
  return FetchPlan::Build(std::move(units), std::move(leaves), visits, PlanOptionsFor(recording));
}

bool Coordinator::walking() const {
  const auto found = traces_.find(trace_name_);
  return !left_plan_ && found != traces_.end() && found->second.plan.has_value();
}

absl::StatusOr<std::optional<absl::Span<const PlanAction>>> Coordinator::Visited(Visit visit) {
  std::optional<absl::Span<const PlanAction>> none;
  const size_t position = visits_.size();
  visits_.push_back(visit);
  if (!walking()) return none;
  const FetchPlan& plan = *traces_.at(trace_name_).plan;
  if (position < static_cast<size_t>(plan.num_visits()) && plan.visit(static_cast<int>(position)) == visit) {
    return std::optional<absl::Span<const PlanAction>>(plan.actions(static_cast<int>(position)));
  }
  EK_RETURN_IF_ERROR(LeavePlan());
  return none;
}

absl::Status Coordinator::LeavePlan() {
  left_plan_ = true;
  ++counts_.trace_changes;
  std::vector<int> unused;
  for (size_t u = 0; u < units_.size(); ++u) {
    const UnitState& state = units_[u];
    if (state.gathered && state.users == 0 && !state.unit->members().persistent) unused.push_back(static_cast<int>(u));
  }
  return FreeUnits(unused, dropped_.get());
}

absl::StatusOr<FetchedLeaf> Coordinator::Fetch(int index) {
  absl::MutexLock lock(&mutex_);
  LeafState& leaf = leaves_[static_cast<size_t>(index)];
  if (leaf.users == 0) {
    if (persistent_stale_) EK_RETURN_IF_ERROR(RefreshPersistent());
    HostOperations count(device_, &counts_.fetch_host_operations);
    EK_RETURN_IF_ERROR(FetchLocked(leaf, index));
  }
  ++leaf.users;
  return FetchedLeaf{leaf.views, &leaf.generation, leaf.generation};
}

absl::Status Coordinator::FetchLocked(LeafState& leaf, int index) {
  EK_ASSIGN_OR_RETURN(const auto planned, Visited({Visit::Kind::kFetch, index}));
  ++counts_.fetches;
  bool gathers = false;
  for (int u : leaf.units) {
    UnitState& state = units_[static_cast<size_t>(u)];
    if (state.unit->resident() || state.unit->members().persistent) continue;
    gathers = true;
    if (state.gathered && state.users == 0 && !state.early) ++counts_.reused;
  }
  if (gathers) ++counts_.fetch_cycles;
  std::vector<int> wanted;
  std::vector<int> early;
  std::vector<int> dropped;
  if (planned.has_value()) {
    for (const PlanAction& action : *planned) {
      std::vector<int>& list = action.kind == PlanAction::Kind::kGather     ? wanted
                               : action.kind == PlanAction::Kind::kPrefetch ? early
                                                                            : dropped;
      list.push_back(action.unit);
    }
  } else {
    absl::StatusOr<std::vector<int>> missing = MissingUnits(leaf);
    if (!missing.ok()) {
      visits_.pop_back();
      return missing.status();
    }
    wanted = *std::move(missing);
  }
  EK_RETURN_IF_ERROR(FreeUnits(dropped, leaf.released.get()));
  EK_RETURN_IF_ERROR(GatherUnits(wanted, leaf.ready.get()));
  EK_RETURN_IF_ERROR(JoinUnits(leaf.units));
  for (int u : leaf.units) {
    ++units_[static_cast<size_t>(u)].users;
    units_[static_cast<size_t>(u)].early = false;
  }
  BindViews(leaf);
  EK_RETURN_IF_ERROR(GatherUnits(early, leaf.early.get()));
  for (int u : early) units_[static_cast<size_t>(u)].early = true;
  counts_.prefetched += static_cast<int64_t>(early.size());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> Coordinator::MissingUnits(const LeafState& leaf) const {
  std::vector<int> missing;
  int64_t need = 0;
  for (int u : leaf.units) {
    const UnitState& state = units_[static_cast<size_t>(u)];
    if (state.unit->resident() || state.gathered) continue;
    missing.push_back(u);
    need += state.unit->layout().gathered_bytes + state.unit->layout().transient_bytes;
  }
  const int64_t live = counts_.gathered_bytes - pending_bytes_;
  if (need > options_.max_live_bytes - live) {
    return Error(absl::StatusCode::kResourceExhausted, "fetch", leaf.name,
                 absl::StrCat("needs ", need, " bytes more while ", live, " are live; max_live_bytes is ",
                              options_.max_live_bytes));
  }
  return missing;
}

absl::Status Coordinator::GatherUnits(absl::Span<const int> units, Event* ready) {
  if (units.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(WaitForReuse(units));
  for (int u : units) {
    UnitState& state = units_[static_cast<size_t>(u)];
    if (!reclaim_.empty()) EK_RETURN_IF_ERROR(Reclaim());
    EK_ASSIGN_OR_RETURN(const TensorView place, PlaceFor(u));
    EK_RETURN_IF_ERROR(GatherUnit(state, place));
    Grow(state.unit->layout().gathered_bytes + state.unit->layout().transient_bytes);
    state.ready = ready;
  }
  return policy_->leaf_edges() ? comm_->Record(ready) : absl::OkStatus();
}

absl::Status Coordinator::GatherUnit(UnitState& state, TensorView place) {
  if (!state.unit->layout().planned_memory || place.raw() != state.place.raw()) ++state.bind_version;
  state.place = place;
  ++counts_.gathers;
  order_digest_ = CombineDigests(order_digest_, static_cast<uint64_t>(&state - units_.data()));
  EK_RETURN_IF_ERROR(state.gatherer->Gather(state.unit->weight_shard(), place, *comm_));
  state.gathered = true;
  state.joined = false;
  state.early = false;
  state.transient = state.unit->layout().transient_bytes > 0;
  return absl::OkStatus();
}

absl::StatusOr<TensorView> Coordinator::PlaceFor(int u) {
  UnitState& state = units_[static_cast<size_t>(u)];
  const UnitLayout& layout = state.unit->layout();
  if (!layout.planned_memory) return TensorView();
  state.in_arena = walking();
  std::byte* place = nullptr;
  if (state.in_arena) {
    place = arena_.data() + traces_.at(trace_name_).plan->offset(u);
  } else {
    EK_ASSIGN_OR_RETURN(state.memory, device_->Allocate(layout.gathered_bytes));
    place = state.memory.data();
  }
  return TensorView(place, DType::kU8, Shape({layout.gathered_bytes}));
}

// One wait covers all: releases are numbered in the order of the compute stream.
absl::Status Coordinator::WaitForReuse(absl::Span<const int> units) {
  if (!walking()) return absl::OkStatus();
  const FetchPlan& plan = *traces_.at(trace_name_).plan;
  uint64_t latest = waited_number_;
  Event* event = nullptr;
  for (int u : units) {
    if (!units_[static_cast<size_t>(u)].unit->layout().planned_memory) continue;
    for (int n : plan.neighbours(u)) {
      const UnitState& neighbour = units_[static_cast<size_t>(n)];
      if (neighbour.release_number <= latest) continue;
      latest = neighbour.release_number;
      event = neighbour.released;
    }
  }
  if (event == nullptr) return absl::OkStatus();
  waited_number_ = latest;
  return comm_->Wait(event);
}

absl::Status Coordinator::JoinUnits(absl::Span<const int> units) {
  std::vector<Event*> waited;
  for (int u : units) {
    UnitState& state = units_[static_cast<size_t>(u)];
    if (state.unit->resident() || state.joined) continue;
    state.joined = true;
    EK_RETURN_IF_ERROR(state.gatherer->Join(*compute_));
    if (policy_->leaf_edges() && std::find(waited.begin(), waited.end(), state.ready) == waited.end()) {
      waited.push_back(state.ready);
      EK_RETURN_IF_ERROR(compute_->Wait(state.ready));
    }
    if (check_ != nullptr && check_->wants(u)) {
      EK_RETURN_IF_ERROR(check_->Add(u, state.gatherer->views(), *compute_));
    }
    if (!state.transient) continue;
    state.transient = false;
    GiveBack(u, state.unit->layout().transient_bytes);
  }
  return absl::OkStatus();
}

void Coordinator::BindViews(LeafState& leaf) {
  bool same = true;
  for (size_t i = 0; i < leaf.units.size(); ++i) {
    const uint64_t version = units_[static_cast<size_t>(leaf.units[i])].bind_version;
    same = same && leaf.bound_versions[i] == version;
    leaf.bound_versions[i] = version;
  }
  if (same) return;
  for (size_t i = 0; i < leaf.sources.size(); ++i) {
    const UnitState& state = units_[static_cast<size_t>(leaf.sources[i].first)];
    const auto views = state.unit->resident() ? state.unit->resident_views() : state.gatherer->views();
    leaf.views[i] = views[static_cast<size_t>(leaf.sources[i].second)];
  }
}

absl::Status Coordinator::Release(int index) {
  absl::MutexLock lock(&mutex_);
  LeafState& leaf = leaves_[static_cast<size_t>(index)];
  if (leaf.users == 0) {
    return Error(absl::StatusCode::kFailedPrecondition, "release", leaf.name, "the leaf is not fetched");
  }
  if (--leaf.users > 0) return absl::OkStatus();
  ++leaf.generation;
  HostOperations count(device_, &counts_.fetch_host_operations);
  return ReleaseLocked(leaf, index);
}

absl::Status Coordinator::ReleaseLocked(LeafState& leaf, int index) {
  for (int u : leaf.units) --units_[static_cast<size_t>(u)].users;
  EK_ASSIGN_OR_RETURN(const auto planned, Visited({Visit::Kind::kRelease, index}));
  std::vector<int> unused;
  if (planned.has_value()) {
    for (const PlanAction& action : *planned) unused.push_back(action.unit);
  } else {
    for (int u : leaf.units) {
      const UnitState& state = units_[static_cast<size_t>(u)];
      if (state.gathered && state.users == 0 && !state.unit->members().persistent) unused.push_back(u);
    }
  }
  return FreeUnits(unused, leaf.released.get());
}

absl::Status Coordinator::FreeUnits(absl::Span<const int> units, Event* released) {
  if (units.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(JoinUnits(units));
  ++release_number_;
  for (int u : units) {
    UnitState& state = units_[static_cast<size_t>(u)];
    if (state.early) ++counts_.prefetch_wasted;
    if (options_.poison_released && state.in_arena) {
      EK_RETURN_IF_ERROR(compute_->Fill(state.place.raw(), kPoison, state.place.num_bytes()));
    }
    EK_RETURN_IF_ERROR(state.gatherer->Release(*compute_));
    state.gathered = false;
    state.early = false;
    state.freed = true;
    state.released = released;
    state.release_number = release_number_;
    GiveBack(u, state.unit->layout().gathered_bytes);
  }
  return policy_->leaf_edges() ? compute_->Record(released) : absl::OkStatus();
}

void Coordinator::Grow(int64_t bytes) {
  counts_.gathered_bytes += bytes;
  counts_.peak_gathered_bytes = std::max(counts_.peak_gathered_bytes, counts_.gathered_bytes);
}

// A place in the arena is free for the next gather at once (it waits on the stream); allocated memory has to be
// reclaimed by the host first.
void Coordinator::GiveBack(int u, int64_t bytes) {
  UnitState& state = units_[static_cast<size_t>(u)];
  if (state.in_arena) {
    state.freed = false;
    counts_.gathered_bytes -= bytes;
    return;
  }
  pending_bytes_ += bytes;
  if (!state.awaiting_reclaim) reclaim_.push_back(u);
  state.awaiting_reclaim = true;
}

absl::Status Coordinator::Reclaim() {
  for (int u : reclaim_) {
    UnitState& state = units_[static_cast<size_t>(u)];
    if (state.freed && policy_->leaf_edges()) state.released->Synchronize();
    EK_RETURN_IF_ERROR(state.gatherer->Reclaim());
    if (state.freed) state.memory.Reset();
    state.freed = false;
    state.awaiting_reclaim = false;
  }
  reclaim_.clear();
  counts_.gathered_bytes -= std::exchange(pending_bytes_, 0);
  return absl::OkStatus();
}

// One after the other, so that staging memory is needed once. Nothing is fetched and both streams have passed the
// step, so that the old copies can be overwritten.
absl::Status Coordinator::RefreshPersistent() {
  persistent_stale_ = false;
  bool any = false;
  for (size_t u = 0; u < units_.size(); ++u) {
    UnitState& state = units_[u];
    if (state.unit->resident() || !state.unit->members().persistent) continue;
    any = true;
    if (state.gathered) {
      EK_RETURN_IF_ERROR(state.gatherer->Release(*compute_));
      EK_RETURN_IF_ERROR(compute_->Synchronize());
      EK_RETURN_IF_ERROR(state.gatherer->Reclaim());
    }
    const UnitLayout& layout = state.unit->layout();
    const TensorView place = layout.planned_memory
                                 ? TensorView(state.memory.data(), DType::kU8, Shape({layout.gathered_bytes}))
                                 : TensorView();
    EK_RETURN_IF_ERROR(GatherUnit(state, place));
    state.ready = refreshed_.get();
    state.joined = true;
    EK_RETURN_IF_ERROR(state.gatherer->Join(*compute_));
    if (!state.transient) continue;
    state.transient = false;
    Grow(layout.transient_bytes);
    EK_RETURN_IF_ERROR(state.gatherer->Reclaim());
    counts_.gathered_bytes -= layout.transient_bytes;
  }
  if (!any || !policy_->leaf_edges()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(comm_->Record(refreshed_.get()));
  return compute_->Wait(refreshed_.get());
}

absl::Status Coordinator::CheckNothingFetched() const {
  absl::MutexLock lock(&mutex_);
  for (const LeafState& leaf : leaves_) {
    if (leaf.users > 0) {
      return Error(absl::StatusCode::kFailedPrecondition, "step", leaf.name,
                   absl::StrCat("the leaf is still fetched by ", leaf.users, " users"));
    }
  }
  return absl::OkStatus();
}

absl::Status Coordinator::EndPass() {
  absl::MutexLock lock(&mutex_);
  return EndPassLocked();
}

absl::Status Coordinator::EndPassLocked() {
  if (visits_.empty()) return absl::OkStatus();
  const bool walked = walking();
  Trace& trace = traces_[trace_name_];
  const bool short_pass = walked && visits_.size() != trace.visits.size();
  if (short_pass) EK_RETURN_IF_ERROR(LeavePlan());
  {
    HostOperations count(device_, &counts_.fetch_host_operations);
    EK_RETURN_IF_ERROR(Reclaim());
  }
  if (walked && !short_pass) {
    visits_.clear();
    return absl::OkStatus();
  }
  const bool changed = left_plan_;
  left_plan_ = false;
  trace.plan.reset();
  if (!changed) {
    EK_ASSIGN_OR_RETURN(const FetchPlan recorded, BuildPlan(visits_, true));
    counts_.predicted_peak_gathered_bytes = std::max(
        {counts_.predicted_peak_gathered_bytes, recorded.peak_bytes(), fixed_bytes_ + persistent_transient_bytes_});
  }
  EK_ASSIGN_OR_RETURN(FetchPlan plan, BuildPlan(visits_, false));
  trace.visits = std::exchange(visits_, {});
  counts_.predicted_peak_gathered_bytes = std::max(counts_.predicted_peak_gathered_bytes, plan.peak_bytes());
  if (!PlanOptionsFor(false).deferred_free && plan.arena_bytes() > arena_.bytes()) {
    arena_.Reset();
    EK_ASSIGN_OR_RETURN(arena_, device_->Allocate(plan.arena_bytes()));
    counts_.arena_bytes = arena_.bytes();
  }
  trace.plan = std::move(plan);
  return absl::OkStatus();
}

absl::Status Coordinator::UseTrace(absl::string_view name) {
  EK_RETURN_IF_ERROR(CheckNothingFetched());
  EK_RETURN_IF_ERROR(comm_->Synchronize());
  EK_RETURN_IF_ERROR(compute_->Synchronize());
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(EndPassLocked());
  trace_name_ = std::string(name);
  return absl::OkStatus();
}

void Coordinator::WeightsChanged() {
  absl::MutexLock lock(&mutex_);
  persistent_stale_ = true;
}

void Coordinator::UseReplicaCheck(ReplicaCheck* check) {
  absl::MutexLock lock(&mutex_);
  check_ = check;
}

bool Coordinator::trace_complete() const {
  absl::MutexLock lock(&mutex_);
  return walking();
}

uint64_t Coordinator::order_digest() const {
  absl::MutexLock lock(&mutex_);
  return order_digest_;
}

std::string Coordinator::PlanText() const {
  absl::MutexLock lock(&mutex_);
  return walking() ? traces_.at(trace_name_).plan->ToString() : "";
}

CoordinatorCounts Coordinator::counts() const {
  absl::MutexLock lock(&mutex_);
  return counts_;
}

void Coordinator::ResetPeak() {
  absl::MutexLock lock(&mutex_);
  counts_.peak_gathered_bytes = counts_.gathered_bytes;
}

}  // namespace evenkeel::zero3
