#include "evenkeel/zero3/flat_layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {

absl::StatusOr<FlatLayout> FlatLayout::Create(absl::Span<const FlatItem> items, int world_size) {
  if (world_size < 1) return absl::InvalidArgumentError(absl::StrCat("zero3 layout: world size ", world_size, " < 1"));
  FlatLayout layout;
  layout.world_size_ = world_size;
  layout.items_.assign(items.begin(), items.end());
  int64_t end = 0;
  int64_t widest = 1;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].elements < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("zero3 layout: item ", i, " has ", items[i].elements, " elements"));
    }
    EK_ASSIGN_OR_RETURN(const int64_t start, CheckedRoundUp(end, kParameterAlignment));
    EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(items[i].elements, SizeOf(items[i].dtype)));
    layout.offsets_.push_back(start);
    // An empty item takes no room: the next one starts where it would have.
    if (bytes > 0) {
      EK_ASSIGN_OR_RETURN(end, CheckedAdd(start, bytes));
      layout.used_bytes_ += bytes;
      widest = std::max(widest, SizeOf(items[i].dtype));
    }
  }
  EK_ASSIGN_OR_RETURN(const int64_t total, CheckedRoundUp(end, widest * world_size));
  layout.shard_bytes_ = total / world_size;
  return layout;
}

std::vector<FlatRange> FlatLayout::Ranges(int rank) const {
  std::vector<FlatRange> ranges;
  const int64_t shard_begin = rank * shard_bytes_;
  const int64_t shard_end = shard_begin + shard_bytes_;
  // The first item that ends behind the shard's start: offsets ascend.
  const auto first = std::upper_bound(offsets_.begin(), offsets_.end(), shard_begin);
  size_t i = first == offsets_.begin() ? 0 : static_cast<size_t>(first - offsets_.begin()) - 1;
  // Empty items share their start with the item behind them; step back over them is not needed, they own nothing.
  for (; i < items_.size() && offsets_[i] < shard_end; ++i) {
    const int64_t size = SizeOf(items_[i].dtype);
    const int64_t begin = std::max(offsets_[i], shard_begin);
    const int64_t end = std::min(offsets_[i] + items_[i].elements * size, shard_end);
    if (begin >= end) continue;
    ranges.push_back({static_cast<int>(i), (begin - offsets_[i]) / size, (end - begin) / size, begin - shard_begin});
  }
  return ranges;
}

}  // namespace evenkeel::zero3
