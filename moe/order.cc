#include "evenkeel/moe/order.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::moe {

bool TypedOrder::is_ragged() const {
  for (const TypedStep& step : forward) {
    if (step.after.form >= Dim::kRows && step.after.form <= Dim::kNodeSums) return true;
  }
  return false;
}

bool TypedOrder::is_deduplicated() const {
  for (const TypedStep& step : forward) {
    if (step.step.kind == StepKind::kFold) return true;
  }
  return false;
}

bool TypedOrder::sends_once_per_node() const {
  for (const TypedStep& step : forward) {
    if (step.after.form == Dim::kNodes) return true;
  }
  return false;
}

bool TypedOrder::has_levels() const {
  for (const TypedStep& step : forward) {
    if (step.step.level != Level::kAll) return true;
  }
  return false;
}

AxisType TypedOrder::weighted_rows() const {
  const StepKind weights = is_deduplicated() ? StepKind::kFold : StepKind::kCombine;
  for (const TypedStep& step : forward) {
    if (step.step.kind == weights) return step.before.tp;
  }
  return {};
}

ChunkedSteps ChunkedStepsOf(const std::vector<TypedStep>& program) {
  ChunkedSteps steps;
  for (size_t i = 0; i < program.size(); ++i) {
    if (!IsExchange(program[i].step.kind)) continue;
    if (steps.end == 0) steps.first = static_cast<int>(i);
    steps.end = static_cast<int>(i) + 1;
  }
  return steps;
}

absl::string_view PlacementLetter(Placement placement) {
  switch (placement) {
    case Placement::kUnset:
      return "-";
    case Placement::kInvariant:
      return "I";
    case Placement::kReplicated:
      return "R";
    case Placement::kVarying:
      return "V";
    case Placement::kPartial:
      return "P";
  }
  return "?";
}

absl::string_view DimName(Dim dim) {
  switch (dim) {
    case Dim::kUnset:
      return "none";
    case Dim::kTokens:
      return "tokens";
    case Dim::kSlots:
      return "slots";
    case Dim::kRows:
      return "rows";
    case Dim::kDestinations:
      return "destinations";
    case Dim::kSums:
      return "sums";
    case Dim::kSources:
      return "sources";
    case Dim::kExperts:
      return "experts";
    case Dim::kNodes:
      return "nodes";
    case Dim::kNodeSums:
      return "node_sums";
  }
  return "?";
}

absl::string_view StepKindName(StepKind kind) {
  switch (kind) {
    case StepKind::kSlice:
      return "slice";
    case StepKind::kAllGather:
      return "all_gather";
    case StepKind::kCopy:
      return "copy";
    case StepKind::kAllReduce:
      return "all_reduce";
    case StepKind::kReduceScatter:
      return "reduce_scatter";
    case StepKind::kAllToAll:
      return "all_to_all";
    case StepKind::kAllToAllV:
      return "all_to_all_v";
    case StepKind::kDispatch:
      return "dispatch";
    case StepKind::kExperts:
      return "experts";
    case StepKind::kCombine:
      return "combine";
    case StepKind::kExpand:
      return "expand";
    case StepKind::kFold:
      return "fold";
  }
  return "?";
}

absl::string_view ExpertLayoutName(ExpertLayout layout) {
  switch (layout) {
    case ExpertLayout::kAny:
      return "any";
    case ExpertLayout::kTensorParallel:
      return "tensor_parallel";
    case ExpertLayout::kWhole:
      return "whole";
  }
  return "?";
}

absl::string_view LevelName(Level level) {
  switch (level) {
    case Level::kAll:
      return "all";
    case Level::kPeers:
      return "peers";
    case Level::kNode:
      return "node";
  }
  return "?";
}

std::string TypeName(const AxisType& type) {
  if (type.dim == Dim::kUnset) return std::string(PlacementLetter(type.placement));
  return absl::StrCat(PlacementLetter(type.placement), "(", DimName(type.dim), ")");
}

std::string TypeName(const ValueType& type) {
  return absl::StrCat(DimName(type.form), " tp=", TypeName(type.tp), " ep=", TypeName(type.ep));
}

std::string StepName(const Step& step) {
  std::string name(StepKindName(step.kind));
  if (step.transposed) name += "'";
  switch (step.kind) {
    case StepKind::kDispatch:
      return absl::StrCat(name, "(", DimName(step.dim), ")");
    case StepKind::kCombine:
      return step.to == Placement::kPartial ? absl::StrCat(name, "->P") : name;
    case StepKind::kExperts:
    case StepKind::kExpand:
    case StepKind::kFold:
      return name;
    case StepKind::kCopy:
    case StepKind::kAllReduce:
      return absl::StrCat(name, "(", comm::AxisName(step.axis), ")");
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      if (step.level != Level::kAll) return absl::StrCat(name, "(ep.", LevelName(step.level), ")");
      return absl::StrCat(name, "(", comm::AxisName(step.axis), ")");
    case StepKind::kSlice:
    case StepKind::kReduceScatter:
      return absl::StrCat(name, "(", comm::AxisName(step.axis), ", ", DimName(step.dim), ")");
    case StepKind::kAllGather:
      return absl::StrCat(name, "(", comm::AxisName(step.axis), ", ", DimName(step.dim), ")->",
                          PlacementLetter(step.to));
  }
  return name;
}

AxisType GradientType(const AxisType& type) {
  switch (type.placement) {
    case Placement::kReplicated:
      return {Placement::kPartial, type.dim};
    case Placement::kPartial:
      return {Placement::kReplicated, type.dim};
    default:
      return type;
  }
}

ValueType GradientType(const ValueType& type) {
  return {.form = type.form, .tp = GradientType(type.tp), .ep = GradientType(type.ep)};
}

}  // namespace evenkeel::moe
