#include "evenkeel/moe/order_schedule.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }
bool AtExperts(const ValueType& type) { return type.ep.dim == Dim::kExperts; }
bool Holds(const RowNesting& nesting, RowTag tag) {
  return std::find(nesting.begin(), nesting.end(), tag) != nesting.end();
}

RowNesting Without(RowNesting nesting, RowTag tag) {
  nesting.erase(std::remove(nesting.begin(), nesting.end(), tag), nesting.end());
  return nesting;
}

RowNesting InFront(RowTag tag, RowNesting nesting) {
  nesting = Without(std::move(nesting), tag);
  nesting.insert(nesting.begin(), tag);
  return nesting;
}

// The nesting in which each expert's rows are contiguous.
RowNesting Grouped(const RowNesting& nesting) {
  RowNesting grouped = {RowTag::kExpert, RowTag::kSource};
  if (Holds(nesting, RowTag::kLane)) grouped.push_back(RowTag::kLane);
  grouped.push_back(RowTag::kSlot);
  return grouped;
}

RowNesting WithoutChunk(RowNesting nesting) { return Without(std::move(nesting), RowTag::kChunk); }

// How a value lies that enters or leaves a program as rows: by expert at the source, as it arrived at the experts.
RowNesting Customary(const ValueType& type) {
  if (type.form == Dim::kTokens) return {};
  const bool lanes = !IsVarying(type.tp) && (type.form == Dim::kSlots || type.tp.dim != Dim::kUnset);
  RowNesting nesting;
  if (lanes && type.form != Dim::kSlots) nesting.push_back(RowTag::kLane);
  if (AtExperts(type)) nesting.push_back(RowTag::kSource);
  nesting.push_back(RowTag::kExpert);
  if (lanes && type.form == Dim::kSlots) nesting.push_back(RowTag::kLane);
  nesting.push_back(RowTag::kSlot);
  return nesting;
}

// True when only tags of extent 1 change their place.
bool SameRows(const RowNesting& from, const RowNesting& to, const RowExtents& extents) {
  RowNesting a, b;
  std::copy_if(from.begin(), from.end(), std::back_inserter(a), [&](RowTag tag) { return extents.of(tag) != 1; });
  std::copy_if(to.begin(), to.end(), std::back_inserter(b), [&](RowTag tag) { return extents.of(tag) != 1; });
  return a == b;
}

// Builds one direction.
class ProgramBuilder {
 public:
  ProgramBuilder(const TypedOrder& order, const OrderSizes& sizes, bool backward)
      : order_(order),
        sizes_(WithChunks(order, sizes)),
        rows_(RowsOrExpected(order, sizes)),
        destinations_(DestinationsOrExpected(order, sizes)),
        backward_(backward),
        program_(backward ? order.backward : order.forward) {
    out_.buffers.push_back(Spec(program_.front().before));
    out_.buffers.push_back(Spec(program_.back().after));
  }

  // Backward: makes the forward's tape known, with new numbers.
  void TakeTape(const Schedule& forward, const ScheduleTape& tape, std::vector<std::pair<int, int>>* carried) {
    const auto take = [&](int buffer) {
      if (buffer < 0) return -1;
      for (const auto& pair : *carried) {
        if (pair.first == buffer) return pair.second;
      }
      out_.buffers.push_back(forward.buffers[buffer]);
      carried->push_back({buffer, static_cast<int>(out_.buffers.size()) - 1});
      return carried->back().second;
    };
    tape_ = tape;
    for (ExpertTape& experts : tape_.experts) {
      experts.rows.buffer = take(experts.rows.buffer);
      experts.pre = take(experts.pre);
      experts.gate = take(experts.gate);
    }
    tape_.weighted_rows.buffer = take(tape.weighted_rows.buffer);
    first_own_ = static_cast<int>(out_.buffers.size());
  }

  void Build() {
    RowsRef value = {.buffer = kInputBuffer,
                     .first_row = 0,
                     .rows = out_.buffers[kInputBuffer].rows,
                     .nesting = Customary(program_.front().before),
                     .type = program_.front().before};
    const ChunkedSteps chunked = ChunkedStepsOf(program_);
    for (int i = 0; i < static_cast<int>(program_.size()); ++i) {
      if (sizes_.chunks > 1 && i == chunked.first) {
        value = WalkChunks(chunked, value);
        i = chunked.end - 1;
      } else {
        value = WalkStep(i, value);
      }
    }
    Deliver(value);
  }

  // Which buffers live when, and the peak. `kept` outlive the program, `given` were there before it.
  void PlanMemory(const std::vector<int>& kept, const std::vector<int>& given) {
    std::vector<int> first(out_.buffers.size(), -1), last(out_.buffers.size(), -1);
    for (size_t a = 0; a < out_.actions.size(); ++a) {
      for (int buffer : Uses(out_.actions[a])) {
        if (buffer <= kOutputBuffer) continue;
        if (first[buffer] < 0) first[buffer] = static_cast<int>(a);
        last[buffer] = static_cast<int>(a);
      }
    }
    const auto is_in = [](const std::vector<int>& list, int x) {
      return std::find(list.begin(), list.end(), x) != list.end();
    };
    int64_t live = 0;
    for (int buffer : given) live += out_.buffers[buffer].bytes();
    out_.peak_bytes = live;
    for (size_t a = 0; a < out_.actions.size(); ++a) {
      Action& action = out_.actions[a];
      for (int b = kOutputBuffer + 1; b < static_cast<int>(out_.buffers.size()); ++b) {
        if (first[b] == static_cast<int>(a) && !is_in(given, b)) {
          action.allocate.push_back(b);
          live += out_.buffers[b].bytes();
        }
        if (last[b] == static_cast<int>(a) && !is_in(kept, b)) action.release.push_back(b);
      }
      out_.peak_bytes = std::max(out_.peak_bytes, live);
      for (int b : action.release) live -= out_.buffers[b].bytes();
    }
  }

  Schedule Take() { return std::move(out_); }
  const Schedule& schedule() const { return out_; }
  const ScheduleTape& tape() const { return tape_; }

 private:
  static OrderSizes WithChunks(const TypedOrder& order, OrderSizes sizes) {
    sizes.chunks = order.order.chunks;
    return sizes;
  }

  RowsRef WalkStep(int index, const RowsRef& in) {
    step_ = index;
    const size_t actions = out_.actions.size();
    RowsRef value = Walk(program_[index], in);
    value.type = program_[index].after;
    if (out_.actions.size() == actions) Emit(ActionKind::kNothing, value, value);
    out_.actions.back().ends_step = true;
    return value;
  }

  // All chunked steps for one chunk after the other, then their actions interleaved: the first exchange of chunk i + 1
  // goes out before the experts of chunk i run.
  RowsRef WalkChunks(const ChunkedSteps& steps, const RowsRef& in) {
    step_ = steps.first;
    const RowsRef all = Renest(in, InFront(RowTag::kChunk, in.nesting));
    RowsRef out = NewRows(program_[steps.end - 1].after, {});
    std::vector<Action> before = std::move(out_.actions);
    std::vector<std::vector<Action>> chunks;
    inside_ = true;
    for (chunk_ = 0; chunk_ < sizes_.chunks; ++chunk_) {
      out_.actions.clear();
      RowsRef value = all;
      value.rows = all.rows / sizes_.chunks;
      value.first_row += chunk_ * value.rows;
      value.nesting = WithoutChunk(all.nesting);
      for (int i = steps.first; i < steps.end; ++i) value = WalkStep(i, value);
      RowsRef share = out;
      share.rows = out.rows / sizes_.chunks;
      share.first_row = chunk_ * share.rows;
      PutInto(value, share);
      out.nesting = InFront(RowTag::kChunk, value.nesting);
      chunks.push_back(std::move(out_.actions));
    }
    inside_ = false;
    chunk_ = 0;
    out_.actions = std::move(before);
    Interleave(std::move(chunks));
    return out;
  }

  // Makes the actions so far write `value` into `share` of another buffer: directly where `value` is a whole own
  // buffer.
  void PutInto(const RowsRef& value, const RowsRef& share) {
    if (!IsWholeOwn(value)) {
      RowsRef out = share;
      out.nesting = value.nesting;
      out_.actions.back().ends_step = false;
      Emit(ActionKind::kCopy, value, out).ends_step = true;
      return;
    }
    for (Action& action : out_.actions) {
      for (RowsRef* ref : {&action.in, &action.out}) {
        if (ref->buffer != value.buffer) continue;
        ref->buffer = share.buffer;
        ref->first_row += share.first_row;
      }
    }
  }

  void Interleave(std::vector<std::vector<Action>> chunks) {
    // Up to and with the first exchange; the rest. Without exchanges (E = 1) all is rest.
    const auto first_part = [](const std::vector<Action>& actions) {
      const auto exchange =
          std::find_if(actions.begin(), actions.end(), [](const Action& a) { return a.kind == ActionKind::kExchange; });
      return exchange == actions.end() ? actions.begin() : exchange + 1;
    };
    const auto append = [this](auto begin, auto end) {
      out_.actions.insert(out_.actions.end(), std::make_move_iterator(begin), std::make_move_iterator(end));
    };
    const auto mutable_part = [&](std::vector<Action>& actions) {
      return actions.begin() + (first_part(actions) - actions.cbegin());
    };
    append(chunks[0].begin(), mutable_part(chunks[0]));
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i + 1 < chunks.size()) append(chunks[i + 1].begin(), mutable_part(chunks[i + 1]));
      append(mutable_part(chunks[i]), chunks[i].end());
    }
  }

  bool IsWholeOwn(const RowsRef& value) const {
    return value.buffer >= first_own_ && !IsTape(value.buffer) && value.rows == out_.buffers[value.buffer].rows;
  }

  static std::vector<int> Uses(const Action& action) {
    std::vector<int> uses;
    for (int buffer : {action.in.buffer, action.out.buffer, action.saved_rows.buffer, action.pre, action.gate,
                       action.hidden, action.dpre, action.dgate, action.scratch}) {
      if (buffer >= 0) uses.push_back(buffer);
    }
    return uses;
  }

  int64_t Rows(const ValueType& type) const {
    switch (type.form) {
      case Dim::kTokens:
        return IsVarying(type.tp) ? OwnTokens(sizes_.tokens, sizes_.tp, sizes_.lane).size() : sizes_.tokens;
      case Dim::kSlots:
        return sizes_.experts * sizes_.capacity / (IsVarying(type.tp) ? sizes_.tp : 1) / (inside_ ? sizes_.chunks : 1);
      default:
        break;
    }
    const RaggedRows& flow = Flow(type.form);
    if (!AtExperts(type)) return flow.sent;
    return type.tp.dim != Dim::kUnset && !IsVarying(type.tp) ? flow.gathered : flow.arrived;
  }

  const RaggedRows& Flow(Dim form) const { return form == Dim::kRows ? rows_ : destinations_; }

  BufferSpec Spec(const ValueType& type) const {
    return {.rows = Rows(type), .columns = sizes_.hidden, .dtype = ElementType(type.form, sizes_.dtype, backward_)};
  }

  RowsRef NewRows(const ValueType& type, RowNesting nesting) {
    out_.buffers.push_back(Spec(type));
    const int buffer = static_cast<int>(out_.buffers.size()) - 1;
    return {.buffer = buffer,
            .first_row = 0,
            .rows = out_.buffers.back().rows,
            .nesting = std::move(nesting),
            .type = type};
  }

  int64_t Columns() const {
    return order_.layout == ExpertLayout::kTensorParallel ? sizes_.ffn / sizes_.tp : sizes_.ffn;
  }

  int NewWork(int64_t rows) { return NewWork(rows, Columns()); }
  int NewWork(int64_t rows, int64_t columns) {
    out_.buffers.push_back({.rows = rows, .columns = columns, .dtype = sizes_.dtype});
    return static_cast<int>(out_.buffers.size()) - 1;
  }

  // Where canonical sums wait. Of ragged rows, one expert may have all.
  int NewScratch(const RowsRef& rows, bool backward) {
    const int64_t local_experts = sizes_.experts / sizes_.ep / sizes_.chunks;
    const CanonicalExtents extents = {
        .rows = rows.type.form == Dim::kSlots ? rows.rows / local_experts : rows.rows,
        .hidden = sizes_.hidden,
        .ffn = Columns(),
        .blocks = kCanonicalBlocks / (order_.layout == ExpertLayout::kTensorParallel ? sizes_.tp : 1),
        .sources = sizes_.canonical_sources};
    return NewWork(1, backward ? CanonicalBackwardScratch(extents) : CanonicalForwardScratch(extents));
  }

  Action& Emit(ActionKind kind, const RowsRef& in, const RowsRef& out) {
    Action action;
    action.kind = kind;
    action.step = step_;
    action.in = in;
    action.out = out;
    out_.actions.push_back(std::move(action));
    return out_.actions.back();
  }

  // The value with its rows in `nesting`: the same memory where only extents of 1 move.
  RowsRef Renest(const RowsRef& value, const RowNesting& nesting) {
    RowsRef result = value;
    if (value.nesting == nesting || IsSameOrder(value, nesting)) {
      result.nesting = nesting;
      return result;
    }
    result = NewRows(value.type, nesting);
    Emit(ActionKind::kPermute, value, result);
    return result;
  }

  bool IsSameOrder(const RowsRef& value, const RowNesting& nesting) const {
    if (value.type.form == Dim::kSlots) {
      return SameRows(value.nesting, nesting, ExtentsOf(value.type, sizes_));
    }
    // Ragged rows of several lanes interleave by slot inside an expert.
    const bool gathered = value.type.tp.dim != Dim::kUnset && !IsVarying(value.type.tp);
    const bool spans_lanes = order_.layout == ExpertLayout::kWhole && sizes_.ep > 1;
    if (sizes_.tp > 1 && (gathered || spans_lanes)) return false;
    return sizes_.ep == 1 || sizes_.experts == sizes_.ep;
  }

  RowsRef Walk(const TypedStep& typed, const RowsRef& in) {
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
        return Map(typed, in, typed.step.transposed ? ActionKind::kExpandTransposed : ActionKind::kExpand);
      case StepKind::kFold:
        return Fold(typed, in);
    }
    return in;
  }

  // expand and fold keep no nesting: their rows are as the plan lists them.
  RowsRef Map(const TypedStep& typed, const RowsRef& in, ActionKind kind) {
    const bool to_rows = typed.after.form == Dim::kRows;
    RowsRef out = NewRows(typed.after, to_rows ? Grouped(Customary(typed.after)) : Customary(typed.after));
    Emit(kind, in, out);
    return out;
  }

  RowsRef Fold(const TypedStep& typed, const RowsRef& in) {
    if (typed.step.transposed) {
      RowsRef out = Map(typed, in, ActionKind::kFoldTransposed);
      out_.actions.back().saved_rows = tape_.weighted_rows;
      return out;
    }
    tape_.weighted_rows = in;
    return Map(typed, in, ActionKind::kFold);
  }

  RowsRef Slice(const TypedStep& typed, const RowsRef& in) {
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
      out.first_row += Flow(in.type.form).gathered_before;
    }
    return out;
  }

  RowsRef Gather(const TypedStep& typed, const RowsRef& in) {
    const RowNesting nesting = in.type.form == Dim::kTokens ? RowNesting() : InFront(RowTag::kLane, in.nesting);
    RowsRef out = in;
    out.nesting = nesting;
    if (sizes_.tp == 1) return out;
    out = NewRows(typed.after, nesting);
    Emit(ActionKind::kAllGather, in, out);
    return out;
  }

  RowsRef AllReduce(const TypedStep& typed, const RowsRef& in) {
    if (sizes_.tp == 1) return in;
    RowsRef out = IsWholeOwn(in) ? in : NewRows(typed.after, in.nesting);
    Emit(ActionKind::kAllReduce, in, out);
    return out;
  }

  RowsRef ReduceScatter(const TypedStep& typed, const RowsRef& in) {
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

  RowsRef Exchange(const TypedStep& typed, const RowsRef& in) {
    const bool to_experts = !AtExperts(typed.before);
    RowsRef ready = in;
    RowNesting nesting;
    if (to_experts) {
      ready = Renest(in, InFront(RowTag::kExpert, in.nesting));
      nesting = ready.nesting;
      nesting.insert(nesting.begin(), RowTag::kSource);
    } else {
      ready = Renest(in, InFront(RowTag::kSource, InFront(RowTag::kExpert, in.nesting)));
      nesting = Without(ready.nesting, RowTag::kSource);
    }
    if (sizes_.ep == 1) {
      ready.nesting = nesting;
      return ready;
    }
    RowsRef out = NewRows(typed.after, nesting);
    Emit(ActionKind::kExchange, ready, out);
    return out;
  }

  // True when the next step wants lanes outermost, so that the map may write them so.
  bool NextWantsLanes() const {
    const size_t next = static_cast<size_t>(step_) + 1;
    if (sizes_.tp == 1 || next >= program_.size()) return false;
    const StepKind kind = program_[next].step.kind;
    return kind == StepKind::kSlice || kind == StepKind::kReduceScatter;
  }

  RowsRef Dispatch(const TypedStep& typed, const RowsRef& in) {
    RowNesting nesting = {RowTag::kExpert, RowTag::kSlot};
    if (typed.after.form == Dim::kSlots) {
      nesting = {RowTag::kExpert, RowTag::kLane, RowTag::kSlot};
      if (sizes_.chunks > 1) nesting = InFront(RowTag::kChunk, nesting);
      if (NextWantsLanes()) nesting = InFront(RowTag::kLane, nesting);
    }
    RowsRef out = NewRows(typed.after, nesting);
    Emit(ActionKind::kDispatch, in, out);
    return out;
  }

  RowsRef DispatchTransposed(const TypedStep& typed, const RowsRef& in) {
    RowsRef out = NewRows(typed.after, {});
    Emit(ActionKind::kDispatchTransposed, in, out);
    return out;
  }

  RowsRef Combine(const TypedStep& typed, const RowsRef& in) {
    if (in.type.form != Dim::kSums) tape_.weighted_rows = in;
    RowsRef out = NewRows(typed.after, {});
    Emit(ActionKind::kCombine, in, out);
    return out;
  }

  RowsRef CombineTransposed(const TypedStep& typed, const RowsRef& in) {
    const bool sums = typed.after.form == Dim::kSums;
    RowsRef out = NewRows(typed.after, sums ? Customary(typed.after) : tape_.weighted_rows.nesting);
    Action& action = Emit(ActionKind::kCombineTransposed, in, out);
    if (!sums) action.saved_rows = tape_.weighted_rows;
    return out;
  }

  RowsRef Experts(const TypedStep& typed, const RowsRef& in) {
    const RowsRef rows = Renest(in, Grouped(in.nesting));
    RowsRef out = NewRows(typed.after, rows.nesting);
    const bool backward = typed.step.transposed;
    if (!backward) tape_.experts.push_back({.rows = rows});
    ExpertTape& tape = tape_.experts[chunk_];
    const bool fresh = !backward || sizes_.recompute;
    const int pre = fresh ? NewWork(rows.rows) : tape.pre;
    const int gate = !sizes_.gated ? -1 : fresh ? NewWork(rows.rows) : tape.gate;
    if (!backward && !sizes_.recompute) {
      tape.pre = pre;
      tape.gate = gate;
    }
    const int hidden = NewWork(rows.rows);
    const int dpre = typed.step.transposed ? NewWork(rows.rows) : -1;
    const int dgate = typed.step.transposed && sizes_.gated ? NewWork(rows.rows) : -1;
    const int scratch = sizes_.canonical_sources > 0 ? NewScratch(rows, backward) : -1;
    Action& action = Emit(typed.step.transposed ? ActionKind::kExpertsTransposed : ActionKind::kExperts, rows, out);
    action.chunk = chunk_;
    action.scratch = scratch;
    action.recompute = backward && sizes_.recompute;
    action.pre = pre;
    action.gate = gate;
    action.hidden = hidden;
    action.dpre = dpre;
    action.dgate = dgate;
    if (typed.step.transposed) action.saved_rows = tape.rows;
    return Renest(out, in.nesting);
  }

  bool IsTape(int buffer) const {
    return buffer == tape_.weighted_rows.buffer ||
           std::any_of(tape_.experts.begin(), tape_.experts.end(), [&](const ExpertTape& experts) {
             return buffer == experts.rows.buffer || buffer == experts.pre || buffer == experts.gate;
           });
  }

  // Puts the final value into the caller's output: by writing it there in the first place where a whole own buffer
  // holds it, else by a copy.
  void Deliver(const RowsRef& last) {
    const RowsRef value = Renest(last, Customary(last.type));
    if (!IsWholeOwn(value)) {
      RowsRef out = value;
      out.buffer = kOutputBuffer;
      out.first_row = 0;
      out_.actions.back().ends_step = false;
      Emit(ActionKind::kCopy, value, out).ends_step = true;
      return;
    }
    for (Action& action : out_.actions) {
      for (RowsRef* ref : {&action.in, &action.out}) {
        if (ref->buffer == value.buffer) ref->buffer = kOutputBuffer;
      }
    }
  }

  const TypedOrder& order_;
  const OrderSizes sizes_;
  const RaggedRows rows_;
  const RaggedRows destinations_;
  const bool backward_;
  const std::vector<TypedStep>& program_;
  Schedule out_;
  ScheduleTape tape_;
  int first_own_ = kOutputBuffer + 1;
  int step_ = 0;
  bool inside_ = false;  // among the chunked steps
  int chunk_ = 0;
};

std::vector<int> TapeBuffers(const ScheduleTape& tape) {
  std::vector<int> buffers;
  const auto add = [&](int buffer) {
    if (buffer <= kOutputBuffer || std::find(buffers.begin(), buffers.end(), buffer) != buffers.end()) return;
    buffers.push_back(buffer);
  };
  for (const ExpertTape& experts : tape.experts) {
    add(experts.rows.buffer);
    add(experts.pre);
    add(experts.gate);
  }
  add(tape.weighted_rows.buffer);
  return buffers;
}

}  // namespace

int64_t RowExtents::of(RowTag tag) const {
  switch (tag) {
    case RowTag::kLane:
      return lanes;
    case RowTag::kSource:
      return sources;
    case RowTag::kExpert:
      return experts;
    case RowTag::kSlot:
      return slots;
    case RowTag::kChunk:
      return chunks;
  }
  return 1;
}

RowExtents ExtentsOf(const ValueType& type, const OrderSizes& sizes) {
  return {.lanes = sizes.tp,
          .sources = sizes.ep,
          .experts = (AtExperts(type) ? sizes.experts / sizes.ep : sizes.experts) / sizes.chunks,
          .slots = sizes.capacity / sizes.tp,
          .chunks = sizes.chunks};
}

std::vector<int32_t> PermutationIndex(const RowNesting& from, const RowNesting& to, const RowExtents& extents) {
  // The stride of each tag in `from`, in the nesting of `to`.
  std::vector<int64_t> stride(to.size(), 0), extent(to.size(), 1), at(to.size(), 0);
  int64_t rows = 1;
  for (size_t i = from.size(); i-- > 0;) {
    const auto place = std::find(to.begin(), to.end(), from[i]);
    EK_CHECK(place != to.end());
    stride[place - to.begin()] = rows;
    extent[place - to.begin()] = extents.of(from[i]);
    rows *= extents.of(from[i]);
  }
  std::vector<int32_t> index(rows);
  int64_t source = 0;
  for (int64_t row = 0; row < rows; ++row) {
    index[row] = static_cast<int32_t>(source);
    for (size_t i = to.size(); i-- > 0;) {
      source += stride[i];
      if (++at[i] < extent[i]) break;
      source -= stride[i] * extent[i];
      at[i] = 0;
    }
  }
  return index;
}

std::string NestingName(const RowNesting& nesting) {
  return absl::StrJoin(nesting, ",", [](std::string* out, RowTag tag) {
    constexpr const char* kNames[] = {"lane", "source", "expert", "slot", "chunk"};
    out->append(kNames[static_cast<int>(tag)]);
  });
}

Schedules BuildSchedules(const TypedOrder& order, const OrderSizes& sizes) {
  Schedules schedules;
  ProgramBuilder forward(order, sizes, false);
  forward.Build();
  schedules.tape = forward.tape();
  const std::vector<int> kept = TapeBuffers(schedules.tape);
  forward.PlanMemory(kept, {});
  for (int buffer : kept) schedules.tape.bytes += forward.schedule().buffers[buffer].bytes();

  ProgramBuilder backward(order, sizes, true);
  backward.TakeTape(forward.schedule(), schedules.tape, &schedules.carried);
  backward.Build();
  schedules.backward_tape = backward.tape();
  std::vector<int> given;
  for (const auto& pair : schedules.carried) {
    if (pair.first > kOutputBuffer) given.push_back(pair.second);
  }
  backward.PlanMemory({}, given);
  schedules.forward = forward.Take();
  schedules.backward = backward.Take();
  return schedules;
}

}  // namespace evenkeel::moe
