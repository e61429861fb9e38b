// Parameters back to back in one buffer that is cut into equal shards.
//
// Every item starts at a multiple of 16 bytes; the total is padded once, to a multiple of `world_size` elements of the
// widest dtype, so that no shard boundary cuts an element. Rank r owns bytes [r * shard_bytes, (r + 1) * shard_bytes).
// A gather of the shards *is* the parameters: nothing is copied.
//
//   const FlatItem items[] = {{7, DType::kF32}, {5, DType::kF32}};
//   EK_ASSIGN_OR_RETURN(FlatLayout layout, FlatLayout::Create(items, 3));
//   layout.offset_bytes(1) == 32;  layout.total_bytes() == 60;  layout.shard_bytes() == 20;
#ifndef EVENKEEL_ZERO3_FLAT_LAYOUT_H_
#define EVENKEEL_ZERO3_FLAT_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::zero3 {

inline constexpr int64_t kParameterAlignment = 16;  // bytes

struct FlatItem {
  int64_t elements = 0;
  DType dtype = DType::kF32;
};

// The part of one item that a rank owns.
struct FlatRange {
  int item = -1;
  int64_t begin = 0;         // first element inside the item
  int64_t count = 0;         // >= 1
  int64_t shard_offset = 0;  // bytes inside the rank's shard
};

// Immutable value.
class FlatLayout {
 public:
  // InvalidArgument when an item is negative, the world size is below 1 or the bytes overflow.
  static absl::StatusOr<FlatLayout> Create(absl::Span<const FlatItem> items, int world_size);

  int world_size() const { return world_size_; }
  int num_items() const { return static_cast<int>(items_.size()); }
  const FlatItem& item(int i) const { return items_[static_cast<size_t>(i)]; }
  // First byte of item i in the whole buffer.
  int64_t offset_bytes(int i) const { return offsets_[static_cast<size_t>(i)]; }
  // Elements alone, without any padding.
  int64_t used_bytes() const { return used_bytes_; }
  int64_t total_bytes() const { return shard_bytes_ * world_size_; }
  int64_t shard_bytes() const { return shard_bytes_; }
  int64_t padding_bytes() const { return total_bytes() - used_bytes_; }
  // What rank owns, in item order, without padding and without empty ranges.
  std::vector<FlatRange> Ranges(int rank) const;

 private:
  std::vector<FlatItem> items_;
  std::vector<int64_t> offsets_;
  int world_size_ = 1;
  int64_t used_bytes_ = 0;
  int64_t shard_bytes_ = 0;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_FLAT_LAYOUT_H_
