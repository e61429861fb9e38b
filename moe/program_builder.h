// Builds one direction of a schedule: walks the program step by step and notes which buffer each action reads and
// writes, then which buffers live when. Internal to order_schedule.
//
//   ProgramBuilder forward(order, sizes, /*backward=*/false);
//   forward.Build();
//   forward.PlanMemory(kept, {});
#ifndef EVENKEEL_MOE_PROGRAM_BUILDER_H_
#define EVENKEEL_MOE_PROGRAM_BUILDER_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_sizes.h"
#include "evenkeel/moe/row_nesting.h"

namespace evenkeel::moe {

// Not thread-safe. `order` outlives it; `sizes` passed CheckOrderSizes.
class ProgramBuilder {
 public:
  ProgramBuilder(const TypedOrder& order, const OrderSizes& sizes, bool backward);

  // Backward, before Build: makes the forward's tape known, with new numbers, which `carried` gets in pairs.
  void TakeTape(const Schedule& forward, const ScheduleTape& tape, std::vector<std::pair<int, int>>* carried);
  void Build();
  // Which buffers live when, and the peak. `kept` outlive the program, `given` were there before it.
  void PlanMemory(const std::vector<int>& kept, const std::vector<int>& given);

  Schedule Take() { return std::move(out_); }
  const Schedule& schedule() const { return out_; }
  const ScheduleTape& tape() const { return tape_; }

 private:
  RowsRef WalkStep(int index, const RowsRef& in);
  RowsRef Walk(const TypedStep& typed, const RowsRef& in);

  // Chunks (program_builder_chunks.cc).
  RowsRef WalkChunks(const ChunkedSteps& steps, const RowsRef& in);
  void PutInto(const RowsRef& value, const RowsRef& share);
  void Interleave(std::vector<std::vector<Action>> chunks);

  // Steps.
  RowsRef Slice(const TypedStep& typed, const RowsRef& in);
  RowsRef Gather(const TypedStep& typed, const RowsRef& in);
  RowsRef AllReduce(const TypedStep& typed, const RowsRef& in);
  RowsRef ReduceScatter(const TypedStep& typed, const RowsRef& in);
  RowsRef Exchange(const TypedStep& typed, const RowsRef& in);
  RowsRef ExchangeInNode(const TypedStep& typed, const RowsRef& in);
  RowsRef Regroup(const RowsRef& in, bool back);
  RowsRef Dispatch(const TypedStep& typed, const RowsRef& in);
  RowsRef DispatchTransposed(const TypedStep& typed, const RowsRef& in);
  RowsRef Combine(const TypedStep& typed, const RowsRef& in);
  RowsRef CombineTransposed(const TypedStep& typed, const RowsRef& in);
  RowsRef Experts(const TypedStep& typed, const RowsRef& in);
  RowsRef Map(const TypedStep& typed, const RowsRef& in, ActionKind kind);
  RowsRef Fold(const TypedStep& typed, const RowsRef& in);
  void Deliver(const RowsRef& last);

  // The value with its rows in `nesting`: the same memory where only extents of 1 move.
  RowsRef Renest(const RowsRef& value, const RowNesting& nesting);
  bool IsSameOrder(const RowsRef& value, const RowNesting& nesting) const;
  // True when the next step wants lanes outermost, so that the map may write them so.
  bool NextWantsLanes() const;

  int64_t Rows(const ValueType& type) const { return rows_.Count(type, chunk_).rows; }
  BufferSpec Spec(const ValueType& type) const;
  RowsRef NewRows(const ValueType& type, RowNesting nesting);
  int64_t Columns() const;  // of the experts' middle
  int NewWork(int64_t rows, int64_t columns);
  // Where canonical sums wait. Of ragged rows, one expert may have all.
  int NewScratch(const RowsRef& rows, int64_t num_rows, bool backward);
  Action& Emit(ActionKind kind, const RowsRef& in, const RowsRef& out);
  bool IsWholeOwn(const RowsRef& value) const;
  bool IsTape(int buffer) const;

  const TypedOrder& order_;
  const OrderSizes sizes_;
  const OrderRows rows_;
  const bool backward_;
  const std::vector<TypedStep>& program_;
  Schedule out_;
  ScheduleTape tape_;
  int first_own_ = kOutputBuffer + 1;
  int step_ = 0;
  int chunk_ = kAllChunks;  // of the rows at hand; 0 in an order without chunks
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_PROGRAM_BUILDER_H_
