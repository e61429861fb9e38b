#include "evenkeel/moe/layer_checks.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

absl::Status NotCanonical(absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("canonical numerics: ", why));
}

// Sums over a token's experts run along a tree of expert ids; lanes must have been summed before.
absl::Status CheckSumsOverExperts(const TypedOrder& order) {
  for (const std::vector<TypedStep>* program : {&order.forward, &order.backward}) {
    for (const TypedStep& typed : *program) {
      const StepKind kind = typed.step.kind;
      const bool sums_experts = kind == StepKind::kFold || kind == StepKind::kExpand ||
                                kind == (typed.step.transposed ? StepKind::kDispatch : StepKind::kCombine);
      if (!sums_experts ||
          (typed.before.tp.placement != Placement::kPartial && typed.after.tp.placement != Placement::kPartial)) {
        continue;
      }
      return NotCanonical(absl::StrCat("order '", order.order.name, "' adds up a token's experts (",
                                       typed.step.transposed ? "backward of " : "", StepName(typed.step),
                                       ") before their sums over lanes are complete"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ExpertLayout> LayoutOf(const Order& order, const GroupSizes& groups) {
  if (groups.expert_tp != 1 && groups.expert_tp != groups.tp) {
    return absl::InvalidArgumentError(absl::StrCat("expert_tp is ", groups.expert_tp, ", wants 1 or tp = ", groups.tp));
  }
  if (groups.tp > 1) return groups.expert_tp == groups.tp ? ExpertLayout::kTensorParallel : ExpertLayout::kWhole;
  return order.expert_layout == ExpertLayout::kAny ? ExpertLayout::kTensorParallel : order.expert_layout;
}

absl::Status CheckConfig(const MoeConfig& config, const GroupSizes& groups) {
  EK_RETURN_IF_ERROR(config.router.Validate());
  if (!IsFloating(config.dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("moe dtype ", DTypeName(config.dtype), " is not f32, f64, bf16 or f16"));
  }
  if (config.router.experts % groups.ep != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(config.router.experts, " experts are not divisible by ep ", groups.ep));
  }
  if (config.ffn < 1 || config.ffn % groups.expert_tp != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ffn ", config.ffn, " is not a positive multiple of the expert TP size ", groups.expert_tp));
  }
  if (groups.expert_tp > 1 && groups.tp != groups.expert_tp) {
    return absl::InvalidArgumentError("expert TP without TP");
  }
  return absl::OkStatus();
}

Order CanonicalOrder(const Order& order) {
  const auto is = [](const Step& step, StepKind kind, Dim dim) { return step.kind == kind && step.dim == dim; };
  const auto has = [&](StepKind kind, Dim dim) {
    return std::any_of(order.steps.begin(), order.steps.end(), [&](const Step& step) { return is(step, kind, dim); });
  };
  if (!has(StepKind::kAllGather, Dim::kDestinations) || !has(StepKind::kReduceScatter, Dim::kSums)) return order;
  Order canonical = order;
  canonical.steps.clear();
  for (Step step : order.steps) {
    Step lanes = {.kind = StepKind::kCopy, .when = When::kTensorParallel, .line = step.line};
    if (is(step, StepKind::kAllGather, Dim::kDestinations)) step.to = Placement::kInvariant;
    if (is(step, StepKind::kReduceScatter, Dim::kSums)) step.kind = StepKind::kSlice;
    if (step.kind == StepKind::kExperts) canonical.steps.push_back(lanes);
    canonical.steps.push_back(step);
    lanes.kind = StepKind::kAllReduce;
    if (step.kind == StepKind::kExperts) canonical.steps.push_back(lanes);
  }
  return canonical;
}

absl::Status CheckNumerics(const MoeConfig& config, const TypedOrder& order, const GroupSizes& groups) {
  if (config.numerics != ExpertNumerics::kCanonical) return absl::OkStatus();
  if (kCanonicalBlocks % groups.tp != 0 || config.ffn % kCanonicalBlocks != 0) {
    return NotCanonical(absl::StrCat("the middle is cut into ", kCanonicalBlocks, " blocks; tp ", groups.tp,
                                     " with ffn ", config.ffn, " does not fit"));
  }
  if (!IsPowerOfTwo(groups.ep) || !IsPowerOfTwo(config.router.experts / groups.ep)) {
    return NotCanonical(absl::StrCat("ep ", groups.ep, " with ", config.router.experts / groups.ep,
                                     " experts per rank, wants powers of two"));
  }
  if (order.layout == ExpertLayout::kWhole && groups.ep < groups.tp && order.order.chunks > 1) {
    return NotCanonical(absl::StrCat("whole experts with ep ", groups.ep, " below tp ", groups.tp,
                                     " bring the rows of all lanes together, so order '", order.order.name,
                                     "' cannot run in ", order.order.chunks, " chunks"));
  }
  return CheckSumsOverExperts(order);
}

absl::Status CheckLevels(const TypedOrder& order, const MoeGroups& groups) {
  const auto bad = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.order.name, "' exchanges by level: ", what));
  };
  if (!order.has_levels() || groups.ep == nullptr || groups.ep->size() == 1) return absl::OkStatus();
  if (groups.ep_node == nullptr || groups.ep_peers == nullptr) return bad("MoeGroups needs ep_node and ep_peers");
  const int ep = groups.ep->size(), rank = groups.ep->rank(), per_node = groups.ep_node->size();
  if (per_node * groups.ep_peers->size() == ep && rank % per_node == groups.ep_node->rank() &&
      rank / per_node == groups.ep_peers->rank()) {
    return absl::OkStatus();
  }
  return bad(absl::StrCat("EP rank ", rank, " of ", ep, " cannot be rank ", groups.ep_node->rank(), " of ", per_node,
                          " on its node and rank ", groups.ep_peers->rank(), " of ", groups.ep_peers->size(),
                          " among its peers"));
}

}  // namespace evenkeel::moe
