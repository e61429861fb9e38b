#include "evenkeel/zero3/gathered_units.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

constexpr int kPoison = 0xff;

}  // namespace

GatheredUnits::GatheredUnits(const FetchPolicy* policy, bool poison_released, OrderLog* log, Device* device,
                             Stream* compute, Stream* comm)
    : policy_(policy),
      poison_released_(poison_released),
      log_(log),
      device_(device),
      compute_(compute),
      comm_(comm),
      refreshed_(device->CreateEvent()) {}

absl::StatusOr<std::unique_ptr<GatheredUnits>> GatheredUnits::Create(std::vector<Unit*> units,
                                                                     const FetchPolicy* policy, bool poison_released,
                                                                     OrderLog* log, Device* device, Stream* compute,
                                                                     Stream* comm) {
  std::unique_ptr<GatheredUnits> gathered(new GatheredUnits(policy, poison_released, log, device, compute, comm));
  EK_RETURN_IF_ERROR(gathered->AddUnits(std::move(units)));
  gathered->counts_.gathered_bytes = gathered->fixed_bytes_;
  gathered->ResetPeak();
  return gathered;
}

GatheredUnits::~GatheredUnits() {
  comm_->Synchronize().IgnoreError();
  compute_->Synchronize().IgnoreError();
}

absl::Status GatheredUnits::AddUnits(std::vector<Unit*> units) {
  int64_t staging = 0;
  bool any_planned = false;
  for (const Unit* unit : units) {
    if (unit->resident()) continue;
    staging = std::max(staging, unit->layout().staging_bytes);
    (unit->layout().planned_memory ? any_planned : brings_own_memory_) = true;
  }
  if (any_planned && brings_own_memory_) {
    ErrorContext where;
    where.module = "zero3";
    where.operation = "create";
    where.group = std::string(policy_->name());
    return MakeError(absl::StatusCode::kInvalidArgument, where,
                     "the policy plans the memory of some units only; it must be all or none");
  }
  EK_ASSIGN_OR_RETURN(staging_, device_->Allocate(staging));
  fixed_bytes_ = staging;
  units_.resize(units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    units_[i].unit = units[i];
    if (!units[i]->resident()) EK_RETURN_IF_ERROR(AddGatherer(units_[i], staging));
  }
  return absl::OkStatus();
}

absl::Status GatheredUnits::AddGatherer(State& state, int64_t staging) {
  GathererContext context;
  context.parameters.assign(state.unit->specs().begin(), state.unit->specs().end());
  context.layout = state.unit->layout();
  context.rank = state.unit->rank();
  context.group = state.unit->group();
  context.device = device_;
  context.staging = TensorView(staging_.data(), DType::kU8, Shape({staging}));
  EK_ASSIGN_OR_RETURN(state.gatherer, policy_->CreateGatherer(std::move(context)));
  if (!state.unit->members().persistent) return absl::OkStatus();
  const UnitLayout& layout = state.unit->layout();
  fixed_bytes_ += layout.gathered_bytes;
  persistent_transient_bytes_ = std::max(persistent_transient_bytes_, layout.transient_bytes);
  if (layout.planned_memory) {
    EK_ASSIGN_OR_RETURN(state.memory, device_->Allocate(layout.gathered_bytes));
  }
  return absl::OkStatus();
}

void GatheredUnits::AddUser(int u) {
  ++at(u).users;
  at(u).early = false;
}

absl::Span<const ConstTensorView> GatheredUnits::views(int u) const {
  return at(u).unit->resident() ? at(u).unit->resident_views() : at(u).gatherer->views();
}

absl::Status GatheredUnits::Gather(absl::Span<const int> units, const FetchPlan* plan, Event* ready) {
  if (units.empty()) return absl::OkStatus();
  if (plan != nullptr) EK_RETURN_IF_ERROR(WaitForReuse(units, *plan));
  for (int u : units) {
    if (!reclaim_.empty()) EK_RETURN_IF_ERROR(Reclaim());
    EK_ASSIGN_OR_RETURN(const TensorView place, PlaceFor(u, plan));
    EK_RETURN_IF_ERROR(GatherInto(u, place));
    Grow(unit(u).layout().gathered_bytes + unit(u).layout().transient_bytes);
    at(u).ready = ready;
  }
  return policy_->leaf_edges() ? comm_->Record(ready) : absl::OkStatus();
}

absl::Status GatheredUnits::GatherInto(int u, TensorView place) {
  State& state = at(u);
  if (!state.unit->layout().planned_memory || place.raw() != state.place.raw()) ++state.bind_version;
  state.place = place;
  ++counts_.gathers;
  log_->Add(OrderLog::Call::kGather, u);
  if (guard_ != nullptr) guard_->Verify(u);
  EK_RETURN_IF_ERROR(state.gatherer->Gather(state.unit->weight_shard(), place, *comm_));
  state.gathered = true;
  state.joined = false;
  state.early = false;
  state.transient = state.unit->layout().transient_bytes > 0;
  return absl::OkStatus();
}

absl::StatusOr<TensorView> GatheredUnits::PlaceFor(int u, const FetchPlan* plan) {
  State& state = at(u);
  const UnitLayout& layout = state.unit->layout();
  if (!layout.planned_memory) return TensorView();
  state.in_arena = plan != nullptr;
  std::byte* place = nullptr;
  if (state.in_arena) {
    place = arena_.data() + plan->offset(u);
  } else {
    EK_ASSIGN_OR_RETURN(state.memory, device_->Allocate(layout.gathered_bytes));
    place = state.memory.data();
  }
  return TensorView(place, DType::kU8, Shape({layout.gathered_bytes}));
}

// One wait covers all: releases are numbered in the order of the compute stream.
absl::Status GatheredUnits::WaitForReuse(absl::Span<const int> units, const FetchPlan& plan) {
  uint64_t latest = waited_number_;
  Event* event = nullptr;
  for (int u : units) {
    if (!unit(u).layout().planned_memory) continue;
    for (int n : plan.neighbours(u)) {
      const State& neighbour = at(n);
      if (neighbour.release_number <= latest) continue;
      latest = neighbour.release_number;
      event = neighbour.released;
    }
  }
  if (event == nullptr) return absl::OkStatus();
  waited_number_ = latest;
  return comm_->Wait(event);
}

absl::Status GatheredUnits::Join(absl::Span<const int> units) {
  std::vector<Event*> waited;
  for (int u : units) {
    State& state = at(u);
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

absl::Status GatheredUnits::Free(absl::Span<const int> units, Event* released) {
  if (units.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Join(units));
  ++release_number_;
  for (int u : units) {
    State& state = at(u);
    if (state.early) ++counts_.prefetch_wasted;
    if (poison_released_ && state.in_arena) {
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

void GatheredUnits::Grow(int64_t bytes) {
  counts_.gathered_bytes += bytes;
  counts_.peak_gathered_bytes = std::max(counts_.peak_gathered_bytes, counts_.gathered_bytes);
}

// A place in the arena is free for the next gather at once (it waits on the stream); allocated memory has to be
// reclaimed by the host first.
void GatheredUnits::GiveBack(int u, int64_t bytes) {
  State& state = at(u);
  if (state.in_arena) {
    state.freed = false;
    counts_.gathered_bytes -= bytes;
    return;
  }
  pending_bytes_ += bytes;
  if (!state.awaiting_reclaim) reclaim_.push_back(u);
  state.awaiting_reclaim = true;
}

absl::Status GatheredUnits::Reclaim() {
  for (int u : reclaim_) {
    State& state = at(u);
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

// One after the other, so that staging memory is needed once.
absl::Status GatheredUnits::RefreshPersistent() {
  bool any = false;
  for (int u = 0; u < size(); ++u) {
    if (unit(u).resident() || !unit(u).members().persistent) continue;
    any = true;
    EK_RETURN_IF_ERROR(RefreshOne(u));
  }
  if (!any || !policy_->leaf_edges()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(comm_->Record(refreshed_.get()));
  return compute_->Wait(refreshed_.get());
}

absl::Status GatheredUnits::RefreshOne(int u) {
  State& state = at(u);
  if (state.gathered) {
    EK_RETURN_IF_ERROR(state.gatherer->Release(*compute_));
    EK_RETURN_IF_ERROR(compute_->Synchronize());
    EK_RETURN_IF_ERROR(state.gatherer->Reclaim());
  }
  const UnitLayout& layout = state.unit->layout();
  const TensorView place = layout.planned_memory
                               ? TensorView(state.memory.data(), DType::kU8, Shape({layout.gathered_bytes}))
                               : TensorView();
  EK_RETURN_IF_ERROR(GatherInto(u, place));
  state.ready = refreshed_.get();
  state.joined = true;
  EK_RETURN_IF_ERROR(state.gatherer->Join(*compute_));
  if (!state.transient) return absl::OkStatus();
  state.transient = false;
  Grow(layout.transient_bytes);
  EK_RETURN_IF_ERROR(state.gatherer->Reclaim());
  counts_.gathered_bytes -= layout.transient_bytes;
  return absl::OkStatus();
}

absl::Status GatheredUnits::ReserveArena(int64_t bytes) {
  if (bytes <= arena_.bytes()) return absl::OkStatus();
  arena_.Reset();
  EK_ASSIGN_OR_RETURN(arena_, device_->Allocate(bytes));
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3
