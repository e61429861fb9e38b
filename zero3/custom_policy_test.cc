// A fetch policy from outside: registered by name, through the same door, with the same bits.
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/flat_layout.h"
#include "evenkeel/zero3/policy_layouts.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;

// Every rank broadcasts its shard into place: W collectives instead of one.
class BroadcastGatherer final : public UnitGatherer {
 public:
  BroadcastGatherer(GathererContext context, FlatLayout flat) : context_(std::move(context)), flat_(std::move(flat)) {}

  absl::Status Gather(ConstTensorView shard, TensorView destination, Stream& comm) override {
    auto* base = static_cast<std::byte*>(destination.raw());
    const int64_t bytes = context_.layout.shard_bytes;
    EK_RETURN_IF_ERROR(comm.Copy(base + context_.rank * bytes, shard.raw(), bytes));
    for (int r = 0; r < context_.layout.world_size; ++r) {
      EK_RETURN_IF_ERROR(context_.group->Broadcast(TensorView(base + r * bytes, DType::kU8, Shape({bytes})), r, comm));
    }
    views_.clear();
    for (size_t i = 0; i < context_.parameters.size(); ++i) {
      const ParameterSpec& spec = context_.parameters[i];
      views_.emplace_back(base + flat_.offset_bytes(static_cast<int>(i)), spec.dtype, spec.shape);
    }
    return absl::OkStatus();
  }
  absl::Status Join(Stream&) override { return absl::OkStatus(); }
  absl::Status Release(Stream&) override { return absl::OkStatus(); }
  absl::Status Reclaim() override { return absl::OkStatus(); }
  absl::Span<const ConstTensorView> views() const override { return views_; }

 private:
  const GathererContext context_;
  const FlatLayout flat_;
  std::vector<ConstTensorView> views_;
};

class BroadcastPolicy final : public FetchPolicy {
 public:
  absl::string_view name() const override { return "broadcast"; }
  bool leaf_edges() const override { return true; }
  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    if (world_size == 1) return ReplicatedUnitLayout(parameters, 1);
    return FlatUnitLayout(parameters, world_size);
  }
  FetchCost Cost(absl::Span<const ParameterSpec>, int world_size) const override {
    if (world_size == 1) return {};
    return {.host_operations = world_size + 5, .collectives = world_size, .copies = 1};
  }
  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext context) const override {
    EK_ASSIGN_OR_RETURN(FlatLayout flat, FlatLayout::Create(FlatItems(context.parameters), context.layout.world_size));
    return std::make_unique<BroadcastGatherer>(std::move(context), std::move(flat));
  }
};

EVENKEEL_REGISTER_FETCH_POLICY(BroadcastPolicy);

TEST(CustomPolicyTest, SameBitsAsTheBuiltInOnes) {
  for (int world : {1, 2, 3, 5}) {
    ToyConfig config;
    config.mesh = {.tp = 1, .ep = 1, .dp = world, .etp = 1};
    config.options.prefetch_bytes = 2000;
    config.options.persistent_elements = 10;
    config.options.poison_released = true;
    ASSERT_OK_AND_ASSIGN(const ToyRun flat, RunToy(config));
    config.options.policy = "broadcast";
    ASSERT_OK_AND_ASSIGN(const ToyRun custom, RunToy(config));
    for (size_t s = 0; s < flat.ranks[0].steps.size(); ++s) {
      EXPECT_EQ(custom.ranks[0].steps[s].activation, flat.ranks[0].steps[s].activation);
      EXPECT_EQ(custom.ranks[0].steps[s].weights_digest, flat.ranks[0].steps[s].weights_digest);
    }
    EXPECT_EQ(custom.ranks[0].counts.peak_gathered_bytes, flat.ranks[0].counts.peak_gathered_bytes);
  }
}

TEST(CustomPolicyTest, UnknownPolicyListsAllThatAreLinked) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = 2, .etp = 1};
  config.options.policy = "flatt";
  ToyRun run;
  for (const absl::Status& status : RunToyStatuses(config, &run)) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kNotFound, ::testing::HasSubstr("broadcast, coalesced, flat")));
  }
}

}  // namespace
}  // namespace evenkeel::zero3
