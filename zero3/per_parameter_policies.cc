// Policies that shard every parameter by itself: gather all shards of a unit at once, then narrow and concatenate.
//
// per_parameter is the baseline that DeepSpeed had before #6694: memory, events and frees for every parameter.
// coalesced keeps the gather and the copies, but has staging memory of its own and leaves edges and the release to the
// leaf: what #6694 intended. Host operations are booked where a tensor library would issue them: a narrow is one.
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/policy_layouts.h"

namespace evenkeel::zero3 {
namespace {

// Where a parameter's shards lie inside every rank's slot of the staging buffer.
struct Slot {
  int64_t offset = 0;       // bytes
  int64_t shard_bytes = 0;  // with padding
  int64_t bytes = 0;        // of the whole parameter
};

std::vector<Slot> SlotsOf(const GathererContext& context) {
  std::vector<Slot> slots;
  int64_t end = 0;
  for (const ParameterSpec& spec : context.parameters) {
    const int64_t size = SizeOf(spec.dtype);
    const int64_t offset = (end + size - 1) / size * size;
    const int64_t shard = CeilDiv(spec.num_elements(), context.layout.world_size) * size;
    slots.push_back({offset, shard, spec.num_bytes()});
    end = offset + shard;
  }
  return slots;
}

// The concatenation of W narrows: one launch.
absl::Status Concatenate(const std::byte* staging, int64_t slot_bytes, int world_size, const Slot& slot,
                         std::byte* whole, Stream& comm) {
  return comm.Launch([=] {
    int64_t done = 0;
    for (int r = 0; r < world_size && done < slot.bytes; ++r) {
      const int64_t count = std::min(slot.shard_bytes, slot.bytes - done);
      std::memcpy(whole + done, staging + r * slot_bytes + slot.offset, static_cast<size_t>(count));
      done += count;
    }
    return absl::OkStatus();
  });
}

class PerParameterGatherer final : public UnitGatherer {
 public:
  PerParameterGatherer(GathererContext context, bool coalesced)
      : context_(std::move(context)), coalesced_(coalesced), slots_(SlotsOf(context_)) {
    views_.resize(slots_.size());
    wholes_.resize(slots_.size());
    if (coalesced_) return;
    for (size_t i = 0; i < slots_.size(); ++i) events_.push_back(context_.device->CreateEvent());
  }

  absl::Status Gather(ConstTensorView shard, TensorView, Stream& comm) override {
    std::byte* staging = static_cast<std::byte*>(context_.staging.raw());
    const int64_t total = context_.layout.shard_bytes * context_.layout.world_size;
    if (!coalesced_) {
      EK_ASSIGN_OR_RETURN(staging_, context_.device->Allocate(total));
      staging = staging_.data();
    }
    EK_RETURN_IF_ERROR(CopyIn(static_cast<const std::byte*>(shard.raw()), staging, comm));
    // The other ranks' slots; a policy that allocates its staging narrows its own as well.
    context_.device->counters().AddHostOperations(context_.layout.world_size - (coalesced_ ? 1 : 0));
    const TensorView whole(staging, DType::kU8, Shape({total}));
    EK_RETURN_IF_ERROR(context_.group->AllGather(
        ConstTensorView(staging + OwnSlot(), DType::kU8, Shape({context_.layout.shard_bytes})), whole, comm));
    for (size_t i = 0; i < slots_.size(); ++i) EK_RETURN_IF_ERROR(CopyOut(i, staging, comm));
    return absl::OkStatus();
  }

  absl::Status Join(Stream& compute) override {
    for (auto& event : events_) EK_RETURN_IF_ERROR(compute.Wait(event.get()));
    joined_ = true;
    return absl::OkStatus();
  }

  // A record per gathered piece: how a caching allocator learns that another stream still reads it.
  absl::Status Release(Stream& compute) override {
    released_ = true;
    for (auto& event : events_) {
      for (int r = 0; r < context_.layout.world_size; ++r) EK_RETURN_IF_ERROR(compute.Record(event.get()));
    }
    return absl::OkStatus();
  }

  absl::Status Reclaim() override {
    if (joined_ && staging_.bytes() > 0) {
      if (!events_.empty()) events_.back()->Synchronize();
      staging_.Reset();
    }
    if (!released_) return absl::OkStatus();
    if (!events_.empty()) events_.back()->Synchronize();
    for (Buffer& whole : wholes_) whole.Reset();
    joined_ = false;
    released_ = false;
    return absl::OkStatus();
  }

  absl::Span<const ConstTensorView> views() const override { return views_; }

 private:
  int64_t OwnSlot() const { return context_.rank * context_.layout.shard_bytes; }

  absl::Status CopyIn(const std::byte* shard, std::byte* staging, Stream& comm) {
    for (const Slot& slot : slots_) {
      EK_RETURN_IF_ERROR(comm.Copy(staging + OwnSlot() + slot.offset, shard + slot.offset, slot.shard_bytes));
    }
    return absl::OkStatus();
  }

  absl::Status CopyOut(size_t i, const std::byte* staging, Stream& comm) {
    const int world_size = context_.layout.world_size;
    const ParameterSpec& spec = context_.parameters[i];
    EK_ASSIGN_OR_RETURN(wholes_[i], context_.device->Allocate(slots_[i].bytes));
    context_.device->counters().AddHostOperations(world_size + 1);  // the narrows, and the view with its shape
    EK_RETURN_IF_ERROR(
        Concatenate(staging, context_.layout.shard_bytes, world_size, slots_[i], wholes_[i].data(), comm));
    views_[i] = ConstTensorView(wholes_[i].data(), spec.dtype, spec.shape);
    return coalesced_ ? absl::OkStatus() : comm.Record(events_[i].get());
  }

  const GathererContext context_;
  const bool coalesced_;
  const std::vector<Slot> slots_;
  Buffer staging_;
  std::vector<Buffer> wholes_;
  std::vector<ConstTensorView> views_;
  std::vector<std::unique_ptr<Event>> events_;
  bool joined_ = false;
  bool released_ = false;
};

int64_t NumNonEmpty(absl::Span<const ParameterSpec> parameters) {
  int64_t count = 0;
  for (const ParameterSpec& spec : parameters) count += spec.num_elements() > 0 ? 1 : 0;
  return count;
}

// Allocations and frees exist for parameters that have elements; everything else for all of them.
FetchCost PerParameterCost(absl::Span<const ParameterSpec> parameters, int64_t w, bool coalesced) {
  const int64_t p = static_cast<int64_t>(parameters.size());
  const int64_t full = NumNonEmpty(parameters);
  const int64_t staging = coalesced || full == 0 ? 0 : 1;
  FetchCost cost;
  cost.collectives = 1;
  cost.copies = p;
  cost.launches = p;
  cost.allocations = full + staging;
  cost.event_records = coalesced ? 2 : p * (w + 1);
  cost.event_waits = coalesced ? 1 : p;
  const int64_t narrows = coalesced ? w - 1 : w;
  cost.host_operations = cost.collectives + cost.copies + cost.launches + 2 * cost.allocations + cost.event_records +
                         cost.event_waits + p * (w + 1) + narrows;
  return cost;
}

class PerParameterPolicy : public FetchPolicy {
 public:
  absl::string_view name() const override { return "per_parameter"; }
  bool leaf_edges() const override { return false; }
  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    if (world_size == 1) return ReplicatedUnitLayout(parameters, 1);
    EK_ASSIGN_OR_RETURN(UnitLayout layout, PerParameterUnitLayout(parameters, world_size));
    EK_ASSIGN_OR_RETURN(layout.transient_bytes, CheckedMul(layout.shard_bytes, world_size));
    return layout;
  }
  FetchCost Cost(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    return world_size == 1 ? FetchCost{} : PerParameterCost(parameters, world_size, false);
  }
  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext context) const override {
    return std::make_unique<PerParameterGatherer>(std::move(context), false);
  }
};

class CoalescedPolicy : public FetchPolicy {
 public:
  absl::string_view name() const override { return "coalesced"; }
  bool leaf_edges() const override { return true; }
  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    if (world_size == 1) return ReplicatedUnitLayout(parameters, 1);
    EK_ASSIGN_OR_RETURN(UnitLayout layout, PerParameterUnitLayout(parameters, world_size));
    EK_ASSIGN_OR_RETURN(layout.staging_bytes, CheckedMul(layout.shard_bytes, world_size));
    return layout;
  }
  FetchCost Cost(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    return world_size == 1 ? FetchCost{} : PerParameterCost(parameters, world_size, true);
  }
  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext context) const override {
    return std::make_unique<PerParameterGatherer>(std::move(context), true);
  }
};

EVENKEEL_REGISTER_FETCH_POLICY(PerParameterPolicy);
EVENKEEL_REGISTER_FETCH_POLICY(CoalescedPolicy);

}  // namespace
}  // namespace evenkeel::zero3
