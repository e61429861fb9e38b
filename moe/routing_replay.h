// Recorded routing: run twice with the same routes, so that what differs is arithmetic, not who went where.
//
// A near-tie in one logit sends a token elsewhere, and a comparison of two numerics, orders or frameworks then compares
// different work. Record the decisions of one run, replay them in the other (RouterInput::replay): experts, slots and
// capacity are fixed, scores, weights, losses and gradients are computed anew. A recomputation in the backward replays
// the decision of its forward in the same way, so other noise or rounding cannot change it.
//
//   log.Record({.layer = "blocks.0.moe", .step = 3, .source = 1}, decision);
//   EK_ASSIGN_OR_RETURN(const RoutingDecision* replay, log.Find({.layer = "blocks.0.moe", .step = 3, .source = 1}));
//   WriteFile(path, log.Serialize());
#ifndef EVENKEEL_MOE_ROUTING_REPLAY_H_
#define EVENKEEL_MOE_ROUTING_REPLAY_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Which call of a run: `source` is the data-parallel replica, `pass` the how-manieth call of the layer in the step.
struct RoutingKey {
  std::string layer;
  uint64_t step = 0;
  uint64_t source = 0;
  uint64_t pass = 0;

  std::string ToString() const;  // layer "blocks.0.moe" step 3 source 1 pass 0
  friend auto operator<=>(const RoutingKey&, const RoutingKey&) = default;
};

// An ordered set of decisions. A value; not thread-safe.
class RoutingLog {
 public:
  // Keeps a copy without the saved scores: memory s * k. AlreadyExists when the key is taken; the decision's own error
  // when it is not valid.
  absl::Status Record(const RoutingKey& key, const RoutingDecision& decision);
  // NotFound naming the key. The pointer is valid while the log lives and is not assigned to.
  absl::StatusOr<const RoutingDecision*> Find(const RoutingKey& key) const;
  int64_t size() const { return static_cast<int64_t>(decisions_.size()); }

  // OK when both logs hold the same keys and the same routes; FailedPrecondition naming the first key, token and what
  // each side decided. Weights are not compared: they are arithmetic.
  absl::Status Compare(const RoutingLog& other) const;

  // Little-endian bytes with a checksum at the end.
  std::string Serialize() const;
  // The inverse. DataLoss when the bytes are cut, altered or not a log; nothing is allocated that the bytes do not
  // hold; every decision is validated.
  static absl::StatusOr<RoutingLog> Parse(absl::string_view bytes);

 private:
  std::map<RoutingKey, RoutingDecision> decisions_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTING_REPLAY_H_
