// Whole experts with fewer EP ranks than lanes (E < T): a replica's rows of an expert lie on T / E lanes, each with
// some of the slots, and no split of a sum over slots fits them all. So in canonical numerics those lanes bring their
// rows together for the backward, every one of them computes with all rows in slot order, and the first adds the weight
// gradients (the others' zeros change nothing in the sum over EDP). Which rows each lane has follows from the decision.
// Pure.
//
//   LaneMerge merge = MergeLanes(decision, {.tp = 4, .ep = 2, .lane = 1, .padded = false});
//   tp->AllGatherV(x, all, merge.rows_of_lane);                    // counts times h
//   GatherRows(all, merge.gathered_of_merged, merged);             // contiguous by expert, in order of slots
#ifndef EVENKEEL_MOE_LANE_MERGE_H_
#define EVENKEEL_MOE_LANE_MERGE_H_

#include <cstdint>
#include <vector>

#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

struct LanePlace {
  int tp = 1;
  int ep = 1;  // divides tp: the EP group is lanes [lane / ep * ep, +ep)
  int lane = 0;
  bool padded = false;  // lanes have slots [lane * c / T, +c / T) of every expert, else the routes of their own tokens
};

// A value.
struct LaneMerge {
  std::vector<int64_t> rows_of_lane;        // [T] rows at each lane's experts
  std::vector<int32_t> gathered_of_merged;  // [merged rows] where each lies when lanes' rows lie one after the other
  std::vector<int32_t> merged_of_own;       // [own rows]
  std::vector<int64_t> rows_of_expert;      // [local experts] merged
  std::vector<int64_t> positions;           // [merged rows] slots
  bool adds_gradients = false;              // this lane's weight gradients count

  int64_t num_gathered() const;
  int64_t num_merged() const { return static_cast<int64_t>(positions.size()); }
};

// `decision` is valid, ep divides tp and the experts, and with padding tp the capacity.
LaneMerge MergeLanes(const RoutingDecision& decision, const LanePlace& place);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_LANE_MERGE_H_
