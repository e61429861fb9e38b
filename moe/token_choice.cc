#include "evenkeel/moe/token_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

// Largest value first; equal values: lowest index first. As an integer: larger is better.
uint64_t Rank(float value, int index) {
  return (uint64_t{OrderedBits(value)} << 32) | (std::numeric_limits<uint32_t>::max() - static_cast<uint32_t>(index));
}
int IndexOfRank(uint64_t rank) {
  return static_cast<int>(std::numeric_limits<uint32_t>::max() - static_cast<uint32_t>(rank));
}

// The `count` best of n values by rank, best first. Values of kExcluded are never needed: enough others exist.
void BestOf(const float* values, int n, int count, uint64_t* best) {
  std::fill(best, best + count, 0);
  for (int i = 0; i < n; ++i) {
    const uint64_t rank = Rank(values[i], i);
    if (rank <= best[count - 1]) continue;
    int at = count - 1;
    for (; at > 0 && best[at - 1] < rank; --at) best[at] = best[at - 1];
    best[at] = rank;
  }
}

absl::Status NotFinite(const RouterConfig& config, int64_t token, int expert, float value, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("router of layer \"", config.layer, "\": ", what, " of token ", token,
                                                 " for expert ", expert, " is ", value));
}

// exp(l - max) for all experts into `exps`; returns their sum (in double, in expert order).
double Exponentials(const float* logits, int experts, float largest, double* exps) {
  for (int e = 0; e < experts; ++e) exps[e] = PortableExp(double{logits[e]} - double{largest});
  double sum = 0;
  for (int e = 0; e < experts; ++e) sum += exps[e];
  return sum;
}

void Sigmoids(const float* logits, int experts, float* scores) {
  for (int e = 0; e < experts; ++e) {
    const double small = PortableExp(-std::fabs(double{logits[e]}));
    scores[e] = static_cast<float>((logits[e] >= 0 ? 1.0 : small) / (1.0 + small));
  }
}

// One token's selection: the values that are compared, and the two ways in which they are restricted.
class Selector {
 public:
  Selector(const RouterConfig& config, const RouterStep& step)
      : config_(config),
        noisy_(step.training && config.noise != SelectionNoise::kNone),
        noise_(RouterKey(config, step, "noise")),
        value_(config.experts),
        best_(std::max(config.top_k, 2)),
        groups_(config.groups) {}

  // Writes the k choices of `token`, in order.
  void Choose(int64_t token, const float* logits, const float* scores, const float* bias, int32_t* chosen) {
    for (int e = 0; e < config_.experts; ++e) value_[e] = bias != nullptr ? scores[e] + bias[e] : logits[e];
    if (config_.groups > 1) LimitGroups(scores, bias);
    int fixed = 0;
    if (noisy_) {
      if (config_.noise == SelectionNoise::kLaterChoices) {
        BestOf(value_.data(), config_.experts, 1, best_.data());
        chosen[fixed++] = IndexOfRank(best_[0]);
        value_[chosen[0]] = kExcluded;
      }
      AddNoise(token);
    }
    const int open = config_.top_k - fixed;
    if (open == 0) return;
    BestOf(value_.data(), config_.experts, open, best_.data());
    for (int j = 0; j < open; ++j) chosen[fixed + j] = IndexOfRank(best_[j]);
  }

 private:
  void AddNoise(int64_t token) {
    for (int e = 0; e < config_.experts; ++e) {
      const uint64_t index = static_cast<uint64_t>(token) * config_.experts + e;
      if (value_[e] != kExcluded) value_[e] += static_cast<float>(noise_.Gumbel(index));
    }
  }

  // Excludes the experts of all but the best groups.
  void LimitGroups(const float* scores, const float* bias) {
    const int size = config_.experts / config_.groups;
    for (int g = 0; g < config_.groups; ++g) {
      const float* value = &value_[g * size];
      if (config_.group_score == GroupScore::kMax) {
        groups_[g] = *std::max_element(value, value + size);
        continue;
      }
      BestOf(value, size, 2, best_.data());
      const auto worth = [&](int e) { return bias != nullptr ? scores[e] + bias[e] : scores[e]; };
      groups_[g] = worth(g * size + IndexOfRank(best_[0])) + worth(g * size + IndexOfRank(best_[1]));
    }
    std::vector<uint64_t>& kept = kept_groups_;
    kept.resize(config_.groups_kept);
    BestOf(groups_.data(), config_.groups, config_.groups_kept, kept.data());
    for (int g = 0; g < config_.groups; ++g) {
      const auto is_g = [g](uint64_t rank) { return IndexOfRank(rank) == g; };
      if (std::none_of(kept.begin(), kept.end(), is_g)) {
        std::fill_n(value_.begin() + g * size, size, kExcluded);
      }
    }
  }

  const RouterConfig& config_;
  const bool noisy_;
  const PhiloxStream noise_;
  std::vector<float> value_;
  std::vector<uint64_t> best_;
  std::vector<float> groups_;
  std::vector<uint64_t> kept_groups_;
};

absl::Status CheckBias(const RouterConfig& config, const float* bias) {
  for (int e = 0; bias != nullptr && e < config.experts; ++e) {
    if (!std::isfinite(bias[e])) {
      return absl::InvalidArgumentError(
          absl::StrCat("router of layer \"", config.layer, "\": selection bias of expert ", e, " is ", bias[e]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

double PortableExp(double x) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // the low bits are zero, so n * kLn2High is exact
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  constexpr double kRound = 0x1.8p52;  // adding it leaves the rounded integer in the low bits
  const double clamped = std::min(std::max(x, -700.0), 700.0);
  const double shifted = clamped * kLog2E + kRound;
  const double n = shifted - kRound;
  const double r = (clamped - n * kLn2High) - n * kLn2Low;  // |r| <= ln(2) / 2
  double sum = 1.0 / 479001600.0;                           // Taylor to r^12: the rest is below 1e-15
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  const uint64_t exponent = (std::bit_cast<uint64_t>(shifted) << 52) + 0x3ff0000000000000u;
  const double scaled = sum * std::bit_cast<double>(exponent);
  return x < -700.0 ? 0.0 : scaled;
}

uint32_t OrderedBits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 + 0 is +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

absl::Status ScoreTokens(const RouterConfig& config, const float* logits, RoutingDecision* decision) {
  const int experts = decision->num_experts;
  const int64_t elements = decision->num_tokens * experts;
  const bool sigmoid = config.score == ScoreFunction::kSigmoid;
  decision->score.assign(elements, 0.0f);
  decision->softmax.assign(sigmoid ? elements : 0, 0.0f);
  decision->log_sum_exp.assign(decision->num_tokens, 0.0f);
  decision->active_tokens = 0;
  std::vector<double> exps(experts);
  for (int64_t token = 0; token < decision->num_tokens; ++token) {
    if (!decision->is_active(token)) continue;
    ++decision->active_tokens;
    const float* row = logits + token * experts;
    for (int e = 0; e < experts; ++e) {
      if (!std::isfinite(row[e])) return NotFinite(config, token, e, row[e], "the logit");
    }
    const float largest = *std::max_element(row, row + experts);
    const double sum = Exponentials(row, experts, largest, exps.data());
    decision->log_sum_exp[token] = static_cast<float>(double{largest} + std::log(sum));
    float* softmax = (sigmoid ? decision->softmax.data() : decision->score.data()) + token * experts;
    for (int e = 0; e < experts; ++e) softmax[e] = static_cast<float>(exps[e] / sum);
    if (sigmoid) Sigmoids(row, experts, decision->score.data() + token * experts);
  }
  return absl::OkStatus();
}

absl::Status ChooseExperts(const RouterConfig& config, const RouterStep& step, const float* logits,
                           const float* selection_bias, RoutingDecision* decision) {
  EK_RETURN_IF_ERROR(CheckBias(config, selection_bias));
  const int k = decision->top_k;
  const int counted = config.effective_balance() == BalanceChoices::kFirst ? 1 : k;
  decision->expert.resize(decision->num_routes());
  decision->assigned.assign(decision->num_experts, 0);
  decision->balance_count.assign(decision->num_experts, 0);
  Selector selector(config, step);
  for (int64_t token = 0; token < decision->num_tokens; ++token) {
    int32_t* chosen = decision->expert.data() + token * k;
    if (!decision->is_active(token)) {
      for (int j = 0; j < k; ++j) chosen[j] = j;
      continue;
    }
    const int64_t row = token * decision->num_experts;
    selector.Choose(token, logits + row, decision->score.data() + row, selection_bias, chosen);
    for (int j = 0; j < k; ++j) ++decision->assigned[chosen[j]];
    for (int j = 0; j < counted; ++j) ++decision->balance_count[chosen[j]];
  }
  return absl::OkStatus();
}

PhiloxKey RouterKey(const RouterConfig& config, const RouterStep& step, absl::string_view purpose) {
  return PhiloxKey(step.seed).Add(step.step).Add(config.layer).Add(step.source).Add("router").Add(purpose);
}

}  // namespace evenkeel::moe
