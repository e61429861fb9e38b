#include "evenkeel/zero3/gradient_bucket.h"

#include <algorithm>
#include <cstring>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {

int64_t MostGradientElements(const UnitLayout& layout) {
  return *std::max_element(layout.gradient_counts.begin(), layout.gradient_counts.end());
}

void PackGradientColumns(const UnitLayout& layout, int64_t element_bytes, int64_t begin, int64_t count, int64_t stride,
                         const std::byte* full, std::byte* to) {
  const size_t ranks = layout.replicated ? 1 : layout.fragments.size();
  for (size_t r = 0; r < ranks; ++r) {
    for (const ShardFragment& f : layout.fragments[r]) {
      if (f.gradient_offset < 0) continue;
      const int64_t first = std::max(f.gradient_offset, begin);
      const int64_t last = std::min(f.gradient_offset + f.count, begin + count);
      if (first >= last) continue;
      const int64_t source =
          layout.gradient_starts[static_cast<size_t>(f.parameter)] + f.begin + (first - f.gradient_offset);
      const int64_t target = static_cast<int64_t>(r) * stride + (first - begin);
      std::memcpy(to + target * element_bytes, full + source * element_bytes,
                  static_cast<size_t>((last - first) * element_bytes));
    }
  }
}

GradientBucket::GradientBucket(const Unit& first, int64_t columns, Stream* comm)
    : first_(first), ranks_(first.layout().replicated ? 1 : first.world_size()), columns_(columns), comm_(comm) {}

absl::StatusOr<std::unique_ptr<GradientBucket>> GradientBucket::Create(const Unit& first, int64_t columns,
                                                                       Device* device, Stream* comm) {
  std::unique_ptr<GradientBucket> bucket(new GradientBucket(first, columns, comm));
  const int64_t element = SizeOf(first.gradient_dtype());
  EK_ASSIGN_OR_RETURN(bucket->packed_, device->Allocate(columns * bucket->ranks_ * element));
  EK_ASSIGN_OR_RETURN(bucket->sums_, device->Allocate(first.layout().replicated ? 0 : columns * element));
  return bucket;
}

bool GradientBucket::Takes(const Unit& unit) const {
  return unit.group() == first_.group() && unit.gradient_dtype() == first_.gradient_dtype() &&
         unit.layout().replicated == first_.layout().replicated && MostGradientElements(unit.layout()) <= columns_;
}

TensorView GradientBucket::View(const Buffer& buffer, int64_t begin, int64_t count) const {
  const DType dtype = first_.gradient_dtype();
  return TensorView(buffer.data() + begin * SizeOf(dtype), dtype, Shape({count}));
}

absl::Status GradientBucket::Add(int unit_index, const Unit& unit, const TensorView& full) {
  if (entries_.empty()) EK_RETURN_IF_ERROR(comm_->Fill(packed_.data(), 0, packed_.bytes()));
  const int64_t count = MostGradientElements(unit.layout());
  const int64_t element = SizeOf(unit.gradient_dtype());
  entries_.push_back({unit_index, filled_, unit.gradient_count()});
  EK_RETURN_IF_ERROR(
      comm_->Launch([&layout = unit.layout(), element, count, stride = columns_,
                     from = static_cast<const std::byte*>(full.raw()), to = packed_.data() + filled_ * element] {
        PackGradientColumns(layout, element, 0, count, stride, from, to);
        return absl::OkStatus();
      }));
  filled_ += count;
  return absl::OkStatus();
}

// A bucket that is not full: ranks' parts move together, so that no empty column travels.
absl::Status GradientBucket::CloseGaps() {
  if (filled_ == columns_ || ranks_ == 1) return absl::OkStatus();
  const int64_t element = SizeOf(first_.gradient_dtype());
  return comm_->Launch([data = packed_.data(), ranks = ranks_, from = columns_ * element, to = filled_ * element] {
    for (int64_t r = 1; r < ranks; ++r) std::memmove(data + r * to, data + r * from, static_cast<size_t>(to));
    return absl::OkStatus();
  });
}

absl::Status GradientBucket::Reduce(GradientAccumulator& accumulator) {
  EK_RETURN_IF_ERROR(CloseGaps());
  const TensorView packed = View(packed_, 0, ranks_ * filled_);
  const bool replicated = first_.layout().replicated;
  if (replicated) {
    EK_RETURN_IF_ERROR(first_.group()->AllReduce(packed, packed, comm::ReduceOp::kSum, *comm_));
  } else {
    EK_RETURN_IF_ERROR(first_.group()->ReduceScatter(packed, View(sums_, 0, filled_), comm::ReduceOp::kSum, *comm_));
  }
  for (const Entry& entry : entries_) {
    EK_RETURN_IF_ERROR(accumulator.Add(entry.unit, View(replicated ? packed_ : sums_, entry.column, entry.count)));
  }
  Discard();
  return absl::OkStatus();
}

void GradientBucket::Discard() {
  entries_.clear();
  filled_ = 0;
}

}  // namespace evenkeel::zero3
