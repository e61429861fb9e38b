// Every rank owns every element: nothing is gathered, gradients are all-reduced, every rank makes the whole step. The
// unsharded model to compare with; the same bits as all other policies.
#include <memory>

#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/policy_layouts.h"

namespace evenkeel::zero3 {
namespace {

class ReplicatedPolicy final : public FetchPolicy {
 public:
  absl::string_view name() const override { return "replicated"; }
  bool leaf_edges() const override { return true; }
  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec> parameters, int world_size) const override {
    return ReplicatedUnitLayout(parameters, world_size);
  }
  FetchCost Cost(absl::Span<const ParameterSpec>, int) const override { return {}; }
  // A replicated unit is always resident and has no gatherer.
  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext) const override {
    ErrorContext where;
    where.module = "zero3";
    where.operation = "create_gatherer";
    return MakeError(absl::StatusCode::kInternal, where, "replicated units are never gathered");
  }
};

EVENKEEL_REGISTER_FETCH_POLICY(ReplicatedPolicy);

}  // namespace
}  // namespace evenkeel::zero3
