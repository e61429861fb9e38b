#include "evenkeel/moe/order_adjoint.h"

#include <algorithm>

namespace evenkeel::moe {
namespace {

// The step whose map is the transpose of `step`'s, given the forward's input type (slice and gather need its dim).
Step Transpose(const TypedStep& forward) {
  Step step = forward.step;
  const AxisType& in = step.axis == comm::Axis::kEp ? forward.before.ep : forward.before.tp;
  const AxisType& out = step.axis == comm::Axis::kEp ? forward.after.ep : forward.after.tp;
  switch (step.kind) {
    case StepKind::kSlice:
      step.kind = StepKind::kAllGather;
      step.dim = out.dim;
      step.to = Placement::kInvariant;
      break;
    case StepKind::kAllGather:
      step.kind = step.to == Placement::kReplicated ? StepKind::kReduceScatter : StepKind::kSlice;
      step.dim = in.dim;
      step.to = Placement::kUnset;
      break;
    case StepKind::kCopy:
      step.kind = StepKind::kAllReduce;
      break;
    case StepKind::kAllReduce:
      step.kind = StepKind::kCopy;
      break;
    case StepKind::kReduceScatter:
      step.kind = StepKind::kAllGather;
      step.dim = out.dim;
      step.to = Placement::kReplicated;
      break;
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      break;  // the direction follows from the type
    case StepKind::kDispatch:
    case StepKind::kExperts:
    case StepKind::kCombine:
    case StepKind::kExpand:
    case StepKind::kFold:
      step.transposed = !step.transposed;
      break;
  }
  // combine' makes rows and dispatch' makes tokens: both need to know the rows' form.
  if (step.kind == StepKind::kCombine) step.dim = forward.before.form;
  return step;
}

}  // namespace

TypedStep AdjointStep(const TypedStep& forward) {
  return {.step = Transpose(forward),
          .before = GradientType(forward.after),
          .after = GradientType(forward.before),
          .origin = forward.origin};
}

std::vector<TypedStep> DeriveBackward(absl::Span<const TypedStep> forward) {
  std::vector<TypedStep> backward;
  backward.reserve(forward.size());
  std::transform(forward.rbegin(), forward.rend(), std::back_inserter(backward), AdjointStep);
  return backward;
}

}  // namespace evenkeel::moe
