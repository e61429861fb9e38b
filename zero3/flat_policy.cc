// The unit's own buffer is what is sharded, so the gather writes the parameters where they are used: one collective,
// no copy, no allocation, whatever the number of parameters and ranks.
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/flat_layout.h"
#include "evenkeel/zero3/policy_layouts.h"

namespace evenkeel::zero3 {
namespace {

class FlatGatherer final : public UnitGatherer {
 public:
  FlatGatherer(GathererContext context, FlatLayout flat) : context_(std::move(context)), flat_(std::move(flat)) {
    views_.resize(context_.parameters.size());
  }

  absl::Status Gather(ConstTensorView shard, TensorView destination, Stream& comm) override {
    Bind(destination);
    return context_.group->AllGather(shard, destination, comm);
  }
  absl::Status Join(Stream&) override { return absl::OkStatus(); }
  absl::Status Release(Stream&) override { return absl::OkStatus(); }
  // The memory goes: what comes next is another place, also where it happens to have the same address, so that the
  // count does not depend on the allocator.
  absl::Status Reclaim() override {
    bound_ = nullptr;
    return absl::OkStatus();
  }
  absl::Span<const ConstTensorView> views() const override { return views_; }

 private:
  // Views are bound once to a place and stay; only another place costs a host operation per parameter.
  void Bind(const TensorView& destination) {
    if (bound_ == destination.raw()) return;
    bound_ = destination.raw();
    const char* base = static_cast<const char*>(destination.raw());
    for (size_t i = 0; i < views_.size(); ++i) {
      const ParameterSpec& spec = context_.parameters[i];
      views_[i] = ConstTensorView(base + flat_.offset_bytes(static_cast<int>(i)), spec.dtype, spec.shape);
    }
    context_.device->counters().AddHostOperations(static_cast<int64_t>(views_.size()));
  }

  const GathererContext context_;
  const FlatLayout flat_;
  const void* bound_ = nullptr;
  std::vector<ConstTensorView> views_;
};

class FlatPolicy final : public FetchPolicy {
 public:
  absl::string_view name() const override { return "flat"; }
  bool leaf_edges() const override { return true; }

  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    if (world_size == 1) return ReplicatedUnitLayout(parameters, 1);
    return FlatUnitLayout(parameters, world_size);
  }

  // The reuse edge (record at release, wait before the gather), the gather, the ready edge (record, wait).
  FetchCost Cost(absl::Span<const ParameterSpec>, int world_size) const override {
    if (world_size == 1) return {};
    return {.host_operations = 5, .collectives = 1, .event_records = 2, .event_waits = 2};
  }

  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext context) const override {
    EK_ASSIGN_OR_RETURN(FlatLayout flat, FlatLayout::Create(FlatItems(context.parameters), context.layout.world_size));
    return std::make_unique<FlatGatherer>(std::move(context), std::move(flat));
  }
};

EVENKEEL_REGISTER_FETCH_POLICY(FlatPolicy);

}  // namespace
}  // namespace evenkeel::zero3
