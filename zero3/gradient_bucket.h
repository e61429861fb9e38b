// Several small units' gradients, reduced by one collective.
//
// A bucket belongs to one group and one dtype. Adding a unit copies its full gradients into the bucket, rank after
// rank, so that its buffer can be used again; reducing sums the bucket over the group and adds every unit's part to
// this rank's shard. An element takes the same way through the canonical tree as in a collective of its own, so which
// units share a bucket changes no bit.
#ifndef EVENKEEL_ZERO3_GRADIENT_BUCKET_H_
#define EVENKEEL_ZERO3_GRADIENT_BUCKET_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/gradient_accumulator.h"
#include "evenkeel/zero3/unit.h"

namespace evenkeel::zero3 {

// Elements of a unit's gradient shard on the rank that has most.
int64_t MostGradientElements(const UnitLayout& layout);

// Elements [begin, begin + count) of every rank's gradient shard: rank r's go to `to` + r * stride, in elements. Gaps
// are not written. Host pointers.
void PackGradientColumns(const UnitLayout& layout, int64_t element_bytes, int64_t begin, int64_t count, int64_t stride,
                         const std::byte* full, std::byte* to);

// Not thread-safe; all work is enqueued on the comm stream. Units, device and stream outlive it.
class GradientBucket {
 public:
  // For units like `first`: its group, dtype, and whether it is replicated. `columns`: elements per rank.
  static absl::StatusOr<std::unique_ptr<GradientBucket>> Create(const Unit& first, int64_t columns, Device* device,
                                                                Stream* comm);
  // Whether units like this belong into this bucket at all.
  bool Takes(const Unit& unit) const;
  bool Fits(const Unit& unit) const { return MostGradientElements(unit.layout()) <= columns_ - filled_; }
  bool empty() const { return entries_.empty(); }

  // Enqueues the copy. The unit fits.
  absl::Status Add(int unit_index, const Unit& unit, const TensorView& full);
  // Sums over the group, hands every unit's sum to the accumulator, empties the bucket. Collective.
  absl::Status Reduce(GradientAccumulator& accumulator);
  // Empties the bucket.
  void Discard();

 private:
  struct Entry {
    int unit = -1;
    int64_t column = 0;
    int64_t count = 0;  // of this rank
  };
  GradientBucket(const Unit& first, int64_t columns, Stream* comm);
  TensorView View(const Buffer& buffer, int64_t begin, int64_t count) const;
  absl::Status CloseGaps();

  const Unit& first_;
  const int64_t ranks_;  // that the bucket holds a part for: 1 where every rank reduces everything
  const int64_t columns_;
  Stream* const comm_;
  Buffer packed_;  // [rank][column]
  Buffer sums_;    // [column]
  int64_t filled_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_GRADIENT_BUCKET_H_
