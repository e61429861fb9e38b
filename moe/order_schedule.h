// An order at given sizes: the list of buffers and actions that runs it, forward and backward.
//
// The program says what happens; the schedule says where the bytes are: which buffer an action reads and writes, in
// which nesting its rows lie, when memory is taken and given back. The executor only walks it, so the predicted peak is
// the counted one.
//
//   Schedules schedules = BuildSchedules(typed, sizes);
//   for (const Action& action : schedules.forward.actions) ...
#ifndef EVENKEEL_MOE_ORDER_SCHEDULE_H_
#define EVENKEEL_MOE_ORDER_SCHEDULE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_sizes.h"
#include "evenkeel/moe/row_nesting.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::moe {

struct BufferSpec {
  int64_t rows = 0;
  int64_t columns = 0;
  DType dtype = DType::kF32;
  int64_t bytes() const { return rows * columns * SizeOf(dtype); }
};

// Rows [first_row, first_row + rows) of a buffer.
struct RowsRef {
  int buffer = -1;
  int64_t first_row = 0;
  int64_t rows = 0;
  RowNesting nesting;
  ValueType type;
};

enum class ActionKind : uint8_t {
  kNothing,             // the step changed only the type
  kDispatch,            // tokens -> rows
  kDispatchTransposed,  // rows -> tokens, summed
  kCombine,             // rows -> tokens, weighted
  kCombineTransposed,   // tokens -> rows, weighted; and the weights' gradients
  kPermute,             // rows to another nesting
  kRegroup,             // blocks [node][local index] to [local index][node], and back
  kExpand,              // one row per destination -> one per route
  kExpandTransposed,    // and back, summed
  kSpread,              // half way: one row per node -> one per destination in it; the backward of kCollect
  kCollect,             // and back, summed
  kFold,                // one row per route -> one per destination, weighted and summed
  kFoldTransposed,
  kExperts,
  kExpertsTransposed,
  kAllGather,
  kAllReduce,  // in place when in and out are the same rows
  kReduceScatter,
  kExchange,  // all_to_all or all_to_all_v, or one level of it
  kCopy,
};

struct Action {
  ActionKind kind = ActionKind::kNothing;
  int step = 0;            // index in the program
  bool ends_step = false;  // `out` is the step's value
  RowsRef in;
  RowsRef out;
  // Experts: buffers of ExpertWork, -1 where not needed. `saved_rows` is the tape's input of experts, combine or fold.
  int pre = -1, gate = -1, hidden = -1, dpre = -1, dgate = -1, scratch = -1;
  // Experts' backward on merged lanes: rows of all lanes, then x, dy and dx of the merged ones.
  int gathered = -1, merged_x = -1, merged_dy = -1, merged_dx = -1;
  RowsRef saved_rows;
  int chunk = kAllChunks;     // of which chunk the rows are; 0 in an order without chunks
  bool back = false;          // regroup: to [node][local index]
  bool recompute = false;     // experts' backward: `pre` and `gate` are to be computed first
  std::vector<int> allocate;  // before the action
  std::vector<int> release;   // after it
};

// Buffers that the caller owns.
inline constexpr int kInputBuffer = 0;
inline constexpr int kOutputBuffer = 1;

struct Schedule {
  std::vector<BufferSpec> buffers;  // the first two are the caller's
  std::vector<Action> actions;
  int64_t peak_bytes = 0;  // of allocated buffers, the tape included
};

// What the experts' forward leaves for one chunk.
struct ExpertTape {
  RowsRef rows;             // grouped by expert
  int pre = -1, gate = -1;  // -1: not there, or computed again in backward
};

// What the forward leaves: buffers of the forward schedule, or the same things' numbers in the backward schedule.
struct ScheduleTape {
  std::vector<ExpertTape> experts;  // by chunk
  RowsRef weighted_rows;            // the input of combine, or of fold where rows are folded
  int64_t bytes = 0;
};

struct Schedules {
  Schedule forward;
  Schedule backward;
  ScheduleTape tape;                         // numbers of forward.buffers
  ScheduleTape backward_tape;                // the same things in backward.buffers
  std::vector<std::pair<int, int>> carried;  // (forward buffer, backward buffer) for every tape buffer

  OrderMemory memory() const {
    return {.forward_peak = forward.peak_bytes, .tape = tape.bytes, .backward_peak = backward.peak_bytes};
  }
};

// `sizes` passed CheckOrderSizes.
Schedules BuildSchedules(const TypedOrder& order, const OrderSizes& sizes);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_SCHEDULE_H_
