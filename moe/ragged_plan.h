// Row lists for the ragged orders: each lane sends the kept routes of its own tokens, real rows only.
//
// Which routes are kept is decided on all tokens of the TP group, exactly as in the padded orders; lane t then moves
// only the rows of its own tokens. Everything here is pure. The one thing a receiver cannot know is how many rows of
// each (expert, class, lane) a source keeps, so that small table of counts (`segments`) is exchanged first:
//
//   send = BuildRaggedSendPlan(decision, {.ep_size = E, .tp_size = T, .lane = t});
//   ep->AllToAll(send.segments, received)                      // e * slot_classes * T numbers per rank: metadata
//   receive = BuildRaggedReceivePlan(layout, received)
//   GatherRows(x_own, send.token_of_row) -> rows               // rows in order (expert, slot)
//   ep->AllToAllV(rows, send.rows_to, arrived, receive.rows_from)     (counts times h elements)
//   [expert TP: tp->AllGatherV(arrived, all, receive.rows_of_lane)]
//   GatherRows(all, receive.arrival_of_expert_row) -> expert rows, contiguous per expert; run the experts
//   GatherRows(out, receive.expert_row_of_arrival) -> arrival order
//   [expert TP: tp->ReduceScatterV(.., receive.rows_of_lane)]
//   ep->AllToAllV(.., receive.rows_from, back, send.rows_to)
//   CombineRows(back, send.row_of_route, own weights) -> y_own
//
// Every step is a permutation of rows or an exchange, so the adjoint is the same list read backwards.
//
// Order of rows at an expert: (local expert, source replica, slot). That is the order in which the padded buffer
// [E, c] holds them, with the holes left out; canonical_position says where each row would lie in it, so that sums over
// rows may be taken in fixed blocks of those positions and agree bitwise with a padded order.
#ifndef EVENKEEL_MOE_RAGGED_PLAN_H_
#define EVENKEEL_MOE_RAGGED_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Tokens [begin, end).
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

// The tokens that lane `lane` of `tp_size` owns: consecutive, s / T each, the first s % T lanes one more. T need not
// divide s here (s may even be below T); an order whose slice and gather steps move equal parts must refuse such s.
TokenRange OwnTokens(int64_t num_tokens, int tp_size, int lane);

// Experts [begin, begin + size) of a rank's.
struct ExpertRange {
  int64_t begin = 0;
  int64_t size = 0;
};

// One of `chunks` chunks of a rank's experts: the first n % chunks have one more than the others.
ExpertRange ChunkOfExperts(int64_t local_experts, int chunks, int chunk);

// i32 words of a mask over the ranks of a node.
constexpr int MaskInts(int per_node) { return (per_node + 31) / 32; }

// Where a sender stands.
struct RaggedSender {
  int ep_size = 1;  // E: destinations; destination of expert g is g / (e / E)
  int tp_size = 1;  // T
  int lane = 0;
  int chunks = 1;  // of each rank's experts, each to be sent by itself
};

// What one rank sends. Tokens and routes are counted from own.begin. A value.
struct RaggedSendPlan {
  TokenRange own;
  // [rows], rows in order (chunk, expert, slot): so by chunk, destination, then local expert
  std::vector<int32_t> token_of_row;
  std::vector<int32_t> route_of_row;  // [rows] (token - own.begin) * k + choice
  std::vector<int32_t> row_of_route;  // [own tokens, k], -1: dropped
  std::vector<int64_t> rows_to;       // [chunks, E] rows for each destination
  // Kept routes of the whole TP group by (expert, class, lane): [e, slot_classes, T]. Equal on all lanes. Block j of
  // segments.size() / E numbers is for EP rank j.
  std::vector<int64_t> segments;

  int64_t num_rows() const { return static_cast<int64_t>(token_of_row.size()); }
};

// InvalidArgument when E does not divide e, the lane is out of range, there are no chunks, s * k is 2^31 or more, or
// the slots of an expert are not 0, 1, 2, ... in order of (class, token). Memory: s * k. Deterministic.
absl::StatusOr<RaggedSendPlan> BuildRaggedSendPlan(const RoutingDecision& decision, const RaggedSender& sender);

// Where a receiver stands, and who sends to it.
struct RaggedReceiver {
  int tp_size = 1;        // T
  int local_experts = 1;  // e / E
  int slot_classes = 1;   // of the decisions: equal on all sources
  int64_t capacity = 0;   // of the decisions: equal on all sources; 0 when dropless
  // Lane and data-parallel replica of each EP source, in EP order. Experts with expert TP: every source has this rank's
  // lane and replica i is source i. Whole experts: the EP group spans lanes and T sources may share a replica.
  std::vector<int> source_lane;
  std::vector<int> source_replica;
  // Expert TP: each lane receives its own tokens' rows and an AllGatherV over TP brings them together, lane by lane.
  bool gathers_over_tp = false;
  // Dropless: the positions kept free for each replica's rows of an expert, at least its tokens. 0: rows are numbered
  // through. See canonical_position.
  int64_t dropless_positions = 0;

  // Positions of a replica in an expert's block; 0: numbered through.
  int64_t positions_per_replica() const { return capacity > 0 ? capacity : dropless_positions; }
};

// What arrives at one rank's experts. "Arrival" numbers rows as they lie after the exchange (by source; after the
// gather: by lane, then source), "expert row" as the experts see them. A value.
struct RaggedReceivePlan {
  std::vector<int64_t> rows_from;       // [E] rows that this rank receives from each source, before any gather
  std::vector<int64_t> rows_of_lane;    // [T] rows that each lane brings into the gather; {all rows} without a gather
  std::vector<int64_t> rows_of_expert;  // [local experts]
  std::vector<int32_t> arrival_of_expert_row;  // [rows]
  std::vector<int32_t> expert_row_of_arrival;  // [rows], the inverse
  // [rows], by expert row: where the row lies in its expert's padded block. replica * positions_per_replica() + slot,
  // or where that is 0 the number of the row inside its expert. Strictly increasing inside an expert.
  std::vector<int64_t> canonical_position;

  int64_t num_rows() const { return static_cast<int64_t>(arrival_of_expert_row.size()); }
};

// `lane` is this rank's own. segments: [E, local experts, slot_classes, T] as received, E = sources.
// InvalidArgument for a layout that makes no sense; FailedPrecondition naming source and expert when a count is
// negative, above the capacity, when sources of one replica disagree, or when the rows would be 2^31 or more.
absl::StatusOr<RaggedReceivePlan> BuildRaggedReceivePlan(const RaggedReceiver& receiver, int lane,
                                                         absl::Span<const int64_t> segments);

// The segments of one chunk of experts, out of those that were received; the receiver's local_experts are all of them.
std::vector<int64_t> SegmentsOfChunk(const RaggedReceiver& receiver, absl::Span<const int64_t> segments,
                                     const ExpertRange& chunk);

// Every kept route of the lane's own tokens is sent exactly once, to the owner of its expert, and the segments add up
// to the kept counts of the decision: Internal naming the first break otherwise. O(s * k + e * T).
absl::Status CheckConservation(const RaggedSendPlan& plan, const RoutingDecision& decision, const RaggedSender& sender);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_RAGGED_PLAN_H_
