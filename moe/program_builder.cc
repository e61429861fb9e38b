#include "evenkeel/moe/program_builder.h"

#include <algorithm>

#include "evenkeel/moe/canonical_blocks.h"

namespace evenkeel::moe {
namespace {

OrderSizes WithChunks(const TypedOrder& order, OrderSizes sizes) {
  sizes.chunks = order.order.chunks;
  return sizes;
}

std::vector<int> BuffersOf(const Action& action) {
  std::vector<int> uses;
  for (int buffer : {action.in.buffer, action.out.buffer, action.saved_rows.buffer, action.pre, action.gate,
                     action.hidden, action.dpre, action.dgate, action.scratch, action.gathered, action.merged_x,
                     action.merged_dy, action.merged_dx}) {
    if (buffer >= 0) uses.push_back(buffer);
  }
  return uses;
}

}  // namespace

ProgramBuilder::ProgramBuilder(const TypedOrder& order, const OrderSizes& sizes, bool backward)
    : order_(order),
      sizes_(WithChunks(order, sizes)),
      rows_(order, sizes_),
      backward_(backward),
      program_(backward ? order.backward : order.forward),
      chunk_(sizes_.chunks == 1 ? 0 : kAllChunks) {
  out_.buffers.push_back(Spec(program_.front().before));
  out_.buffers.push_back(Spec(program_.back().after));
}

// Backward: makes the forward's tape known, with new numbers.
void ProgramBuilder::TakeTape(const Schedule& forward, const ScheduleTape& tape,
                              std::vector<std::pair<int, int>>* carried) {
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

void ProgramBuilder::Build() {
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
void ProgramBuilder::PlanMemory(const std::vector<int>& kept, const std::vector<int>& given) {
  std::vector<int> first(out_.buffers.size(), -1), last(out_.buffers.size(), -1);
  for (size_t a = 0; a < out_.actions.size(); ++a) {
    for (int buffer : BuffersOf(out_.actions[a])) {
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

RowsRef ProgramBuilder::NewRows(const ValueType& type, RowNesting nesting) {
  out_.buffers.push_back(Spec(type));
  const int buffer = static_cast<int>(out_.buffers.size()) - 1;
  return {
      .buffer = buffer, .first_row = 0, .rows = out_.buffers.back().rows, .nesting = std::move(nesting), .type = type};
}

int64_t ProgramBuilder::Columns() const {
  return order_.layout == ExpertLayout::kTensorParallel ? sizes_.ffn / sizes_.tp : sizes_.ffn;
}

int ProgramBuilder::NewWork(int64_t rows, int64_t columns) {
  out_.buffers.push_back({.rows = rows, .columns = columns, .dtype = sizes_.dtype});
  return static_cast<int>(out_.buffers.size()) - 1;
}

int ProgramBuilder::NewScratch(const RowsRef& rows, int64_t num_rows, bool backward) {
  const int64_t experts = ChunkOfExperts(sizes_.experts / sizes_.ep, sizes_.chunks, chunk_).size;
  const CanonicalExtents extents = {
      .rows = rows.type.form == Dim::kSlots ? num_rows / experts : num_rows,
      .hidden = sizes_.hidden,
      .ffn = Columns(),
      .blocks = kCanonicalBlocks / (order_.layout == ExpertLayout::kTensorParallel ? sizes_.tp : 1),
      .sources = sizes_.canonical_sources};
  return NewWork(1, backward ? CanonicalBackwardScratch(extents) : CanonicalForwardScratch(extents));
}

Action& ProgramBuilder::Emit(ActionKind kind, const RowsRef& in, const RowsRef& out) {
  Action action;
  action.kind = kind;
  action.step = step_;
  action.chunk = chunk_;
  action.in = in;
  action.out = out;
  out_.actions.push_back(std::move(action));
  return out_.actions.back();
}

bool ProgramBuilder::IsWholeOwn(const RowsRef& value) const {
  return value.buffer >= first_own_ && !IsTape(value.buffer) && value.rows == out_.buffers[value.buffer].rows;
}

bool ProgramBuilder::IsTape(int buffer) const {
  return buffer == tape_.weighted_rows.buffer ||
         std::any_of(tape_.experts.begin(), tape_.experts.end(), [&](const ExpertTape& experts) {
           return buffer == experts.rows.buffer || buffer == experts.pre || buffer == experts.gate;
         });
}

// Puts the final value into the caller's output: by writing it there in the first place where a whole own buffer
// holds it, else by a copy.
void ProgramBuilder::Deliver(const RowsRef& last) {
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

BufferSpec ProgramBuilder::Spec(const ValueType& type) const {
  return {.rows = Rows(type), .columns = sizes_.hidden, .dtype = ElementType(type.form, sizes_.dtype, backward_)};
}

}  // namespace evenkeel::moe
