// Row lists for orders that send a token once to each rank that needs it, however many of its experts are there.
//
// A row is a (token, destination rank) pair. At the destination it is expanded into one row per kept route, and behind
// the experts the routes' outputs are weighted and summed again (fold), so one row of partial sums goes back. Sums run
// over expert ids in the canonical tree (tree_sum.h); where experts per rank is a power of two, that tree does not
// depend on E.
//
// The destination has to know a row's experts, slots and weights: `records`, four i32 per route, sent beside the rows.
//
//   send = BuildDedupSendPlan(decision, {.ep_size = E, .tp_size = T, .lane = t}, gathers_over_tp);
//   ep->AllToAll(send.header, header);  ep->AllToAllV(send.records, .., records, ..);
//   receive = BuildDedupReceivePlan(receiver, t, header, records);
#ifndef EVENKEEL_MOE_DEDUP_PLAN_H_
#define EVENKEEL_MOE_DEDUP_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// For each output row the input rows that are summed into it, by increasing key. All arrays are [outputs, width],
// -1 in `rows` where there are fewer.
struct RowLists {
  int64_t width = 1;
  std::vector<int32_t> rows;
  std::vector<int32_t> keys;
  std::vector<float> weights;  // empty: all 1
  // Keys are in [first_key, end_key): the root of the tree.
  int32_t first_key = 0;
  int32_t end_key = 1;

  int64_t outputs() const { return static_cast<int64_t>(rows.size()) / width; }
};

// Numbers of one record.
inline constexpr int kRecordInts = 4;  // row in its (lane, source) block, local expert, slot, bits of the f32 weight

// What one rank sends. A value.
struct DedupSendPlan {
  TokenRange own;
  std::vector<int32_t> token_of_row;  // [rows] from own.begin; rows in order (destination, token)
  RowLists rows_of_token;             // [own tokens], keys are destinations
  std::vector<int64_t> rows_to;       // [E]
  // For each destination and lane: rows and records. [E, lanes, 2]; lanes is T where the rows are gathered over TP
  // (every lane then tells its own EP group about all of them), else 1.
  std::vector<int64_t> header;
  std::vector<int32_t> records;          // by destination, lane, row, expert
  std::vector<int64_t> record_ints_to;   // [E]
  std::vector<int32_t> route_of_record;  // token * k + choice, of all tokens

  int64_t num_rows() const { return static_cast<int64_t>(token_of_row.size()); }
};

// The same rows where a token goes once to each node that needs it: one row per (token, node). Each says by bits for
// which ranks of the node it is. A value.
struct NodeSendPlan {
  std::vector<int32_t> token_of_row;  // [rows] as in DedupSendPlan, in order (node, token)
  RowLists rows_of_token;             // [own tokens], keys are nodes
  std::vector<int64_t> rows_to;       // [N]
  std::vector<int32_t> masks;         // [rows, MaskInts(L)]
};
// L must divide the destinations of `send`.
NodeSendPlan BuildNodeSendPlan(const DedupSendPlan& send, int per_node);

// What a rank passes on: rows of peers to the ranks of its node, and their sums back. A value.
struct NodeMiddlePlan {
  std::vector<int64_t> rows_from;  // [N]
  std::vector<int32_t>
      arrival_of_row;              // for each row to be passed on, by (node of the source, local index), its arrival
  RowLists rows_of_arrival;        // keys are local indices
  std::vector<int64_t> passed_on;  // [N, L]
};
// `rows_from`: rows that each peer sends; masks: theirs. FailedPrecondition naming the node and row for masks that do
// not fit.
absl::StatusOr<NodeMiddlePlan> BuildNodeMiddlePlan(int per_node, absl::Span<const int64_t> rows_from,
                                                   absl::Span<const int32_t> masks);

// `tells_all_lanes`: see `header`. InvalidArgument when E does not divide e, the lane is out of range, or the decision
// has extents that do not fit together.
absl::StatusOr<DedupSendPlan> BuildDedupSendPlan(const RoutingDecision& decision, const RaggedSender& sender,
                                                 bool tells_all_lanes);

// What arrives at one rank's experts. "Arrival" numbers rows as they lie after the exchange (by source; after a gather:
// by lane, then source). A value.
struct DedupReceivePlan {
  std::vector<int64_t> rows_from;              // [E]
  std::vector<int64_t> rows_of_lane;           // [T]; {all rows} without a gather
  std::vector<int64_t> rows_of_expert;         // [local experts]
  std::vector<int32_t> arrival_of_expert_row;  // expand
  RowLists expert_rows_of_arrival;             // fold and its weights; keys are local experts
  RowLists expert_rows_unweighted;             // the same without weights: the adjoint of expand
  std::vector<int64_t> canonical_position;     // as in RaggedReceivePlan
  std::vector<int64_t> records_from;           // [E]
  std::vector<int32_t> entry_of_record;        // place in expert_rows_of_arrival, in order of arrival

  int64_t num_expert_rows() const { return static_cast<int64_t>(arrival_of_expert_row.size()); }
  int64_t num_arrivals() const { return expert_rows_of_arrival.outputs(); }
};

// header: [E, lanes, 2] and records as received, by source. FailedPrecondition naming source and record when they do
// not fit together; InvalidArgument for a layout that makes no sense.
absl::StatusOr<DedupReceivePlan> BuildDedupReceivePlan(const RaggedReceiver& receiver, int lane,
                                                       absl::Span<const int64_t> header,
                                                       absl::Span<const int32_t> records);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_DEDUP_PLAN_H_
