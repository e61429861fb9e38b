// From full gradients on every rank to averaged gradient shards.
//
// A unit's full gradients are accumulated in one zeroed buffer (f32 or f64). Flushing sums it over the unit's group in
// the canonical tree and adds sum / DP size to this rank's shard; a rank that added nothing sends zeros. Buffers come
// from a small pool and are used again without asking for memory: the reuse edge goes from the reduction (comm stream)
// to the next zero fill (compute stream).
//
// With a bucket size, a unit that is larger is reduced in pieces of that size, and smaller ones of the same group and
// dtype share a bucket, which is reduced when the next one does not fit, or by Finish. The bits are the same.
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
#include "evenkeel/zero3/gradient_accumulator.h"
#include "evenkeel/zero3/gradient_bucket.h"
#include "evenkeel/zero3/order_log.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

struct ReducerOptions {
  int dp_size = 1;                  // what sums are divided by, for both families
  int64_t reduce_bucket_bytes = 0;  // full gradients of one collective; 0: every unit by itself, at once
  int micro_batches = 1;            // see GradientAccumulator
};

// Not thread-safe. Streams, device and units outlive it.
class GradientReducer {
 public:
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(std::vector<Unit*> units,
                                                                 const ReducerOptions& options, OrderLog* log,
                                                                 Device* device, Stream* compute, Stream* comm);

  // Views of the unit's full gradients, in unit order; zero when opened anew. Frozen parameters: 0 elements.
  absl::StatusOr<absl::Span<const TensorView>> Open(int unit);
  bool is_open(int unit) const { return slots_[static_cast<size_t>(unit)].buffer >= 0; }
  // Which opening the views of Open belong to; they stay as they are while it does.
  uint64_t opening(int unit) const { return slots_[static_cast<size_t>(unit)].opening; }
  // Opens if need be, reduces or puts into a bucket, closes. Collective over the unit's group.
  absl::Status Flush(int unit);
  // Reduces the bucket that units like this go into, so that the shard has all that was flushed. Collective.
  absl::Status FinishBucketOf(int unit);
  // Reduces all buckets. Collective over all groups.
  absl::Status Finish();
  // Closes everything without reducing, buckets and pending sums too.
  void Discard();
  // After Finish. With micro_batches > 1: FailedPrecondition naming a unit that was flushed another number of times.
  absl::Status CheckComplete() const { return accumulator_->CheckComplete(); }

  int64_t num_collectives() const { return num_collectives_; }
  // Bytes of all pooled buffers.
  int64_t pool_bytes() const;
  int64_t pending_bytes() const { return accumulator_->pending_bytes(); }

 private:
  struct Pooled {
    Buffer buffer;
    std::unique_ptr<Event> free;  // recorded on the comm stream behind the last reduction
    bool in_use = false;
    int64_t freed = 0;  // when, in numbers of give-backs
  };
  struct Slot {
    int buffer = -1;
    uint64_t opening = 0;
    std::vector<TensorView> views;
  };

  GradientReducer(std::vector<Unit*> units, const ReducerOptions& options, OrderLog* log, Device* device,
                  Stream* compute, Stream* comm);
  // A group of one and a unit without gradients need no collective.
  static bool IsReduced(const Unit& unit) { return unit.trainable() && unit.group() != nullptr; }
  absl::Status MakeBuckets();
  absl::Status AllocateScratch();
  GradientBucket* BucketOf(const Unit& unit) const;
  absl::Status FinishBucket(GradientBucket& bucket);
  absl::Status AddToBucket(GradientBucket& bucket, int unit, const TensorView& full);
  absl::StatusOr<int> Acquire(int64_t bytes);
  void GiveBack(Slot& slot);
  int64_t BucketLimit(const Unit& unit) const;
  int64_t BucketElements(const Unit& unit) const;
  absl::Status Reduce(int unit, const TensorView& full);
  absl::Status ReduceReplicated(int unit, const TensorView& full);
  absl::Status ReduceInBuckets(int unit, const TensorView& full);
  absl::Status PackBucket(const Unit& unit, const TensorView& full, int64_t begin, int64_t count);

  const std::vector<Unit*> units_;
  const ReducerOptions options_;
  OrderLog* const log_;
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
  std::unique_ptr<GradientAccumulator> accumulator_;
  std::vector<std::unique_ptr<GradientBucket>> buckets_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_GRADIENT_REDUCER_H_
