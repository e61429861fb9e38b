#include "evenkeel/zero3/gradient_reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"

namespace evenkeel::zero3 {
namespace {

int64_t MaxCount(const UnitLayout& layout) {
  return *std::max_element(layout.gradient_counts.begin(), layout.gradient_counts.end());
}

bool EqualCounts(const UnitLayout& layout) {
  const std::vector<int64_t>& counts = layout.gradient_counts;
  return std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
}

TensorView Slice(const TensorView& view, int64_t begin, int64_t count) {
  return TensorView(static_cast<char*>(view.raw()) + begin * SizeOf(view.dtype()), view.dtype(), Shape({count}));
}

}  // namespace

GradientReducer::GradientReducer(std::vector<Unit*> units, const ReducerOptions& options, Device* device,
                                 Stream* compute, Stream* comm)
    : units_(std::move(units)),
      options_(options),
      device_(device),
      compute_(compute),
      comm_(comm),
      slots_(units_.size()),
      ready_(device->CreateEvent()) {}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Create(std::vector<Unit*> units,
                                                                         const ReducerOptions& options, Device* device,
                                                                         Stream* compute, Stream* comm) {
  std::unique_ptr<GradientReducer> reducer(new GradientReducer(std::move(units), options, device, compute, comm));
  EK_RETURN_IF_ERROR(reducer->AllocateScratch());
  EK_RETURN_IF_ERROR(reducer->AllocatePending());
  return reducer;
}

// Elements of the rank's shard that one collective reduces.
int64_t GradientReducer::BucketElements(const Unit& unit) const {
  const int64_t most = MaxCount(unit.layout());
  if (options_.reduce_bucket_bytes <= 0) return most;
  const int64_t all_ranks = unit.layout().replicated ? 1 : unit.world_size();
  return std::clamp<int64_t>(options_.reduce_bucket_bytes / SizeOf(unit.gradient_dtype()) / all_ranks, 1,
                             std::max<int64_t>(most, 1));
}

absl::Status GradientReducer::AllocateScratch() {
  int64_t sums = 0;
  int64_t packed = 0;
  for (const Unit* unit : units_) {
    if (!unit->trainable() || unit->group() == nullptr || unit->layout().replicated) continue;
    const int64_t element = SizeOf(unit->gradient_dtype());
    const int64_t bucket = BucketElements(*unit);
    const int64_t most = MaxCount(unit->layout());
    sums = std::max(sums, (most + bucket) * element);
    if (unit->layout().gradient_is_rank_major && bucket >= most) continue;
    packed = std::max(packed, bucket * unit->world_size() * element);
  }
  EK_ASSIGN_OR_RETURN(sums_, device_->Allocate(sums));
  EK_ASSIGN_OR_RETURN(packed_, device_->Allocate(packed));
  return absl::OkStatus();
}

absl::Status GradientReducer::AllocatePending() {
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = *units_[u];
    if (!unit.trainable()) continue;
    for (int batches = 1; batches < options_.micro_batches; batches *= 2) {
      EK_ASSIGN_OR_RETURN(Buffer pending, device_->Allocate(unit.gradient_count() * SizeOf(unit.gradient_dtype())));
      slots_[u].pending.push_back(std::move(pending));
    }
  }
  return absl::OkStatus();
}

// Two buffers of a size class take turns, so that the next gradients are computed while the last ones are reduced; of
// the free ones, the one that has been free for longest.
absl::StatusOr<int> GradientReducer::Acquire(int64_t bytes) {
  int best = -1;
  int in_class = 0;
  for (size_t i = 0; i < pool_.size(); ++i) {
    const Pooled& candidate = pool_[i];
    if (candidate.buffer.bytes() < bytes || candidate.buffer.bytes() / 2 > bytes) continue;
    ++in_class;
    if (candidate.in_use) continue;
    if (best < 0 || candidate.freed < pool_[static_cast<size_t>(best)].freed) best = static_cast<int>(i);
  }
  if (best < 0 || in_class < 2) {
    Pooled fresh;
    EK_ASSIGN_OR_RETURN(fresh.buffer, device_->Allocate(bytes));
    fresh.free = device_->CreateEvent();
    pool_.push_back(std::move(fresh));
    best = static_cast<int>(pool_.size()) - 1;
  }
  pool_[static_cast<size_t>(best)].in_use = true;
  return best;
}

void GradientReducer::GiveBack(Slot& slot) {
  Pooled& pooled = pool_[static_cast<size_t>(slot.buffer)];
  pooled.in_use = false;
  pooled.freed = ++num_freed_;
  slot.buffer = -1;
}

absl::StatusOr<absl::Span<const TensorView>> GradientReducer::Open(int unit_index) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  Slot& slot = slots_[static_cast<size_t>(unit_index)];
  if (slot.buffer >= 0) return absl::MakeConstSpan(slot.views);
  const int64_t element = SizeOf(unit.gradient_dtype());
  const int64_t bytes = unit.layout().gradient_elements * element;
  EK_ASSIGN_OR_RETURN(slot.buffer, Acquire(bytes));
  Pooled& pooled = pool_[static_cast<size_t>(slot.buffer)];
  EK_RETURN_IF_ERROR(compute_->Wait(pooled.free.get()));
  if (bytes > 0) EK_RETURN_IF_ERROR(compute_->Fill(pooled.buffer.data(), 0, bytes));
  slot.views.clear();
  for (size_t p = 0; p < unit.specs().size(); ++p) {
    const int64_t start = unit.layout().gradient_starts[p];
    slot.views.push_back(
        start < 0 ? TensorView(nullptr, unit.gradient_dtype(), Shape({0}))
                  : TensorView(pooled.buffer.data() + start * element, unit.gradient_dtype(), unit.specs()[p].shape));
  }
  return absl::MakeConstSpan(slot.views);
}

absl::Status GradientReducer::Flush(int unit_index) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  if (!unit.trainable()) return absl::OkStatus();
  order_digest_ = CombineDigests(order_digest_, static_cast<uint64_t>(unit_index));
  EK_RETURN_IF_ERROR(Open(unit_index).status());
  Slot& slot = slots_[static_cast<size_t>(unit_index)];
  Pooled& pooled = pool_[static_cast<size_t>(slot.buffer)];
  EK_RETURN_IF_ERROR(compute_->Record(ready_.get()));
  EK_RETURN_IF_ERROR(comm_->Wait(ready_.get()));
  EK_RETURN_IF_ERROR(Reduce(
      unit_index, TensorView(pooled.buffer.data(), unit.gradient_dtype(), Shape({unit.layout().gradient_elements}))));
  EK_RETURN_IF_ERROR(comm_->Record(pooled.free.get()));
  GiveBack(slot);
  return absl::OkStatus();
}

absl::Status GradientReducer::Discard(int unit_index) {
  Slot& slot = slots_[static_cast<size_t>(unit_index)];
  if (slot.buffer >= 0) GiveBack(slot);
  slot.flushes = 0;
  return absl::OkStatus();
}

absl::Status GradientReducer::CheckComplete() const {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (slots_[u].flushes == 0) continue;  // complete, or without gradients
    return absl::FailedPreconditionError(absl::StrCat("unit ", units_[u]->name(), " was flushed ", slots_[u].flushes,
                                                      " times in this step, micro_batches is ",
                                                      options_.micro_batches));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::Reduce(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const UnitLayout& layout = unit.layout();
  if (unit.group() == nullptr) return Accumulate(unit_index, full);
  if (layout.replicated) return ReduceReplicated(unit_index, full);
  if (!layout.gradient_is_rank_major || BucketElements(unit) < MaxCount(layout)) {
    return ReduceInBuckets(unit_index, full);
  }
  const TensorView sum(sums_.data(), unit.gradient_dtype(), Shape({unit.gradient_count()}));
  ++num_collectives_;
  if (EqualCounts(layout)) {
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatter(full, sum, comm::ReduceOp::kSum, *comm_));
  } else {
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatterV(full, sum, layout.gradient_counts, comm::ReduceOp::kSum, *comm_));
  }
  return Accumulate(unit_index, sum);
}

absl::Status GradientReducer::ReduceReplicated(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const int64_t bucket = BucketElements(unit);
  for (int64_t begin = 0; begin < full.num_elements(); begin += bucket) {
    const TensorView part = Slice(full, begin, std::min(bucket, full.num_elements() - begin));
    ++num_collectives_;
    EK_RETURN_IF_ERROR(unit.group()->AllReduce(part, part, comm::ReduceOp::kSum, *comm_));
  }
  return Accumulate(unit_index, full);
}

// Element by element the same tree as in one piece, so the bucket size changes no bit.
absl::Status GradientReducer::ReduceInBuckets(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const int64_t bucket = BucketElements(unit);
  const int64_t most = MaxCount(unit.layout());
  const TensorView sums(sums_.data(), unit.gradient_dtype(), Shape({most + bucket}));
  for (int64_t begin = 0; begin < most; begin += bucket) {
    EK_RETURN_IF_ERROR(PackBucket(unit, full, begin, bucket));
    const TensorView packed(packed_.data(), unit.gradient_dtype(), Shape({bucket * unit.world_size()}));
    ++num_collectives_;
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatter(packed, Slice(sums, begin, bucket), comm::ReduceOp::kSum, *comm_));
  }
  return Accumulate(unit_index, Slice(sums, 0, unit.gradient_count()));
}

// Elements [begin, begin + count) of every rank's gradient shard, rank after rank; zero where a shard has none.
absl::Status GradientReducer::PackBucket(const Unit& unit, const TensorView& full, int64_t begin, int64_t count) {
  EK_RETURN_IF_ERROR(comm_->Fill(packed_.data(), 0, count * unit.world_size() * SizeOf(unit.gradient_dtype())));
  return comm_->Launch([&layout = unit.layout(), element = SizeOf(unit.gradient_dtype()), begin, count,
                        from = static_cast<const std::byte*>(full.raw()), to = packed_.data()] {
    for (size_t r = 0; r < layout.fragments.size(); ++r) {
      for (const ShardFragment& f : layout.fragments[r]) {
        if (f.gradient_offset < 0) continue;
        const int64_t first = std::max(f.gradient_offset, begin);
        const int64_t last = std::min(f.gradient_offset + f.count, begin + count);
        if (first >= last) continue;
        const int64_t source =
            layout.gradient_starts[static_cast<size_t>(f.parameter)] + f.begin + (first - f.gradient_offset);
        const int64_t target = static_cast<int64_t>(r) * count + (first - begin);
        std::memcpy(to + target * element, from + source * element, static_cast<size_t>((last - first) * element));
      }
    }
    return absl::OkStatus();
  });
}

// A binary counter over the step's micro-batches: sum n completes every level whose bit is set in n.
absl::Status GradientReducer::Accumulate(int unit_index, const TensorView& sum) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const TensorView shard = unit.Gradients(0, unit.gradient_count());
  if (options_.micro_batches == 1) return Axpy(1.0 / options_.dp_size, sum, shard, *comm_);
  Slot& slot = slots_[static_cast<size_t>(unit_index)];
  const int n = slot.flushes++;
  size_t level = 0;
  for (; ((n >> level) & 1) != 0; ++level) {
    const TensorView earlier(slot.pending[level].data(), unit.gradient_dtype(), sum.shape());
    EK_RETURN_IF_ERROR(Add(earlier, sum, sum, *comm_));
  }
  if (slot.flushes < options_.micro_batches) {
    return comm_->Copy(slot.pending[level].data(), sum.raw(), sum.num_bytes());
  }
  slot.flushes = 0;
  return Axpy(1.0 / (static_cast<double>(options_.dp_size) * options_.micro_batches), sum, shard, *comm_);
}

int64_t GradientReducer::pool_bytes() const {
  int64_t bytes = 0;
  for (const Pooled& pooled : pool_) bytes += pooled.buffer.bytes();
  return bytes;
}

int64_t GradientReducer::pending_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    for (const Buffer& pending : slot.pending) bytes += pending.bytes();
  }
  return bytes;
}

}  // namespace evenkeel::zero3
