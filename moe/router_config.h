// What a router does, as one validated struct. Terms and formulas: docs of moe/router.h.
//
//   RouterConfig config{.layer = "blocks.0.moe", .hidden = 512, .experts = 8, .top_k = 2};
//   EK_RETURN_IF_ERROR(config.Validate());
#ifndef EVENKEEL_MOE_ROUTER_CONFIG_H_
#define EVENKEEL_MOE_ROUTER_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/routing_decision.h"

namespace evenkeel::moe {

// Which routes of an over-full expert stay.
enum class DropPolicy : uint8_t {
  kByTopK = 0,              // the customary one for this k: position for 1, choice-then-position for 2, probs above
  kProbs = 1,               // the most probable ones; ties: lowest token
  kPosition = 2,            // the first ones in token order
  kChoiceThenPosition = 3,  // all first choices in token order, then all second ones, ... (top-2 of GShard, DeepSpeed)
  kRandom = 4,  // the ones with the largest uniform number in training (random token selection), else as kPosition
};

// How the weights of a token's kept routes are scaled before route_scale.
enum class WeightNormalization : uint8_t {
  kByTopK = 0,    // kNone for k = 1, else kOverKept
  kNone = 1,      // the score itself
  kOverKept = 2,  // divided by the sum of the kept scores, floored at 2^-23
};

// Which choices the load-balance loss counts.
enum class BalanceChoices : uint8_t {
  kByTopK = 0,  // kFirst for k <= 2, kAll above
  kFirst = 1,   // e * sum_j mean(g_j) * mean(first choice is j)
  kAll = 2,     // e / k * sum_j mean(g_j) * mean(j is chosen)
};

// Gumbel noise on the logits, for the selection only, in training only.
enum class SelectionNoise : uint8_t {
  kNone = 0,
  kAllChoices = 1,    // every choice is made from logits + noise
  kLaterChoices = 2,  // the first choice is clean, the others are made from logits + noise
};

// What a group of experts is worth when only some groups may be chosen from.
enum class GroupScore : uint8_t { kMax = 0, kTopTwoSum = 1 };

// The names of the built-in routers.
inline constexpr char kTopK[] = "topk";                   // every token chooses its best experts
inline constexpr char kExpertChoice[] = "expert_choice";  // every expert chooses its best tokens (arXiv 2202.09368)

// A value.
struct RouterConfig {
  std::string kind = kTopK;  // the router's name in the registry: one of the above or a user's own
  std::string layer;         // for messages and for the random stream
  int64_t hidden = 0;
  int experts = 0;
  int top_k = 1;  // expert choice: the average number of routes per token

  ScoreFunction score = ScoreFunction::kSoftmax;
  CapacityOptions capacity;
  DropPolicy drop = DropPolicy::kByTopK;
  WeightNormalization normalization = WeightNormalization::kByTopK;
  BalanceChoices balance = BalanceChoices::kByTopK;
  double route_scale = 1.0;

  // Group-limited selection: experts are cut into `groups` equal consecutive groups and only the best `groups_kept`
  // of them are chosen from. 1 and 1: no limit.
  int groups = 1;
  int groups_kept = 1;
  GroupScore group_score = GroupScore::kMax;

  SelectionNoise noise = SelectionNoise::kNone;
  float jitter = 0;  // x is multiplied by a uniform number in [1 - jitter, 1 + jitter), in training only

  // InvalidArgument naming layer and numbers: k > experts, groups that do not divide, a non-finite scale, ...
  absl::Status Validate() const;

  DropPolicy effective_drop() const;
  WeightNormalization effective_normalization() const;
  BalanceChoices effective_balance() const;
};

// Where in training a call stands: the key of its random numbers. Equal on all lanes of a TP group.
struct RouterStep {
  bool training = true;
  uint64_t seed = 0;
  uint64_t step = 0;
  // The data-parallel replica whose tokens these are (Mesh::Coordinate(kDp, rank)): never the lane.
  uint64_t source = 0;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTER_CONFIG_H_
