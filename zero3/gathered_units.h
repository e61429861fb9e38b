// The gathered copies of storage units: where they lie, which stream edges keep them whole, and how many bytes they
// are.
//
// A unit is gathered on the comm stream into its place of the plan (an address that does not change), or, while the
// order is unknown, into fresh memory; joined to the compute stream before its first use; and freed behind an event on
// the compute stream after its last one. A place is written again only behind the releases of what lay there.
#ifndef EVENKEEL_ZERO3_GATHERED_UNITS_H_
#define EVENKEEL_ZERO3_GATHERED_UNITS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/fetch_plan.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/order_log.h"
#include "evenkeel/zero3/replica_check.h"
#include "evenkeel/zero3/shard_guard.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

struct GatherCounts {
  int64_t gathers = 0;
  int64_t prefetch_wasted = 0;
  int64_t gathered_bytes = 0;  // live now
  int64_t peak_gathered_bytes = 0;
};

// Not thread-safe. Everything passed in outlives it.
class GatheredUnits {
 public:
  // InvalidArgument where some units of the policy have planned memory and others bring their own.
  static absl::StatusOr<std::unique_ptr<GatheredUnits>> Create(std::vector<Unit*> units, const FetchPolicy* policy,
                                                               bool poison_released, OrderLog* log, Device* device,
                                                               Stream* compute, Stream* comm);
  // Queued work may still use the memory: waits for both streams.
  ~GatheredUnits();

  int size() const { return static_cast<int>(units_.size()); }
  const Unit& unit(int u) const { return *at(u).unit; }
  // Never gathered or freed by Gather and Free: everywhere anyway, or persistent.
  bool stays(int u) const { return at(u).unit->resident() || at(u).unit->members().persistent; }
  bool resident(int u) const { return at(u).unit->resident(); }
  bool gathered(int u) const { return at(u).gathered; }
  bool early(int u) const { return at(u).early; }
  int users(int u) const { return at(u).users; }
  // Gathered, used by nobody, and free to go.
  bool unused(int u) const { return at(u).gathered && at(u).users == 0 && !stays(u); }
  void AddUser(int u);
  void RemoveUser(int u) { --at(u).users; }
  void MarkEarly(int u) { at(u).early = true; }

  // Whole parameters, in unit order; they may move when bind_version moves.
  absl::Span<const ConstTensorView> views(int u) const;
  uint64_t bind_version(int u) const { return at(u).bind_version; }

  // Gathers units on the comm stream, into their places of `plan`; null: into fresh memory. `ready` stands for them.
  absl::Status Gather(absl::Span<const int> units, const FetchPlan* plan, Event* ready);
  // Makes the compute stream wait for what has not been joined yet.
  absl::Status Join(absl::Span<const int> units);
  // Behind the last use on the compute stream. `released` stands for it.
  absl::Status Free(absl::Span<const int> units, Event* released);
  // Waits for released memory that is not in the arena, and gives it back.
  absl::Status Reclaim();
  // Gathers the persistent units again, after an update; nothing is used and both streams have passed the update.
  absl::Status RefreshPersistent();
  // Room for a plan. Nothing is gathered.
  absl::Status ReserveArena(int64_t bytes);

  // Live at any time: persistent units and staging; and on top while persistent units are refreshed.
  int64_t fixed_bytes() const { return fixed_bytes_; }
  int64_t persistent_transient_bytes() const { return persistent_transient_bytes_; }
  // True when memory of released units is given back by Reclaim only.
  bool brings_own_memory() const { return brings_own_memory_; }
  int64_t arena_bytes() const { return arena_.bytes(); }
  // Live and not waiting to be reclaimed.
  int64_t needed_bytes() const { return counts_.gathered_bytes - pending_bytes_; }
  const GatherCounts& counts() const { return counts_; }
  void ResetPeak() { counts_.peak_gathered_bytes = counts_.gathered_bytes; }

  // From now on every unit's first gather is digested into `check`; null: no more.
  void UseReplicaCheck(ReplicaCheck* check) { check_ = check; }
  // From now on `guard` verifies every shard before it is gathered; null: no more.
  void UseShardGuard(ShardGuard* guard) { guard_ = guard; }

 private:
  struct State {
    Unit* unit = nullptr;
    std::unique_ptr<UnitGatherer> gatherer;
    bool gathered = false;
    bool joined = false;
    bool early = false;
    bool transient = false;         // transient bytes are still counted
    bool awaiting_reclaim = false;  // listed in reclaim_
    bool freed = false;             // memory goes back at the reclaim
    int users = 0;
    Event* ready = nullptr;     // of the gather; null where the gatherer has its own edges
    Event* released = nullptr;  // of the last release
    uint64_t release_number = 0;
    Buffer memory;  // persistent place, or fresh memory while recording
    bool in_arena = false;
    TensorView place;  // of planned policies
    uint64_t bind_version = 0;
  };

  GatheredUnits(const FetchPolicy* policy, bool poison_released, OrderLog* log, Device* device, Stream* compute,
                Stream* comm);
  State& at(int u) { return units_[static_cast<size_t>(u)]; }
  const State& at(int u) const { return units_[static_cast<size_t>(u)]; }
  absl::Status AddUnits(std::vector<Unit*> units);
  absl::Status AddGatherer(State& state, int64_t staging);
  absl::Status GatherInto(int u, TensorView place);
  absl::StatusOr<TensorView> PlaceFor(int u, const FetchPlan* plan);
  absl::Status WaitForReuse(absl::Span<const int> units, const FetchPlan& plan);
  absl::Status RefreshOne(int u);
  void Grow(int64_t bytes);
  void GiveBack(int u, int64_t bytes);

  const FetchPolicy* const policy_;
  const bool poison_released_;
  OrderLog* const log_;
  Device* const device_;
  Stream* const compute_;
  Stream* const comm_;
  std::vector<State> units_;
  Buffer staging_;
  Buffer arena_;
  bool brings_own_memory_ = false;
  int64_t fixed_bytes_ = 0;
  int64_t persistent_transient_bytes_ = 0;
  std::unique_ptr<Event> refreshed_;
  uint64_t release_number_ = 0;
  uint64_t waited_number_ = 0;  // releases that the comm stream has waited for
  std::vector<int> reclaim_;
  int64_t pending_bytes_ = 0;
  ReplicaCheck* check_ = nullptr;
  ShardGuard* guard_ = nullptr;
  GatherCounts counts_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_GATHERED_UNITS_H_
