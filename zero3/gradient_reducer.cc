#include "evenkeel/zero3/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

bool EqualCounts(const UnitLayout& layout) {
  const std::vector<int64_t>& counts = layout.gradient_counts;
  return std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
}

TensorView Slice(const TensorView& view, int64_t begin, int64_t count) {
  return TensorView(static_cast<char*>(view.raw()) + begin * SizeOf(view.dtype()), view.dtype(), Shape({count}));
}

}  // namespace

GradientReducer::GradientReducer(std::vector<Unit*> units, const ReducerOptions& options, OrderLog* log, Device* device,
                                 Stream* compute, Stream* comm)
    : units_(std::move(units)),
      options_(options),
      log_(log),
      device_(device),
      compute_(compute),
      comm_(comm),
      slots_(units_.size()),
      ready_(device->CreateEvent()) {}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Create(std::vector<Unit*> units,
                                                                         const ReducerOptions& options, OrderLog* log,
                                                                         Device* device, Stream* compute,
                                                                         Stream* comm) {
  std::unique_ptr<GradientReducer> reducer(new GradientReducer(std::move(units), options, log, device, compute, comm));
  EK_ASSIGN_OR_RETURN(reducer->accumulator_, GradientAccumulator::Create(reducer->units_, options.dp_size,
                                                                         options.micro_batches, device, comm));
  EK_RETURN_IF_ERROR(reducer->MakeBuckets());
  EK_RETURN_IF_ERROR(reducer->AllocateScratch());
  return reducer;
}

// A bucket for every group and dtype that has at least two units to put into it.
absl::Status GradientReducer::MakeBuckets() {
  if (options_.reduce_bucket_bytes <= 0) return absl::OkStatus();
  struct Kind {
    const Unit* first;
    int64_t columns;
    int num_units;
  };
  std::vector<Kind> kinds;
  for (const Unit* unit : units_) {
    const int64_t columns = IsReduced(*unit) ? MostGradientElements(unit->layout()) : 0;
    if (columns == 0 || BucketElements(*unit) < columns) continue;
    const auto same = std::find_if(kinds.begin(), kinds.end(), [unit](const Kind& kind) {
      return kind.first->group() == unit->group() && kind.first->gradient_dtype() == unit->gradient_dtype() &&
             kind.first->layout().replicated == unit->layout().replicated;
    });
    if (same == kinds.end()) {
      kinds.push_back({unit, columns, 1});
    } else {
      same->columns += columns;
      ++same->num_units;
    }
  }
  for (const Kind& kind : kinds) {
    if (kind.num_units < 2) continue;
    const int64_t columns = std::min(kind.columns, BucketLimit(*kind.first));
    EK_ASSIGN_OR_RETURN(std::unique_ptr<GradientBucket> bucket,
                        GradientBucket::Create(*kind.first, columns, device_, comm_));
    buckets_.push_back(std::move(bucket));
  }
  return absl::OkStatus();
}

GradientBucket* GradientReducer::BucketOf(const Unit& unit) const {
  if (!IsReduced(unit) || MostGradientElements(unit.layout()) == 0) return nullptr;
  for (const auto& bucket : buckets_) {
    if (bucket->Takes(unit)) return bucket.get();
  }
  return nullptr;
}

// Elements of a rank's shards that fit into a bucket of the asked size.
int64_t GradientReducer::BucketLimit(const Unit& unit) const {
  const int64_t all_ranks = unit.layout().replicated ? 1 : unit.world_size();
  return std::max<int64_t>(options_.reduce_bucket_bytes / SizeOf(unit.gradient_dtype()) / all_ranks, 1);
}

// Elements of the unit's shard that one collective reduces.
int64_t GradientReducer::BucketElements(const Unit& unit) const {
  const int64_t most = MostGradientElements(unit.layout());
  return options_.reduce_bucket_bytes <= 0 ? most : std::min(BucketLimit(unit), std::max<int64_t>(most, 1));
}

absl::Status GradientReducer::AllocateScratch() {
  int64_t sums = 0;
  int64_t packed = 0;
  for (const Unit* unit : units_) {
    if (!IsReduced(*unit) || unit->layout().replicated || BucketOf(*unit) != nullptr) continue;
    const int64_t element = SizeOf(unit->gradient_dtype());
    const int64_t bucket = BucketElements(*unit);
    const int64_t most = MostGradientElements(unit->layout());
    sums = std::max(sums, (most + bucket) * element);
    if (unit->layout().gradient_is_rank_major && bucket >= most) continue;
    packed = std::max(packed, bucket * unit->world_size() * element);
  }
  EK_ASSIGN_OR_RETURN(sums_, device_->Allocate(sums));
  EK_ASSIGN_OR_RETURN(packed_, device_->Allocate(packed));
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
  ++slot.opening;
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
  log_->Add(OrderLog::Call::kReduce, unit_index);
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

void GradientReducer::Discard() {
  for (Slot& slot : slots_) {
    if (slot.buffer >= 0) GiveBack(slot);
  }
  for (const auto& bucket : buckets_) bucket->Discard();
  accumulator_->Forget();
}

absl::Status GradientReducer::FinishBucket(GradientBucket& bucket) {
  if (bucket.empty()) return absl::OkStatus();
  ++num_collectives_;
  return bucket.Reduce(*accumulator_);
}

absl::Status GradientReducer::FinishBucketOf(int unit) {
  GradientBucket* bucket = BucketOf(*units_[static_cast<size_t>(unit)]);
  return bucket == nullptr ? absl::OkStatus() : FinishBucket(*bucket);
}

absl::Status GradientReducer::Finish() {
  for (const auto& bucket : buckets_) EK_RETURN_IF_ERROR(FinishBucket(*bucket));
  return absl::OkStatus();
}

absl::Status GradientReducer::AddToBucket(GradientBucket& bucket, int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  if (!bucket.Fits(unit)) EK_RETURN_IF_ERROR(FinishBucket(bucket));
  return bucket.Add(unit_index, unit, full);
}

absl::Status GradientReducer::Reduce(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const UnitLayout& layout = unit.layout();
  if (unit.group() == nullptr) return accumulator_->Add(unit_index, full);
  if (GradientBucket* bucket = BucketOf(unit)) return AddToBucket(*bucket, unit_index, full);
  if (layout.replicated) return ReduceReplicated(unit_index, full);
  if (!layout.gradient_is_rank_major || BucketElements(unit) < MostGradientElements(layout))
    return ReduceInBuckets(unit_index, full);
  const TensorView sum(sums_.data(), unit.gradient_dtype(), Shape({unit.gradient_count()}));
  ++num_collectives_;
  if (EqualCounts(layout)) {
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatter(full, sum, comm::ReduceOp::kSum, *comm_));
  } else {
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatterV(full, sum, layout.gradient_counts, comm::ReduceOp::kSum, *comm_));
  }
  return accumulator_->Add(unit_index, sum);
}

absl::Status GradientReducer::ReduceReplicated(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const int64_t bucket = BucketElements(unit);
  for (int64_t begin = 0; begin < full.num_elements(); begin += bucket) {
    const TensorView part = Slice(full, begin, std::min(bucket, full.num_elements() - begin));
    ++num_collectives_;
    EK_RETURN_IF_ERROR(unit.group()->AllReduce(part, part, comm::ReduceOp::kSum, *comm_));
  }
  return accumulator_->Add(unit_index, full);
}

// Element by element the same tree as in one piece, so the bucket size changes no bit.
absl::Status GradientReducer::ReduceInBuckets(int unit_index, const TensorView& full) {
  const Unit& unit = *units_[static_cast<size_t>(unit_index)];
  const int64_t bucket = BucketElements(unit);
  const int64_t most = MostGradientElements(unit.layout());
  const TensorView sums(sums_.data(), unit.gradient_dtype(), Shape({most + bucket}));
  for (int64_t begin = 0; begin < most; begin += bucket) {
    EK_RETURN_IF_ERROR(PackBucket(unit, full, begin, bucket));
    const TensorView packed(packed_.data(), unit.gradient_dtype(), Shape({bucket * unit.world_size()}));
    ++num_collectives_;
    EK_RETURN_IF_ERROR(unit.group()->ReduceScatter(packed, Slice(sums, begin, bucket), comm::ReduceOp::kSum, *comm_));
  }
  return accumulator_->Add(unit_index, Slice(sums, 0, unit.gradient_count()));
}

// Elements [begin, begin + count) of every rank's gradient shard, rank after rank; zero where a shard has none.
absl::Status GradientReducer::PackBucket(const Unit& unit, const TensorView& full, int64_t begin, int64_t count) {
  EK_RETURN_IF_ERROR(comm_->Fill(packed_.data(), 0, count * unit.world_size() * SizeOf(unit.gradient_dtype())));
  return comm_->Launch([&layout = unit.layout(), element = SizeOf(unit.gradient_dtype()), begin, count,
                        from = static_cast<const std::byte*>(full.raw()), to = packed_.data()] {
    PackGradientColumns(layout, element, begin, count, /*stride=*/count, from, to);
    return absl::OkStatus();
  });
}

int64_t GradientReducer::pool_bytes() const {
  int64_t bytes = 0;
  for (const Pooled& pooled : pool_) bytes += pooled.buffer.bytes();
  return bytes;
}

}  // namespace evenkeel::zero3
