#include "evenkeel/moe/order_types.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/order_adjoint.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr AxisType kI = {Placement::kInvariant, Dim::kUnset};
constexpr AxisType kR = {Placement::kReplicated, Dim::kUnset};
constexpr AxisType kP = {Placement::kPartial, Dim::kUnset};
constexpr AxisType V(Dim dim) { return {Placement::kVarying, dim}; }

bool IsRagged(Dim form) { return form >= Dim::kRows && form <= Dim::kNodeSums; }
bool IsPerNode(Dim form) { return form == Dim::kNodes || form == Dim::kNodeSums; }

absl::Status Found(absl::string_view what, const std::string& found, const std::string& wanted,
                   absl::string_view hint = "") {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", found, ", wants ", wanted, hint.empty() ? "" : ": ", hint));
}

// What to tell someone whose value has the wrong placement.
absl::string_view Hint(const AxisType& found, const AxisType& wanted) {
  const auto is = [&](const AxisType& from, const AxisType& to) {
    return found.placement == from.placement && wanted.placement == to.placement;
  };
  if (is(kP, kI)) return "an all_reduce (or reduce_scatter) is missing before it";
  if (is(kI, kR)) return "a copy is missing before it, so its gradient would not be summed";
  if (is(kR, kI)) return "a copy or a gather to R is doubled or misplaced";
  if (is(kI, kP)) return "the value is already summed; a second reduction would multiply it";
  return "";
}

// Whether rows belong to lanes is asked where it matters; elsewhere I(rows) is an I.
bool Same(const AxisType& found, const AxisType& wanted) {
  return found.placement == wanted.placement && (found.placement != Placement::kVarying || found.dim == wanted.dim);
}

absl::Status Want(const char* axis, const AxisType& found, const AxisType& wanted) {
  if (Same(found, wanted)) return absl::OkStatus();
  return Found(axis, TypeName(found), TypeName(wanted), Hint(found, wanted));
}

absl::Status WantForm(Dim found, Dim wanted) {
  if (found == wanted) return absl::OkStatus();
  return Found("the value", std::string(DimName(found)), std::string(DimName(wanted)));
}

// Ragged rows belong to lanes only after a dispatch of own tokens; they are gathered and sliced at the experts.
absl::Status CheckRaggedRows(const Step& step, const ValueType& before) {
  if (!IsRagged(before.form)) return absl::OkStatus();
  if (before.ep != V(Dim::kExperts)) {
    return Found("ep", TypeName(before.ep), "V(experts)",
                 "ragged rows are gathered and sliced at the experts; at the source slice or gather tokens");
  }
  if (step.kind == StepKind::kAllGather || before.tp.dim == before.form) return absl::OkStatus();
  return Found("tp", TypeName(before.tp),
               absl::StrCat(PlacementLetter(before.tp.placement), "(", DimName(before.form), ")"),
               "the rows do not belong to lanes; slice tokens before the dispatch");
}

constexpr absl::string_view kHalfDone = "the exchange is half done, its other level is missing before this step";

// slice, all_gather, copy, all_reduce, reduce_scatter: one axis changes its placement.
absl::StatusOr<ValueType> TypeAfterPlacementStep(const Step& step, const ValueType& before) {
  const bool on_ep = step.axis == comm::Axis::kEp;
  const char* axis = on_ep ? "ep" : "tp";
  if (before.ep == V(Dim::kNodes)) {
    return Found("ep", TypeName(before.ep), "V(sources) or V(experts)", kHalfDone);
  }
  ValueType after = before;
  AxisType& placement = on_ep ? after.ep : after.tp;
  const bool moves_rows =
      step.kind == StepKind::kSlice || step.kind == StepKind::kAllGather || step.kind == StepKind::kReduceScatter;
  if (moves_rows && step.dim != before.form) {
    return Found("dim", std::string(DimName(step.dim)), std::string(DimName(before.form)),
                 "that is what the value's rows are");
  }
  const Dim lanes = IsRagged(before.form) ? before.form : Dim::kUnset;
  switch (step.kind) {
    case StepKind::kSlice:
      EK_RETURN_IF_ERROR(Want(axis, placement, kI));
      placement = V(step.dim);
      break;
    case StepKind::kAllGather:
      EK_RETURN_IF_ERROR(Want(axis, placement, V(step.dim)));
      placement = {step.to == Placement::kReplicated ? Placement::kReplicated : Placement::kInvariant, lanes};
      break;
    case StepKind::kCopy:
      EK_RETURN_IF_ERROR(Want(axis, placement, kI));
      placement.placement = Placement::kReplicated;
      break;
    case StepKind::kAllReduce:
      EK_RETURN_IF_ERROR(Want(axis, placement, kP));
      placement.placement = Placement::kInvariant;
      break;
    default:
      EK_RETURN_IF_ERROR(Want(axis, placement, kP));
      placement = V(step.dim);
      break;
  }
  if (moves_rows) EK_RETURN_IF_ERROR(CheckRaggedRows(step, before));
  return after;
}

// Where rows are on EP behind an exchange: its two ends swapped.
absl::StatusOr<AxisType> EpAfterExchange(Level level, const AxisType& before) {
  const AxisType source_end = V(level == Level::kNode ? Dim::kNodes : Dim::kSources);
  const AxisType expert_end = V(level == Level::kPeers ? Dim::kNodes : Dim::kExperts);
  if (before == source_end) return expert_end;
  if (before == expert_end) return source_end;
  absl::string_view hint;
  if (level == Level::kAll && before == V(Dim::kNodes)) hint = kHalfDone;
  if (level == Level::kNode) hint = "rows go between nodes (level PEERS) first";
  if (level == Level::kPeers) hint = "on their way back rows go inside the node (level NODE) first";
  return Found("ep", TypeName(before), absl::StrCat(TypeName(source_end), " or ", TypeName(expert_end)), hint);
}

// all_to_all(_v): by source <-> by expert. Lane by lane with expert TP; across lanes without, so each lane may bring
// a row only once.
absl::StatusOr<ValueType> TypeAfterExchange(const Step& step, const ValueType& before, ExpertLayout layout) {
  const bool padded = step.kind == StepKind::kAllToAll;
  if (padded ? before.form != Dim::kSlots : !IsRagged(before.form)) {
    return Found("the value", std::string(DimName(before.form)), padded ? "slots" : "rows, destinations or sums",
                 before.form == Dim::kSlots ? "padded buffers go by all_to_all" : "");
  }
  if (IsPerNode(before.form) && step.level != Level::kPeers) {
    return Found("the value", std::string(DimName(before.form)), "rows, destinations or sums",
                 "a row per node goes between nodes (level PEERS), and is expanded there before it goes on");
  }
  ValueType after = before;
  EK_ASSIGN_OR_RETURN(after.ep, EpAfterExchange(step.level, before.ep));
  if (before.tp.placement != Placement::kVarying && before.tp.dim != Dim::kUnset) {
    return Found("tp", TypeName(before.tp), absl::StrCat("V(", DimName(before.form), ")"),
                 "the rows of all lanes are here; each lane exchanges its own");
  }
  if (layout == ExpertLayout::kWhole) {
    // Rows leave their lanes where they reach or leave the rank of their expert.
    const auto lanes = [&](const AxisType& ep) { return V(ep == V(Dim::kExperts) ? Dim::kExperts : before.form); };
    if (!(before.tp == lanes(before.ep))) {
      return Found("tp", TypeName(before.tp), TypeName(lanes(before.ep)),
                   "with whole experts the EP group spans lanes, so every expert would see each row T times");
    }
    after.tp = lanes(after.ep);
  }
  return after;
}

absl::StatusOr<ValueType> TypeAfterDispatch(const Step& step, const ValueType& before) {
  EK_RETURN_IF_ERROR(WantForm(before.form, Dim::kTokens));
  EK_RETURN_IF_ERROR(Want("ep", before.ep, V(Dim::kSources)));
  if (step.dim != Dim::kSlots && step.dim != Dim::kRows && step.dim != Dim::kDestinations && step.dim != Dim::kNodes) {
    return Found("dim", std::string(DimName(step.dim)), "slots, rows, destinations or nodes");
  }
  ValueType after = before;
  after.form = step.dim;
  if (before.tp == V(Dim::kTokens)) {
    if (step.dim == Dim::kSlots) {
      return Found("tp", "V(tokens)", "I or R", "padded slots are filled from all tokens; dispatch rows instead");
    }
    after.tp = V(step.dim);
  } else if (before.tp == kP) {
    return Found("tp", "P", "I, R or V(tokens)");
  }
  return after;
}

absl::StatusOr<ValueType> TypeAfterExperts(const ValueType& before, ExpertLayout layout) {
  if (before.form != Dim::kSlots && before.form != Dim::kRows) {
    return Found("the value", std::string(DimName(before.form)), "slots or rows");
  }
  EK_RETURN_IF_ERROR(Want("ep", before.ep, V(Dim::kExperts)));
  ValueType after = before;
  if (layout == ExpertLayout::kWhole) {
    EK_RETURN_IF_ERROR(Want("tp", before.tp, V(Dim::kExperts)));
  } else {
    EK_RETURN_IF_ERROR(Want("tp", before.tp, kR));
    after.tp.placement = Placement::kPartial;
  }
  return after;
}

absl::StatusOr<ValueType> TypeAfterCombine(const Step& step, const ValueType& before) {
  const bool sums = before.form == Dim::kSums || before.form == Dim::kNodeSums;
  if (before.form != Dim::kSlots && before.form != Dim::kRows && !sums) {
    return Found("the value", std::string(DimName(before.form)), "slots, rows or sums");
  }
  EK_RETURN_IF_ERROR(Want("ep", before.ep, V(Dim::kSources)));
  ValueType after = before;
  after.form = Dim::kTokens;
  if (step.to == Placement::kPartial) {
    const bool addends = !sums && before.tp == kP;
    if (!addends && before.tp != V(Dim::kSlots)) return Found("tp", TypeName(before.tp), "P or V(slots)");
    after.tp = kP;
    return after;
  }
  if (before.tp == kI) return after;
  if (before.tp == V(before.form) && before.form != Dim::kSlots) {
    after.tp = V(Dim::kTokens);
    return after;
  }
  const std::string wanted = before.form == Dim::kSlots ? "I" : absl::StrCat("I or V(", DimName(before.form), ")");
  return Found("tp", TypeName(before.tp), wanted, Hint(before.tp, kI));
}

// expand half way: one row per (token, node) -> one per destination in it. fold: back, as a sum. Lane by lane.
absl::StatusOr<ValueType> TypeAfterExpandHalfWay(const ValueType& before, Dim to) {
  ValueType after = before;
  after.form = to;
  if (before.tp.dim == before.form) after.tp.dim = to;
  return after;
}

// At the destination, expand: one row per (token, destination) -> one per route. fold: back, weighted and summed:
// linear in the rows, so addends are welcome. Rows of one token must not be spread over lanes.
absl::StatusOr<ValueType> TypeAfterExpand(const ValueType& before, Dim from, Dim to) {
  if (from == Dim::kDestinations && before.form == Dim::kNodes && before.ep == V(Dim::kNodes)) {
    return TypeAfterExpandHalfWay(before, Dim::kDestinations);
  }
  if (from == Dim::kRows && before.form == Dim::kSums && before.ep == V(Dim::kNodes)) {
    return TypeAfterExpandHalfWay(before, Dim::kNodeSums);
  }
  EK_RETURN_IF_ERROR(WantForm(before.form, from));
  EK_RETURN_IF_ERROR(Want("ep", before.ep, V(Dim::kExperts)));
  if (before.tp.placement == Placement::kVarying && before.tp != V(Dim::kExperts)) {
    return Found("tp", TypeName(before.tp), "I, R, P or V(experts)", "gather the rows of all lanes first");
  }
  ValueType after = before;
  after.form = to;
  if (before.tp.dim == from) after.tp.dim = to;
  return after;
}

absl::Status AtStep(const Order& order, int number, const Step& step, const absl::Status& what) {
  const std::string line = step.line > 0 ? absl::StrCat(" at line ", step.line) : "";
  return absl::InvalidArgumentError(
      absl::StrCat("order '", order.name, "' step ", number, " (", StepName(step), ")", line, ": ", what.message()));
}

bool RunsIn(const Step& step, ExpertLayout layout) {
  return step.when == When::kAlways ||
         (step.when == When::kTensorParallel) == (layout == ExpertLayout::kTensorParallel);
}

// dispatch, experts and combine: each exactly once. (Their mutual order follows from the types.) Rows are folded
// exactly where they were expanded.
absl::Status CheckOnce(const Order& order, const std::vector<TypedStep>& forward) {
  const auto counts = [&](StepKind kind) {
    return std::count_if(forward.begin(), forward.end(), [&](const TypedStep& t) { return t.step.kind == kind; });
  };
  if (counts(StepKind::kExpand) != counts(StepKind::kFold)) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' has ", counts(StepKind::kExpand),
                                                   " expand and ", counts(StepKind::kFold),
                                                   " fold steps; what is expanded must be folded"));
  }
  for (StepKind kind : {StepKind::kDispatch, StepKind::kExperts, StepKind::kCombine}) {
    int count = 0;
    for (const TypedStep& typed : forward) {
      if (typed.step.kind != kind || ++count < 2) continue;
      return AtStep(order, typed.origin, typed.step,
                    absl::InvalidArgumentError("an order has one, this is the second"));
    }
    if (count == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("order '", order.name, "' has no step '", StepKindName(kind), "'; it needs exactly one"));
    }
  }
  return absl::OkStatus();
}

// Chunks are of experts. A row per destination serves several of them: it would travel once for each chunk, and its
// sums would be added up in another order.
absl::Status CheckChunks(const Order& order, const std::vector<TypedStep>& forward) {
  for (const TypedStep& typed : forward) {
    if (!IsExchange(typed.step.kind) || typed.before.form == Dim::kSlots || typed.before.form == Dim::kRows) {
      continue;
    }
    return AtStep(order, typed.origin, typed.step,
                  absl::InvalidArgumentError(absl::StrCat(
                      "in ", order.chunks, " chunks of experts one of these ", DimName(typed.before.form),
                      " would be sent for each chunk that has an expert of its token; only slots and rows can")));
  }
  return absl::OkStatus();
}

absl::Status CheckEnd(const Order& order, const ValueType& end) {
  const ValueType wanted = {.form = Dim::kTokens, .tp = order.output};
  if (end == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' after its last step (",
                                                 StepName(order.steps.back()), "): the value is ", TypeName(end),
                                                 ", the declared output wants ", TypeName(wanted)));
}

}  // namespace

absl::StatusOr<ValueType> TypeAfter(const Step& step, const ValueType& before, ExpertLayout layout) {
  if (step.transposed) return absl::InvalidArgumentError("a transposed step belongs to a derived program");
  switch (step.kind) {
    case StepKind::kSlice:
    case StepKind::kAllGather:
    case StepKind::kCopy:
    case StepKind::kAllReduce:
    case StepKind::kReduceScatter:
      return TypeAfterPlacementStep(step, before);
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      return TypeAfterExchange(step, before, layout);
    case StepKind::kDispatch:
      return TypeAfterDispatch(step, before);
    case StepKind::kExperts:
      return TypeAfterExperts(before, layout);
    case StepKind::kCombine:
      return TypeAfterCombine(step, before);
    case StepKind::kExpand:
      return TypeAfterExpand(before, Dim::kDestinations, Dim::kRows);
    case StepKind::kFold:
      return TypeAfterExpand(before, Dim::kRows, Dim::kSums);
  }
  return absl::InternalError("unknown step kind");
}

absl::StatusOr<TypedOrder> CheckOrder(const Order& order, ExpertLayout layout) {
  if (order.steps.empty()) return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' has no steps"));
  if (layout == ExpertLayout::kAny) layout = order.expert_layout;
  if (layout == ExpertLayout::kAny) layout = ExpertLayout::kTensorParallel;
  if (order.expert_layout != ExpertLayout::kAny && order.expert_layout != layout) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.name, "' is for expert layout ",
                                                   ExpertLayoutName(order.expert_layout), ", asked for ",
                                                   ExpertLayoutName(layout)));
  }
  TypedOrder typed;
  typed.order = order;
  typed.layout = layout;
  ValueType type = {.form = Dim::kTokens, .tp = order.input};
  for (size_t i = 0; i < order.steps.size(); ++i) {
    const Step& step = order.steps[i];
    if (!RunsIn(step, layout)) continue;
    const int number = static_cast<int>(i) + 1;
    absl::StatusOr<ValueType> after = TypeAfter(step, type, layout);
    if (!after.ok()) return AtStep(order, number, step, after.status());
    typed.forward.push_back({.step = step, .before = type, .after = *after, .origin = number});
    type = *after;
  }
  EK_RETURN_IF_ERROR(CheckOnce(order, typed.forward));
  EK_RETURN_IF_ERROR(CheckEnd(order, type));
  if (order.chunks > 1) EK_RETURN_IF_ERROR(CheckChunks(order, typed.forward));
  typed.backward = DeriveBackward(typed.forward);
  return typed;
}

}  // namespace evenkeel::moe
