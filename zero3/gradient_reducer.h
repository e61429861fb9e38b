// From full gradients on every rank to averaged gradient shards.
//
// A unit's full gradients are accumulated in one zeroed buffer (f32 or f64). Flushing sums it over the unit's group in
// the canonical tree and adds sum / DP size to this rank's shard; a rank that added nothing sends zeros. Buffers come
// from a small pool and are used again without asking for memory: the reuse edge goes from the reduction (comm stream)
// to the next zero fill (compute stream).
//
// With `micro_batches` > 1 the reduced sums of a step are added by the canonical tree as they come (at most one pending
// sum per level of the tree), and the shard gets total / (DP size * micro_batches) with the last one. Micro-batch m of
// data replica r is then leaf m * W + r of one tree over all micro-batches of all replicas: for powers of two the same
// tree whatever W is.
#ifndef EVENKEEL_ZERO3_GRADIENT_REDUCER_H_
#define EVENKEEL_ZERO3_GRADIENT_REDUCER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

struct ReducerOptions {
  int dp_size = 1;                  // what sums are divided by, for both families
  int64_t reduce_bucket_bytes = 0;  // 0: a unit at once
  int micro_batches = 1;            // a power of two; above 1: flushes of a unit per step, added by the tree
};

// Not thread-safe. Streams, device and units outlive it.
class GradientReducer {
 public:
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(std::vector<Unit*> units,
                                                                 const ReducerOptions& options, Device* device,
                                                                 Stream* compute, Stream* comm);

  // Views of the unit's full gradients, in unit order; zero when opened anew. Frozen parameters: 0 elements.
  absl::StatusOr<absl::Span<const TensorView>> Open(int unit);
  bool is_open(int unit) const { return slots_[static_cast<size_t>(unit)].buffer >= 0; }
  // Opens if need be, reduces, closes. Collective over the unit's group.
  absl::Status Flush(int unit);
  // Closes without reducing, and forgets the pending sums.
  absl::Status Discard(int unit);
  // With micro_batches > 1: FailedPrecondition naming a unit that was flushed another number of times in this step.
  absl::Status CheckComplete() const;

  // A digest of which units were reduced, in order.
  uint64_t order_digest() const { return order_digest_; }
  int64_t num_collectives() const { return num_collectives_; }
  // Bytes of all pooled buffers.
  int64_t pool_bytes() const;
  // Bytes of the pending sums: log2(micro_batches) gradient shards.
  int64_t pending_bytes() const;

 private:
  struct Pooled {
    Buffer buffer;
    std::unique_ptr<Event> free;  // recorded on the comm stream behind the last reduction
    bool in_use = false;
    int64_t freed = 0;  // when, in numbers of give-backs
  };
  struct Slot {
    int buffer = -1;
    std::vector<TensorView> views;
    std::vector<Buffer> pending;  // by level of the tree: the sum of 2^level micro-batches; comm stream only
    int flushes = 0;              // of this step so far; with micro_batches > 1
  };

  GradientReducer(std::vector<Unit*> units, const ReducerOptions& options, Device* device, Stream* compute,
                  Stream* comm);
  absl::Status AllocateScratch();
  absl::Status AllocatePending();
  absl::StatusOr<int> Acquire(int64_t bytes);
  void GiveBack(Slot& slot);
  int64_t BucketElements(const Unit& unit) const;
  absl::Status Reduce(int unit_index, const TensorView& full);
  absl::Status ReduceReplicated(int unit_index, const TensorView& full);
  absl::Status ReduceInBuckets(int unit_index, const TensorView& full);
  absl::Status PackBucket(const Unit& unit, const TensorView& full, int64_t begin, int64_t count);
  absl::Status Accumulate(int unit_index, const TensorView& sum);

  const std::vector<Unit*> units_;
  const ReducerOptions options_;
  Device* const device_;
  Stream* const compute_;
  Stream* const comm_;
  std::vector<Slot> slots_;
  std::vector<Pooled> pool_;
  std::unique_ptr<Event> ready_;
  Buffer sums_;    // reduced shard of the current unit; comm stream only
  Buffer packed_;  // rank-major copy of a bucket; comm stream only
  int64_t num_collectives_ = 0;
  int64_t num_freed_ = 0;
  uint64_t order_digest_ = 0;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_GRADIENT_REDUCER_H_
