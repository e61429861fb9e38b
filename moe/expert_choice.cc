#include "evenkeel/moe/expert_choice.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/token_choice.h"

namespace evenkeel::moe {
namespace {

// One expert's pick.
struct Pick {
  int64_t token = 0;
  int32_t expert = 0;
  int32_t slot = 0;
};

// Best score first, then lowest token; as an integer larger is better.
uint64_t TokenRank(float score, int64_t token) {
  return (uint64_t{OrderedBits(score)} << 32) | (std::numeric_limits<uint32_t>::max() - static_cast<uint32_t>(token));
}
int64_t TokenOfRank(uint64_t rank) { return std::numeric_limits<uint32_t>::max() - static_cast<uint32_t>(rank); }

// Appends the picks of one expert in token order.
void PickTokens(const RoutingDecision& d, int32_t expert, int64_t count, std::vector<uint64_t>* ranks,
                std::vector<Pick>* picks) {
  ranks->clear();
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    if (d.is_active(token)) ranks->push_back(TokenRank(d.score[token * d.num_experts + expert], token));
  }
  const int64_t taken = std::min<int64_t>(count, static_cast<int64_t>(ranks->size()));
  if (taken < static_cast<int64_t>(ranks->size())) {
    std::nth_element(ranks->begin(), ranks->begin() + taken, ranks->end(), std::greater<>());
  }
  const size_t begin = picks->size();
  for (int64_t i = 0; i < taken; ++i) picks->push_back({TokenOfRank((*ranks)[i]), expert, 0});
  std::sort(picks->begin() + begin, picks->end(), [](const Pick& a, const Pick& b) { return a.token < b.token; });
  for (int64_t i = 0; i < taken; ++i) (*picks)[begin + i].slot = static_cast<int32_t>(i);
}

// Fills the choices of a token behind the first `used` with the lowest experts it has not got.
void FillUnused(int used, int top_k, int32_t* chosen) {
  for (int32_t expert = 0; used < top_k; ++expert) {
    if (std::find(chosen, chosen + used, expert) == chosen + used) chosen[used++] = expert;
  }
}

// Groups the picks by token and writes routes.
void WriteRoutes(std::vector<Pick>* picks, RoutingDecision* d) {
  const auto best_first = [d](const Pick& a, const Pick& b) {
    if (a.token != b.token) return a.token < b.token;
    const float score_a = d->score[a.token * d->num_experts + a.expert];
    const float score_b = d->score[b.token * d->num_experts + b.expert];
    return score_a != score_b ? score_a > score_b : a.expert < b.expert;
  };
  std::sort(picks->begin(), picks->end(), best_first);
  d->expert.assign(d->num_routes(), 0);
  d->slot.assign(d->num_routes(), -1);
  size_t at = 0;
  for (int64_t token = 0; token < d->num_tokens; ++token) {
    int used = 0;
    for (; at < picks->size() && (*picks)[at].token == token; ++at, ++used) {
      d->expert[token * d->top_k + used] = (*picks)[at].expert;
      d->slot[token * d->top_k + used] = (*picks)[at].slot;
    }
    FillUnused(used, d->top_k, &d->expert[token * d->top_k]);
  }
}

}  // namespace

absl::Status ChooseTokens(int64_t tokens_per_expert, RoutingDecision* decision) {
  if (decision->num_tokens > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert choice takes fewer than 2^31 tokens, got ", decision->num_tokens));
  }
  std::vector<uint64_t> ranks;
  std::vector<Pick> picks;
  for (int32_t e = 0; e < decision->num_experts; ++e) PickTokens(*decision, e, tokens_per_expert, &ranks, &picks);
  std::vector<int32_t> experts_of_token(decision->num_tokens, 0);
  decision->assigned.assign(decision->num_experts, 0);
  decision->top_k = 1;
  for (const Pick& pick : picks) {
    ++decision->assigned[pick.expert];
    decision->top_k = std::max(decision->top_k, ++experts_of_token[pick.token]);
  }
  decision->kept = decision->assigned;
  decision->balance_count = decision->assigned;
  decision->slot_classes = 1;
  WriteRoutes(&picks, decision);
  return absl::OkStatus();
}

}  // namespace evenkeel::moe
