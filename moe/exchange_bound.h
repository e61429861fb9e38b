// The fewest rows that any order can exchange for a routing: what `achieved / bound` in reports divides by.
//
// A token's row must reach every rank that holds one of its kept experts, and one row must come back. Whatever the
// program, out of the TP group that has the token it crosses to each distinct remote rank at least once, and into each
// remote node at least once; back, a node's partial sums can be added up before they leave it. So per token, out:
//   between nodes   one row per distinct remote node with a destination
//   inside nodes    one row per destination rank on the own node, and per destination rank of a remote node but the
//   first
// and the same back.
//
//   ExchangeBound bound = BoundExchange(decision, {.ep_rank = 1, .node_of_rank = {0, 0, 1, 1}});
//   bound.total() * hidden * bytes;
#ifndef EVENKEEL_MOE_EXCHANGE_BOUND_H_
#define EVENKEEL_MOE_EXCHANGE_BOUND_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Rows out of one source (a TP group as one), one way.
struct ExchangeBound {
  int64_t intra_node_rows = 0;
  int64_t inter_node_rows = 0;
  int64_t total() const { return intra_node_rows + inter_node_rows; }
};

// Where the source and the experts are. Experts are dealt to EP ranks in equal consecutive blocks.
struct ExchangePlaces {
  int ep_rank = 0;                // of the source
  std::vector<int> node_of_rank;  // of each EP rank; its size is E
  // Ranks that hold the source's tokens anyway (its TP group where the EP group spans lanes). Empty: ep_rank alone.
  std::vector<int> home_ranks;
};

// The bound of one source's decision. InvalidArgument when E does not divide the experts or a rank is out of range.
absl::StatusOr<ExchangeBound> BoundExchange(const RoutingDecision& decision, const ExchangePlaces& places);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXCHANGE_BOUND_H_
