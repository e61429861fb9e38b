// Orders in chunks of experts: which part of the rows each chunk is, and in which order the chunks' actions run.
#include <iterator>
#include <utility>

#include "evenkeel/moe/program_builder.h"

namespace evenkeel::moe {

// All chunked steps for one chunk after the other, then their actions interleaved: chunk i + 1 goes out before the
// experts of chunk i run.
RowsRef ProgramBuilder::WalkChunks(const ChunkedSteps& steps, const RowsRef& in) {
  step_ = steps.first;
  const RowsRef all = Renest(in, InFront(RowTag::kChunk, in.nesting));
  RowsRef out = NewRows(program_[steps.end - 1].after, {});
  int64_t next_in = all.first_row, next_out = 0;
  std::vector<Action> before = std::move(out_.actions);
  std::vector<std::vector<Action>> chunks;
  for (chunk_ = 0; chunk_ < sizes_.chunks; ++chunk_) {
    out_.actions.clear();
    RowsRef value = all;
    value.rows = Rows(all.type);
    value.first_row = next_in;
    value.nesting = Without(all.nesting, RowTag::kChunk);
    next_in += value.rows;
    for (int i = steps.first; i < steps.end; ++i) value = WalkStep(i, value);
    RowsRef share = out;
    share.rows = Rows(out.type);
    share.first_row = next_out;
    next_out += share.rows;
    PutInto(value, share);
    out.nesting = InFront(RowTag::kChunk, value.nesting);
    chunks.push_back(std::move(out_.actions));
  }
  chunk_ = kAllChunks;
  out_.actions = std::move(before);
  Interleave(std::move(chunks));
  return out;
}

// Makes the actions so far write `value` into `share` of another buffer: directly where `value` is a whole own
// buffer.
void ProgramBuilder::PutInto(const RowsRef& value, const RowsRef& share) {
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

void ProgramBuilder::Interleave(std::vector<std::vector<Action>> chunks) {
  // Up to and with the last exchange before the experts; the rest. Without exchanges (E = 1) all is rest.
  const auto first_part = [](std::vector<Action>& actions) {
    auto end = actions.begin();
    for (auto action = actions.begin(); action != actions.end(); ++action) {
      if (action->kind == ActionKind::kExperts || action->kind == ActionKind::kExpertsTransposed) break;
      if (action->kind == ActionKind::kExchange) end = action + 1;
    }
    return end;
  };
  const auto append = [this](auto begin, auto end) {
    out_.actions.insert(out_.actions.end(), std::make_move_iterator(begin), std::make_move_iterator(end));
  };
  append(chunks[0].begin(), first_part(chunks[0]));
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i + 1 < chunks.size()) append(chunks[i + 1].begin(), first_part(chunks[i + 1]));
    append(first_part(chunks[i]), chunks[i].end());
  }
}

}  // namespace evenkeel::moe
