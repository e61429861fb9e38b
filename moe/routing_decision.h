// What a router decided: for every token its k experts, its place in each expert's block, and its weight.
//
// A value, made by Router (router.h) or by a user's own router, read by the planners (dispatch_plan.h, ragged_plan.h)
// and by combine. Every lane of a TP group holds bit-identical copies. Route r = token * top_k + choice.
//
//   expert = decision.expert[token * decision.top_k + j];   // j-th choice of the token
//   slot = decision.slot[token * decision.top_k + j];       // its row in that expert's block, -1: dropped
//
// Invariants (Validate checks them all):
//   * the top_k experts of a token are distinct and in [0, num_experts), masked tokens included;
//   * the kept routes of an expert, ordered by (class, token), have slots 0, 1, 2, ... without holes; the class of a
//     route is its choice number when slot_classes == top_k > 1 (first choices before second ones), else 0;
//   * with a capacity every slot is below it; a dropless decision drops nothing but masked tokens, capacity is 0;
//   * a route whose slot is -1 has weight 0;
//   * assigned and kept count the routes of active tokens per expert, before and after the drop.
#ifndef EVENKEEL_MOE_ROUTING_DECISION_H_
#define EVENKEEL_MOE_ROUTING_DECISION_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel::moe {

// How scores come from logits; kept in the decision because the backward needs it.
enum class ScoreFunction : uint8_t { kSoftmax = 0, kSigmoid = 1 };

// A value; as thread-safe as a vector.
struct RoutingDecision {
  int64_t num_tokens = 0;   // s: all tokens, masked ones included
  int32_t num_experts = 0;  // e
  int32_t top_k = 1;        // k: routes per token (expert choice: the most routes any token has, at least 1)
  bool dropless = false;
  int64_t capacity = 0;      // c: rows per expert block, a multiple of T, equal on all EP sources; 0 when dropless
  int32_t slot_classes = 1;  // 1, or top_k when earlier choices have priority

  std::vector<int32_t> expert;    // [s, k]
  std::vector<int32_t> slot;      // [s, k], -1 = dropped or masked
  std::vector<float> weight;      // [s, k], 0 where the slot is -1
  std::vector<int64_t> assigned;  // [e] routes before the drop
  std::vector<int64_t> kept;      // [e] routes after the drop; assigned - kept were dropped

  int64_t active_tokens = 0;  // tokens that are not masked
  double balance_loss = 0;    // without coefficient, over this source's tokens
  double z_loss = 0;          // without coefficient

  // For the router's backward only.
  std::vector<float> score;            // [s, e] softmax or sigmoid of the logits; 0 for masked tokens
  std::vector<float> softmax;          // [s, e] for the z-loss where `score` is a sigmoid, else empty
  std::vector<float> log_sum_exp;      // [s] for the z-loss
  std::vector<uint8_t> token_mask;     // [s] 1 = active; empty: all are
  std::vector<int64_t> balance_count;  // [e] how often the balance loss counted each expert

  int64_t num_routes() const { return num_tokens * top_k; }
  bool is_active(int64_t token) const { return token_mask.empty() || token_mask[token] != 0; }
  // The priority class of a route: see the invariants above.
  int32_t class_of_choice(int32_t choice) const { return slot_classes > 1 ? choice : 0; }
  // The sum of `kept`.
  int64_t num_kept() const;

  // Checks every invariant in O(s * k + e): Internal naming token, expert and numbers where one is broken.
  absl::Status Validate() const;
  // Of everything that decides where rows go and how they are weighted (not of losses and saved scores).
  uint64_t Digest() const;
  // The same of one token's experts, slots and weights.
  uint64_t TokenDigest(int64_t token) const;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTING_DECISION_H_
