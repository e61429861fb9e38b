// Where every element of a storage unit lives: the pure half of a fetch policy.
//
// A unit is a list of parameters that are gathered and reduced together: they share their users, their family and
// whether they persist. Its layout says, for every rank, which elements that rank owns, where they lie in the rank's
// weight shard, and where their gradients lie in the rank's gradient shard.
//
// Full gradients are accumulated in one buffer per unit (f32, or f64 for f64 parameters); reduction sends element
// (parameter p, index i) at gradient_starts[p] + i of that buffer to the rank that owns it.
#ifndef EVENKEEL_ZERO3_UNIT_LAYOUT_H_
#define EVENKEEL_ZERO3_UNIT_LAYOUT_H_

#include <cstdint>
#include <vector>

namespace evenkeel::zero3 {

// Elements [begin, begin + count) of one parameter of the unit, owned by one rank.
struct ShardFragment {
  int parameter = -1;  // position inside the unit
  int64_t begin = 0;
  int64_t count = 0;            // >= 1
  int64_t weight_offset = 0;    // bytes inside the rank's weight shard
  int64_t gradient_offset = 0;  // elements inside the rank's gradient shard; -1 for frozen parameters
};

// Host work and traffic of one fetch + release of a unit, as counted by WorkCounters.
struct FetchCost {
  int64_t host_operations = 0;
  int64_t collectives = 0;
  int64_t copies = 0;
  int64_t launches = 0;
  int64_t allocations = 0;
  int64_t event_records = 0;
  int64_t event_waits = 0;
  friend bool operator==(const FetchCost&, const FetchCost&) = default;
};

struct UnitLayout {
  int world_size = 1;
  // True when every rank owns everything: nothing is gathered.
  bool replicated = false;
  int64_t shard_bytes = 0;
  // fragments[rank]: ascending by (parameter, begin). Every element belongs to exactly one rank, or to all of them when
  // replicated; elements of one parameter ascend with the rank.
  std::vector<std::vector<ShardFragment>> fragments;

  // First element of each parameter in the unit's full gradient buffer, -1 for frozen ones.
  std::vector<int64_t> gradient_starts;
  int64_t gradient_elements = 0;         // of the full buffer
  std::vector<int64_t> gradient_counts;  // [rank] elements of the rank's gradient shard
  // True when the full buffer is the shards back to back: reduction needs no packing.
  bool gradient_is_rank_major = false;

  // Memory while gathered, and only between gather and first use, and at any time for the whole model (the largest of
  // all units counts).
  int64_t gathered_bytes = 0;
  int64_t transient_bytes = 0;
  int64_t staging_bytes = 0;
  // True when the gather writes into one block of gathered_bytes that the fetch plan places.
  bool planned_memory = false;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_UNIT_LAYOUT_H_
