// Fetch and release of leaves: who uses what, and what the recorded order says to do about it.
//
// While a pass (a recorded order of visits) is unknown it records: units are gathered on demand into fresh memory. Once
// known it walks the FetchPlan: gathers early, keeps what is needed soon, uses the places of the plan. Leaving the plan
// costs the early gathers and the rest of the pass, is counted, and the new order is recorded; it is never an error.
// Whether a unit is gathered depends only on the calls made, so all ranks gather the same.
//
// The order is PassRecorder's, memory and stream edges are those of GatheredUnits; this class joins the two.
#ifndef EVENKEEL_ZERO3_COORDINATOR_H_
#define EVENKEEL_ZERO3_COORDINATOR_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/gathered_units.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/order_log.h"
#include "evenkeel/zero3/pass_recorder.h"
#include "evenkeel/zero3/replica_check.h"
#include "evenkeel/zero3/shard_guard.h"
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
  int64_t predicted_peak_gathered_bytes = 0;  // of the passes that have ended
  int64_t arena_bytes = 0;
  int64_t trace_changes = 0;
  int64_t fetch_host_operations = 0;
  int64_t fetch_cycles = 0;
};

// What Fetch hands out; see LeafWeights.
struct FetchedLeaf {
  absl::Span<const ConstTensorView> views;
  const std::atomic<uint64_t>* current_generation = nullptr;
  uint64_t generation = 0;
};

// Not thread-safe; the generation of a leaf may be read at any time. Everything passed in outlives it.
class Coordinator {
 public:
  // ResourceExhausted naming the leaf that max_live_bytes cannot hold.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Create(std::vector<Unit*> units, absl::Span<const Leaf> leaves,
                                                             const FetchPolicy* policy,
                                                             const CoordinatorOptions& options, OrderLog* log,
                                                             Device* device, Stream* compute, Stream* comm);
  absl::StatusOr<FetchedLeaf> Fetch(int leaf);
  absl::Status Release(int leaf);
  // FailedPrecondition naming a leaf that is fetched.
  absl::Status CheckNothingFetched() const;
  // Ends the pass: drops what is still gathered and learns from the order. Nothing is fetched; both streams are idle.
  absl::Status EndPass();
  // Ends the pass and continues with the order called `name`.
  absl::Status UseTrace(absl::string_view name);
  // The shards have changed: persistent units are gathered anew at the next Fetch.
  void WeightsChanged() { persistent_stale_ = true; }
  // From now on every unit's first gather is digested into `check`; null: no more.
  void UseReplicaCheck(ReplicaCheck* check) { units_->UseReplicaCheck(check); }
  // From now on `guard` verifies every shard before it is gathered; null: no more.
  void UseShardGuard(ShardGuard* guard) { units_->UseShardGuard(guard); }
  bool trace_complete() const { return recorder_->walking(); }
  // The plan being walked, as text; empty while recording.
  std::string PlanText() const { return recorder_->walking() ? recorder_->plan().ToString() : ""; }
  absl::Span<const int> UnitsOf(int leaf) const { return leaves_[static_cast<size_t>(leaf)].units; }

  CoordinatorCounts counts() const;
  void ResetPeak();

 private:
  struct LeafState {
    std::string name;
    std::vector<int> units;
    std::vector<std::pair<int, int>> sources;  // of every view: unit, position inside it
    std::vector<ConstTensorView> views;
    std::vector<uint64_t> bound_versions;  // of its units, when the views were taken
    int users = 0;
    std::atomic<uint64_t> generation{0};
    std::unique_ptr<Event> ready;
    std::unique_ptr<Event> early;
    std::unique_ptr<Event> released;
  };

  Coordinator(const CoordinatorOptions& options, Device* device, Stream* compute, Stream* comm)
      : options_(options), device_(device), compute_(compute), comm_(comm), dropped_(device->CreateEvent()) {}

  void AddLeaves(absl::Span<const Leaf> leaves);
  void BindLeaf(const Leaf& from, LeafState& leaf) const;
  absl::Status CheckLeavesFit() const;
  void CreateRecorder();

  absl::StatusOr<PassRecorder::Step> Visited(Visit visit);
  absl::Status DropUnused();
  absl::Status FetchFirst(LeafState& leaf, int index);
  absl::Status ReleaseLast(LeafState& leaf, int index);
  void CountFetch(const LeafState& leaf);
  absl::StatusOr<std::vector<int>> MissingUnits(const LeafState& leaf) const;
  void BindViews(LeafState& leaf);

  const CoordinatorOptions options_;
  Device* const device_;
  Stream* const compute_;
  Stream* const comm_;
  std::unique_ptr<GatheredUnits> units_;
  std::unique_ptr<PassRecorder> recorder_;
  std::vector<LeafState> leaves_;
  std::unique_ptr<Event> dropped_;
  bool persistent_stale_ = true;
  CoordinatorCounts counts_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_COORDINATOR_H_
