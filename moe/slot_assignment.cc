#include "evenkeel/moe/slot_assignment.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/token_choice.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();
constexpr double kDenominatorFloor = 0x1p-23;

// Gives slots in order of (class, token) to the routes that `stays` admits; -1 to the others.
template <typename Stays>
void NumberSlots(RoutingDecision* d, Stays stays) {
  d->slot.assign(d->num_routes(), -1);
  d->kept.assign(d->num_experts, 0);
  for (int32_t c = 0; c < d->slot_classes; ++c) {
    const int first = d->slot_classes > 1 ? c : 0;
    const int last = d->slot_classes > 1 ? c + 1 : d->top_k;
    for (int64_t token = 0; token < d->num_tokens; ++token) {
      if (!d->is_active(token)) continue;
      for (int j = first; j < last; ++j) {
        const int64_t r = token * d->top_k + j;
        const int32_t expert = d->expert[r];
        if (stays(r, d->kept[expert])) d->slot[r] = static_cast<int32_t>(d->kept[expert]++);
      }
    }
  }
}

// Worth of a route among those of its expert; larger stays. Equal worth: the lower token stays.
std::vector<float> RouteWorth(const RouterConfig& config, const RouterStep& step, const RoutingDecision& d) {
  std::vector<float> worth(d.num_routes());
  const bool random = config.effective_drop() == DropPolicy::kRandom;
  const PhiloxStream stream(RouterKey(config, step, "drop"));
  for (int64_t r = 0; r < d.num_routes(); ++r) {
    const int64_t index = r / d.top_k * d.num_experts + d.expert[r];
    worth[r] = random ? stream.Uniform(static_cast<uint64_t>(index)) : d.score[index];
  }
  return worth;
}

// Routes of each expert, by expert, in token order: a counting sort.
struct RoutesByExpert {
  std::vector<int64_t> begin;  // [e + 1]
  std::vector<int64_t> route;
};

RoutesByExpert GroupRoutes(const RoutingDecision& d) {
  RoutesByExpert routes;
  routes.begin.assign(d.num_experts + 1, 0);
  std::partial_sum(d.assigned.begin(), d.assigned.end(), routes.begin.begin() + 1);
  routes.route.resize(routes.begin.back());
  std::vector<int64_t> next(routes.begin.begin(), routes.begin.end() - 1);
  for (int64_t r = 0; r < d.num_routes(); ++r) {
    if (d.is_active(r / d.top_k)) routes.route[next[d.expert[r]]++] = r;
  }
  return routes;
}

// Marks the `capacity` routes of greatest worth of every over-full expert; all routes of the others.
std::vector<uint8_t> MarkBest(const RouterConfig& config, const RouterStep& step, const RoutingDecision& d) {
  std::vector<uint8_t> marked(d.num_routes(), 1);
  const std::vector<float> worth = RouteWorth(config, step, d);
  RoutesByExpert routes = GroupRoutes(d);
  const auto better = [&](int64_t a, int64_t b) { return worth[a] != worth[b] ? worth[a] > worth[b] : a < b; };
  for (int32_t e = 0; e < d.num_experts; ++e) {
    if (d.assigned[e] <= d.capacity) continue;
    const auto begin = routes.route.begin() + routes.begin[e];
    const auto end = routes.route.begin() + routes.begin[e + 1];
    std::nth_element(begin, begin + d.capacity, end, better);
    for (auto it = begin + d.capacity; it != end; ++it) marked[*it] = 0;
  }
  return marked;
}

// What the balance loss and its gradient share: the share of routes of each expert, times e. Zero without tokens.
std::vector<double> BalanceFactors(const RoutingDecision& d) {
  const int64_t total = std::accumulate(d.balance_count.begin(), d.balance_count.end(), int64_t{0});
  std::vector<double> factors(d.num_experts, 0.0);
  for (int32_t e = 0; e < d.num_experts && total > 0; ++e) {
    factors[e] =
        static_cast<double>(d.num_experts) * static_cast<double>(d.balance_count[e]) / static_cast<double>(total);
  }
  return factors;
}

double SumOfScores(const float* score, int experts) {
  double sum = 0;
  for (int e = 0; e < experts; ++e) sum += double{score[e]};
  return sum;
}

// Sum of the scores of one token's kept routes, in choice order.
double KeptScores(const RoutingDecision& d, int64_t token) {
  double sum = 0;
  for (int j = 0; j < d.top_k; ++j) {
    const int64_t r = token * d.top_k + j;
    if (d.slot[r] >= 0) sum += double{d.score[token * d.num_experts + d.expert[r]]};
  }
  return sum;
}

// dscore += gradient through the weights of one token.
void AddWeightGradient(const RouterConfig& config, const RoutingDecision& d, int64_t token, const float* dweight,
                       double* dscore) {
  const bool normalized = config.effective_normalization() == WeightNormalization::kOverKept;
  const double sum = normalized ? KeptScores(d, token) : 1.0;
  const double denominator = normalized ? std::max(sum, kDenominatorFloor) : 1.0;
  double through_sum = 0;  // the derivative of the denominator, zero where it is floored
  for (int j = 0; j < d.top_k; ++j) {
    const int64_t r = token * d.top_k + j;
    if (d.slot[r] < 0 || !normalized || sum < kDenominatorFloor) continue;
    through_sum += double{dweight[r]} * double{d.score[token * d.num_experts + d.expert[r]]} / denominator;
  }
  for (int j = 0; j < d.top_k; ++j) {
    const int64_t r = token * d.top_k + j;
    if (d.slot[r] < 0) continue;
    dscore[d.expert[r]] += config.route_scale * (double{dweight[r]} - through_sum) / denominator;
  }
}

// dscore += gradient through g_j = score (softmax) or score / sum of scores (sigmoid) of one token.
void AddBalanceGradient(const RouterConfig& config, const RoutingDecision& d, const float* score,
                        const std::vector<double>& factors, double scale, double* dscore) {
  if (config.score == ScoreFunction::kSoftmax) {
    for (int e = 0; e < d.num_experts; ++e) dscore[e] += scale * factors[e];
    return;
  }
  const double sum = SumOfScores(score, d.num_experts);
  const double denominator = std::max(sum, kDenominatorFloor);
  double through_sum = 0;
  for (int e = 0; e < d.num_experts && sum >= kDenominatorFloor; ++e) {
    through_sum += factors[e] * double{score[e]} / denominator;
  }
  for (int e = 0; e < d.num_experts; ++e) dscore[e] += scale * (factors[e] - through_sum) / denominator;
}

// From dscore to one row of dlogits, adding the z-loss.
void ScoresToLogits(const RouterConfig& config, const RoutingDecision& d, int64_t token, const double* dscore,
                    double z_scale, float* row) {
  const float* score = &d.score[token * d.num_experts];
  const bool softmax = config.score == ScoreFunction::kSoftmax;
  const float* p = softmax ? score : &d.softmax[token * d.num_experts];
  const double z = 2.0 * z_scale * double{d.log_sum_exp[token]};
  double dot = 0;
  for (int e = 0; e < d.num_experts && softmax; ++e) dot += double{score[e]} * dscore[e];
  for (int e = 0; e < d.num_experts; ++e) {
    const double g = double{score[e]};
    row[e] = static_cast<float>((softmax ? g * (dscore[e] - dot) : g * (1.0 - g) * dscore[e]) + z * double{p[e]});
  }
}

}  // namespace

absl::Status AssignSlots(const RouterConfig& config, const RouterStep& step, RoutingDecision* decision) {
  DropPolicy policy = config.effective_drop();
  if (policy == DropPolicy::kRandom && !step.training) policy = DropPolicy::kPosition;
  decision->slot_classes = policy == DropPolicy::kChoiceThenPosition ? decision->top_k : 1;
  const int64_t fullest = *std::max_element(decision->assigned.begin(), decision->assigned.end());
  if (decision->capacity > kMaxSlots || fullest > kMaxSlots) {
    return absl::InvalidArgumentError(absl::StrCat("router of layer \"", config.layer, "\": capacity ",
                                                   decision->capacity, " or ", fullest,
                                                   " routes to one expert exceed 2^31 - 1 slots"));
  }
  const int64_t limit = decision->dropless ? kMaxSlots : decision->capacity;
  if (fullest > limit && (policy == DropPolicy::kProbs || policy == DropPolicy::kRandom)) {
    const std::vector<uint8_t> marked = MarkBest(config, step, *decision);
    NumberSlots(decision, [&](int64_t r, int64_t) { return marked[r] != 0; });
  } else {
    NumberSlots(decision, [&](int64_t, int64_t taken) { return taken < limit; });
  }
  return absl::OkStatus();
}

void ComputeWeights(const RouterConfig& config, RoutingDecision* decision) {
  RoutingDecision& d = *decision;
  const bool normalized = config.effective_normalization() == WeightNormalization::kOverKept;
  d.weight.assign(d.num_routes(), 0.0f);
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    const double denominator = normalized ? std::max(KeptScores(d, token), kDenominatorFloor) : 1.0;
    for (int j = 0; j < d.top_k; ++j) {
      const int64_t r = token * d.top_k + j;
      if (d.slot[r] < 0) continue;
      const double score = d.score[token * d.num_experts + d.expert[r]];
      d.weight[r] = static_cast<float>(config.route_scale * (score / denominator));
    }
  }
}

void ComputeLosses(const RouterConfig& config, RoutingDecision* decision) {
  RoutingDecision& d = *decision;
  d.balance_loss = 0;
  d.z_loss = 0;
  if (d.active_tokens == 0) return;
  const std::vector<double> factors = BalanceFactors(d);
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    if (!d.is_active(token)) continue;
    const float* score = &d.score[token * d.num_experts];
    double share = 0;
    for (int e = 0; e < d.num_experts; ++e) share += factors[e] * double{score[e]};
    if (config.score == ScoreFunction::kSigmoid) {
      share /= std::max(SumOfScores(score, d.num_experts), kDenominatorFloor);
    }
    d.balance_loss += share;
    d.z_loss += double{d.log_sum_exp[token]} * double{d.log_sum_exp[token]};
  }
  d.balance_loss /= static_cast<double>(d.active_tokens);
  d.z_loss /= static_cast<double>(d.active_tokens);
}

void LogitGradients(const RouterConfig& config, const RoutingDecision& decision, const float* dweight, float balance,
                    float z, float* dlogits) {
  const int experts = decision.num_experts;
  const double tokens = static_cast<double>(std::max<int64_t>(decision.active_tokens, 1));
  const std::vector<double> factors = BalanceFactors(decision);
  std::vector<double> dscore(experts);
  for (int64_t token = 0; token < decision.num_tokens; ++token) {
    float* row = dlogits + token * experts;
    if (!decision.is_active(token)) {
      std::fill(row, row + experts, 0.0f);
      continue;
    }
    std::fill(dscore.begin(), dscore.end(), 0.0);
    AddWeightGradient(config, decision, token, dweight, dscore.data());
    if (balance != 0) {
      AddBalanceGradient(config, decision, &decision.score[token * experts], factors, double{balance} / tokens,
                         dscore.data());
    }
    ScoresToLogits(config, decision, token, dscore.data(), double{z} / tokens, row);
  }
}

}  // namespace evenkeel::moe
