// Fetch and release of leaves: gathers what is missing, makes the edges between the two streams, keeps the memory.
//
// While a pass (a recorded order of visits) is unknown it records: units are gathered on demand into fresh memory. Once
// known it walks the FetchPlan: gathers early, keeps what is needed soon, uses the places of the plan. Leaving the plan
// costs the early gathers and the rest of the pass, is counted, and the new order is recorded; it is never an error.
// Whether a unit is gathered depends only on the calls made, so all ranks gather the same.
#ifndef EVENKEEL_ZERO3_COORDINATOR_H_
#define EVENKEEL_ZERO3_COORDINATOR_H_

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/fetch_plan.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/replica_check.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

struct CoordinatorOptions {
  int64_t prefetch_bytes = 0;
  int64_t reuse_distance_bytes = -1;
  int64_t max_live_bytes = std::numeric_limits<int64_t>::max();
  bool poison_released = false;  // fill released planned memory with NaN, on the compute stream
};

struct CoordinatorCounts {
  int64_t fetches = 0;
  int64_t gathers = 0;
  int64_t prefetched = 0;
  int64_t prefetch_wasted = 0;
  int64_t reused = 0;
  int64_t gathered_bytes = 0;
  int64_t peak_gathered_bytes = 0;
  int64_t predicted_peak_gathered_bytes = 0;
  int64_t arena_bytes = 0;
  int64_t trace_changes = 0;
  int64_t fetch_host_operations = 0;
  int64_t fetch_cycles = 0;
};

// What Fetch hands out; see LeafWeights.
struct FetchedLeaf {
  absl::Span<const ConstTensorView> views;
  const uint64_t* current_generation = nullptr;
  uint64_t generation = 0;
};

// Thread-safe. Everything passed in outlives it.
class Coordinator {
 public:
  // ResourceExhausted naming the leaf that max_live_bytes cannot hold.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Create(std::vector<Unit*> units, absl::Span<const Leaf> leaves,
                                                             const FetchPolicy* policy,
                                                             const CoordinatorOptions& options, Device* device,
                                                             Stream* compute, Stream* comm);
  ~Coordinator();

  absl::StatusOr<FetchedLeaf> Fetch(int leaf);
  absl::Status Release(int leaf);
  // FailedPrecondition naming a leaf that is fetched.
  absl::Status CheckNothingFetched() const;
  // Ends the pass: drops what is still gathered and learns from the order. Nothing is fetched; both streams are idle.
  absl::Status EndPass();
  // Ends the pass and continues with the order called `name`.
  absl::Status UseTrace(absl::string_view name);
  // The shards have changed: persistent units are gathered anew at the next Fetch.
  void WeightsChanged();
  // From now on every unit's first gather is digested into `check`; null: no more.
  void UseReplicaCheck(ReplicaCheck* check);
  bool trace_complete() const;
  // A digest of which units were gathered, in order, since the coordinator was made.
  uint64_t order_digest() const;
  // The plan being walked, as text; empty while recording.
  std::string PlanText() const;
  absl::Span<const int> UnitsOf(int leaf) const { return leaves_[static_cast<size_t>(leaf)].units; }

  CoordinatorCounts counts() const;
  void ResetPeak();

 private:
  struct UnitState {
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
    TensorView place;           // of planned policies
    uint64_t bind_version = 0;  // moves when the views may have moved
  };
  struct LeafState {
    std::string name;
    std::vector<int> units;
    std::vector<std::pair<int, int>> sources;  // of every view: unit, position inside it
    std::vector<ConstTensorView> views;
    std::vector<uint64_t> bound_versions;  // of its units, when the views were taken
    int users = 0;
    uint64_t generation = 0;
    std::unique_ptr<Event> ready;
    std::unique_ptr<Event> early;
    std::unique_ptr<Event> released;
  };
  struct Trace {
    std::vector<Visit> visits;
    std::optional<FetchPlan> plan;
  };

  Coordinator(const FetchPolicy* policy, const CoordinatorOptions& options, Device* device, Stream* compute,
              Stream* comm)
      : policy_(policy), options_(options), device_(device), compute_(compute), comm_(comm) {}

  absl::Status AddUnits(std::vector<Unit*> units);
  absl::Status AddLeaves(absl::Span<const Leaf> leaves);
  absl::Status CheckLeavesFit() const;
  PlanOptions PlanOptionsFor(bool recording) const;
  absl::StatusOr<FetchPlan> BuildPlan(const std::vector<Visit>& visits, bool recording) const;

  bool walking() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes the visit. Returns its planned actions, or nothing when there is no plan for it.
  absl::StatusOr<std::optional<absl::Span<const PlanAction>>> Visited(Visit visit)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LeavePlan() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FetchLocked(LeafState& leaf, int index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReleaseLocked(LeafState& leaf, int index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<int>> MissingUnits(const LeafState& leaf) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GatherUnits(absl::Span<const int> units, Event* ready) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GatherUnit(UnitState& unit, TensorView place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<TensorView> PlaceFor(int unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForReuse(absl::Span<const int> units) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status JoinUnits(absl::Span<const int> units) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status FreeUnits(absl::Span<const int> units, Event* released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Reclaim() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RefreshPersistent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndPassLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BindViews(LeafState& leaf) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Grow(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(int unit, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const FetchPolicy* const policy_;
  const CoordinatorOptions options_;
  Device* const device_;
  Stream* const compute_;
  Stream* const comm_;

  mutable absl::Mutex mutex_;
  std::vector<UnitState> units_;
  std::vector<LeafState> leaves_;
  Buffer staging_;
  Buffer arena_;
  int64_t fixed_bytes_ = 0;                 // persistent units and staging
  int64_t persistent_transient_bytes_ = 0;  // on top, while persistent units are refreshed
  bool persistent_stale_ = true;
  std::unique_ptr<Event> refreshed_;
  std::unique_ptr<Event> dropped_;

  std::map<std::string, Trace> traces_ ABSL_GUARDED_BY(mutex_);
  std::string trace_name_ ABSL_GUARDED_BY(mutex_) = "step";
  std::vector<Visit> visits_ ABSL_GUARDED_BY(mutex_);  // of this pass so far
  bool left_plan_ ABSL_GUARDED_BY(mutex_) = false;     // in this pass
  uint64_t release_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waited_number_ ABSL_GUARDED_BY(mutex_) = 0;  // releases that the comm stream has waited for
  std::vector<int> reclaim_ ABSL_GUARDED_BY(mutex_);
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t order_digest_ ABSL_GUARDED_BY(mutex_) = 0;
  ReplicaCheck* check_ ABSL_GUARDED_BY(mutex_) = nullptr;
  CoordinatorCounts counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_COORDINATOR_H_
