// The fewest rows that any order can send for a routing, over EP and over TP links: what `achieved / bound` in reports
// divides by. Both are proved against a search over all transfers for small groups (exchange_bound_test).
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
//
// Over TP (BoundLanes), for experts sliced over T lanes. Lanes are joined by TP links only: an EP group stays in its
// lane. Each lane holds an addend of every row's output, and the sum has to reach all lanes (one, where each token has
// a lane of its own): 2(T-1) rows per token with a kept route (T-1). Out, tokens are on all lanes already (their own
// lane's must reach the others: T-1 rows). That holds whatever goes over EP. Where EP carries no more than its own
// bound, a row arrives at one lane only, and TP has to do the rest: T-1 rows per remote destination to bring it to the
// others' slices, T-1 to add up their outputs, and at home T-1 to spread the sum over the lanes, 2(T-1) where home
// experts add to it on every lane.
// Whole experts: the EP group spans lanes, so TP links need carry nothing; with EP at its bound the sum must still be
// spread from the home lanes that have addends, T-1 rows and one more for each of them but the first.
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

// What the lanes of the source are to the order.
struct LanePlaces {
  int tp = 1;                  // T
  bool whole_experts = false;  // experts are not sliced; the EP group spans lanes, `home_ranks` are the source's
  bool sliced_tokens = false;  // each lane brings and gets its own tokens
};

// Rows over TP links for one source's tokens, out and back, wherever in the group of TP groups they go. The backward of
// an order needs as many again.
struct LaneBound {
  int64_t rows = 0;                    // whatever is sent over EP
  int64_t rows_at_least_exchange = 0;  // where EP carries no more than BoundExchange
};

// Errors as BoundExchange; InvalidArgument for fewer than one lane.
absl::StatusOr<LaneBound> BoundLanes(const RoutingDecision& decision, const ExchangePlaces& places,
                                     const LanePlaces& lanes);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_EXCHANGE_BOUND_H_
