// What each kind of step does to buffers and nestings.
#include <algorithm>
#include <utility>

#include "evenkeel/moe/program_builder.h"
#include "evenkeel/moe/ragged_plan.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }
bool AtExperts(const ValueType& type) { return type.ep.dim == Dim::kExperts; }
bool IsSums(Dim form) { return form == Dim::kSums || form == Dim::kNodeSums; }
bool IsHalfWay(const TypedStep& typed) { return typed.before.ep.dim == Dim::kNodes; }

}  // namespace

RowsRef ProgramBuilder::WalkStep(int index, const RowsRef& in) {
  step_ = index;
  const size_t actions = out_.actions.size();
  RowsRef value = Walk(program_[index], in);
  value.type = program_[index].after;
  if (out_.actions.size() == actions) Emit(ActionKind::kNothing, value, value);
  out_.actions.back().ends_step = true;
  return value;
}

RowsRef ProgramBuilder::Walk(const TypedStep& typed, const RowsRef& in) {
  switch (typed.step.kind) {
    case StepKind::kSlice:
      return Slice(typed, in);
    case StepKind::kAllGather:
      return Gather(typed, in);
    case StepKind::kCopy:
      return in;
    case StepKind::kAllReduce:
      return AllReduce(typed, in);
    case StepKind::kReduceScatter:
      return ReduceScatter(typed, in);
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      return Exchange(typed, in);
    case StepKind::kDispatch:
      return typed.step.transposed ? DispatchTransposed(typed, in) : Dispatch(typed, in);
    case StepKind::kExperts:
      return Experts(typed, in);
    case StepKind::kCombine:
      return typed.step.transposed ? CombineTransposed(typed, in) : Combine(typed, in);
    case StepKind::kExpand:
      if (IsHalfWay(typed)) return Map(typed, in, typed.step.transposed ? ActionKind::kCollect : ActionKind::kSpread);
      return Map(typed, in, typed.step.transposed ? ActionKind::kExpandTransposed : ActionKind::kExpand);
    case StepKind::kFold:
      return Fold(typed, in);
  }
  return in;
}

// The value with its rows in `nesting`: the same memory where only extents of 1 move.
RowsRef ProgramBuilder::Renest(const RowsRef& value, const RowNesting& nesting) {
  RowsRef result = value;
  if (value.nesting == nesting || IsSameOrder(value, nesting)) {
    result.nesting = nesting;
    return result;
  }
  result = NewRows(value.type, nesting);
  Emit(ActionKind::kPermute, value, result);
  return result;
}

bool ProgramBuilder::IsSameOrder(const RowsRef& value, const RowNesting& nesting) const {
  if (value.type.form == Dim::kSlots) {
    return SameRows(value.nesting, nesting, ExtentsOf(value.type, sizes_, chunk_));
  }
  // Ragged rows of several lanes interleave by slot inside an expert.
  const bool gathered = value.type.tp.dim != Dim::kUnset && !IsVarying(value.type.tp);
  const bool spans_lanes = order_.layout == ExpertLayout::kWhole && sizes_.ep > 1;
  if (sizes_.tp > 1 && (gathered || spans_lanes)) return false;
  return sizes_.ep == 1 || ChunkOfExperts(sizes_.experts / sizes_.ep, sizes_.chunks, chunk_).size == 1;
}

// expand and fold keep no nesting: their rows are as the plan lists them.
RowsRef ProgramBuilder::Map(const TypedStep& typed, const RowsRef& in, ActionKind kind) {
  const bool to_rows = typed.after.form == Dim::kRows;
  RowsRef out = NewRows(typed.after, to_rows ? Grouped(Customary(typed.after)) : Customary(typed.after));
  Emit(kind, in, out);
  return out;
}

RowsRef ProgramBuilder::Fold(const TypedStep& typed, const RowsRef& in) {
  if (IsHalfWay(typed)) return Map(typed, in, typed.step.transposed ? ActionKind::kSpread : ActionKind::kCollect);
  if (typed.step.transposed) {
    RowsRef out = Map(typed, in, ActionKind::kFoldTransposed);
    out_.actions.back().saved_rows = tape_.weighted_rows;
    return out;
  }
  tape_.weighted_rows = in;
  return Map(typed, in, ActionKind::kFold);
}

RowsRef ProgramBuilder::Slice(const TypedStep& typed, const RowsRef& in) {
  RowsRef out = in;
  if (in.type.form != Dim::kTokens) {
    const RowsRef laned = sizes_.tp == 1 ? in : Renest(in, InFront(RowTag::kLane, in.nesting));
    out = laned;
    out.nesting = Without(laned.nesting, RowTag::kLane);
  }
  out.rows = Rows(typed.after);
  if (in.type.form == Dim::kTokens) {
    out.first_row += OwnTokens(sizes_.tokens, sizes_.tp, sizes_.lane).begin;
  } else if (in.type.form == Dim::kSlots) {
    out.first_row += sizes_.lane * out.rows;
  } else {
    out.first_row += rows_.Flow(in.type.form, chunk_).gathered_before;
  }
  return out;
}

RowsRef ProgramBuilder::Gather(const TypedStep& typed, const RowsRef& in) {
  const RowNesting nesting = in.type.form == Dim::kTokens ? RowNesting() : InFront(RowTag::kLane, in.nesting);
  RowsRef out = in;
  out.nesting = nesting;
  if (sizes_.tp == 1) return out;
  out = NewRows(typed.after, nesting);
  Emit(ActionKind::kAllGather, in, out);
  return out;
}

RowsRef ProgramBuilder::AllReduce(const TypedStep& typed, const RowsRef& in) {
  if (sizes_.tp == 1) return in;
  RowsRef out = IsWholeOwn(in) ? in : NewRows(typed.after, in.nesting);
  Emit(ActionKind::kAllReduce, in, out);
  return out;
}

RowsRef ProgramBuilder::ReduceScatter(const TypedStep& typed, const RowsRef& in) {
  RowsRef laned = in;
  if (in.type.form != Dim::kTokens && sizes_.tp > 1) laned = Renest(in, InFront(RowTag::kLane, in.nesting));
  const RowNesting nesting = Without(laned.nesting, RowTag::kLane);
  if (sizes_.tp == 1) {
    laned.nesting = nesting;
    return laned;
  }
  RowsRef out = NewRows(typed.after, nesting);
  Emit(ActionKind::kReduceScatter, laned, out);
  return out;
}

RowsRef ProgramBuilder::Exchange(const TypedStep& typed, const RowsRef& in) {
  if (typed.step.level == Level::kNode) return ExchangeInNode(typed, in);
  const bool to_experts = AtExperts(typed.after), from_experts = AtExperts(typed.before);
  RowsRef ready = in;
  if (from_experts) ready = Renest(in, InFront(RowTag::kSource, InFront(RowTag::kExpert, in.nesting)));
  if (typed.before.ep.dim == Dim::kSources) ready = Renest(in, InFront(RowTag::kExpert, in.nesting));
  RowNesting nesting = from_experts ? Without(ready.nesting, RowTag::kSource) : ready.nesting;
  if (to_experts) nesting.insert(nesting.begin(), RowTag::kSource);
  const int size = typed.step.level == Level::kPeers ? sizes_.num_nodes() : sizes_.ep;
  if (size == 1) {
    ready.nesting = nesting;
    return ready;
  }
  RowsRef out = NewRows(typed.after, nesting);
  Emit(ActionKind::kExchange, ready, out);
  return out;
}

// Rows lie by node, then by local index, before and after; what is exchanged lies the other way round.
RowsRef ProgramBuilder::ExchangeInNode(const TypedStep& typed, const RowsRef& in) {
  const bool to_experts = AtExperts(typed.after);
  RowsRef value = in;
  if (!to_experts) value = Renest(in, InFront(RowTag::kSource, InFront(RowTag::kExpert, in.nesting)));
  RowNesting nesting = to_experts ? value.nesting : Without(value.nesting, RowTag::kSource);
  if (to_experts) nesting.insert(nesting.begin(), RowTag::kSource);
  if (sizes_.per_node() > 1) {
    value = Regroup(value, /*back=*/false);
    RowsRef out = NewRows(typed.after, nesting);
    Emit(ActionKind::kExchange, value, out);
    value = Regroup(out, /*back=*/true);
  }
  value.nesting = nesting;
  return value;
}

RowsRef ProgramBuilder::Regroup(const RowsRef& in, bool back) {
  if (sizes_.num_nodes() == 1) return in;
  RowsRef out = NewRows(in.type, in.nesting);
  Emit(ActionKind::kRegroup, in, out).back = back;
  return out;
}

// True when the next step wants lanes outermost, so that the map may write them so.
bool ProgramBuilder::NextWantsLanes() const {
  const size_t next = static_cast<size_t>(step_) + 1;
  if (sizes_.tp == 1 || next >= program_.size()) return false;
  const StepKind kind = program_[next].step.kind;
  return kind == StepKind::kSlice || kind == StepKind::kReduceScatter;
}

RowsRef ProgramBuilder::Dispatch(const TypedStep& typed, const RowsRef& in) {
  RowNesting nesting = {RowTag::kExpert, RowTag::kSlot};
  if (typed.after.form == Dim::kSlots) nesting = {RowTag::kExpert, RowTag::kLane, RowTag::kSlot};
  if (sizes_.chunks > 1) nesting = InFront(RowTag::kChunk, nesting);
  if (typed.after.form == Dim::kSlots) {
    if (NextWantsLanes()) nesting = InFront(RowTag::kLane, nesting);
  }
  RowsRef out = NewRows(typed.after, nesting);
  Emit(ActionKind::kDispatch, in, out);
  return out;
}

RowsRef ProgramBuilder::DispatchTransposed(const TypedStep& typed, const RowsRef& in) {
  RowsRef out = NewRows(typed.after, {});
  Emit(ActionKind::kDispatchTransposed, in, out);
  return out;
}

RowsRef ProgramBuilder::Combine(const TypedStep& typed, const RowsRef& in) {
  if (!IsSums(in.type.form)) tape_.weighted_rows = in;
  RowsRef out = NewRows(typed.after, {});
  Emit(ActionKind::kCombine, in, out);
  return out;
}

RowsRef ProgramBuilder::CombineTransposed(const TypedStep& typed, const RowsRef& in) {
  const bool sums = IsSums(typed.after.form);
  RowsRef out = NewRows(typed.after, sums ? Customary(typed.after) : tape_.weighted_rows.nesting);
  Action& action = Emit(ActionKind::kCombineTransposed, in, out);
  if (!sums) action.saved_rows = tape_.weighted_rows;
  return out;
}

RowsRef ProgramBuilder::Experts(const TypedStep& typed, const RowsRef& in) {
  const RowsRef rows = Renest(in, Grouped(in.nesting));
  RowsRef out = NewRows(typed.after, rows.nesting);
  const bool backward = typed.step.transposed;
  if (!backward) tape_.experts.push_back({.rows = rows});
  ExpertTape& tape = tape_.experts[chunk_];
  const bool merges = backward && sizes_.merges_lanes;
  const bool fresh = !backward || merges || sizes_.recompute;
  const int64_t n = merges ? sizes_.merged_rows : rows.rows;
  const int pre = fresh ? NewWork(n, Columns()) : tape.pre;
  const int gate = !sizes_.gated ? -1 : fresh ? NewWork(n, Columns()) : tape.gate;
  if (!backward && !sizes_.recompute) {
    tape.pre = pre;
    tape.gate = gate;
  }
  const int hidden = NewWork(n, Columns());
  const int dpre = backward ? NewWork(n, Columns()) : -1;
  const int dgate = backward && sizes_.gated ? NewWork(n, Columns()) : -1;
  const int scratch = sizes_.canonical_sources > 0 ? NewScratch(rows, n, backward) : -1;
  const int gathered = merges ? NewWork(sizes_.gathered_rows, sizes_.hidden) : -1;
  const int merged[] = {merges ? NewWork(n, sizes_.hidden) : -1, merges ? NewWork(n, sizes_.hidden) : -1,
                        merges ? NewWork(n, sizes_.hidden) : -1};
  Action& action = Emit(backward ? ActionKind::kExpertsTransposed : ActionKind::kExperts, rows, out);
  action.scratch = scratch;
  action.gathered = gathered;
  action.merged_x = merged[0];
  action.merged_dy = merged[1];
  action.merged_dx = merged[2];
  action.recompute = backward && (merges || sizes_.recompute);
  action.pre = pre;
  action.gate = gate;
  action.hidden = hidden;
  action.dpre = dpre;
  action.dgate = dgate;
  if (typed.step.transposed) action.saved_rows = tape.rows;
  return Renest(out, in.nesting);
}

}  // namespace evenkeel::moe
