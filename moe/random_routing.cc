#include "evenkeel/moe/random_routing.h"

#include <algorithm>
#include <limits>

#include "evenkeel/runtime/base/philox.h"

namespace evenkeel::moe {
namespace {

void ChooseExperts(const RandomRoutingOptions& options, const PhiloxStream& stream, RoutingDecision* d) {
  uint64_t draw = 0;
  for (int64_t token = 0; token < d->num_tokens; ++token) {
    int32_t* chosen = &d->expert[token * d->top_k];
    const bool skewed = stream.Uniform(draw++) < options.skew;
    for (int j = 0; j < d->top_k; ++j) {
      do {
        chosen[j] = skewed ? j : static_cast<int32_t>(stream.Below(draw++, d->num_experts));
      } while (std::find(chosen, chosen + j, chosen[j]) != chosen + j);
    }
  }
}

void PlaceToken(int64_t token, int choice, int64_t limit, RoutingDecision* d) {
  const int64_t r = token * d->top_k + choice;
  const int32_t expert = d->expert[r];
  ++d->assigned[expert];
  if (d->kept[expert] >= limit) return;
  d->slot[r] = static_cast<int32_t>(d->kept[expert]++);
  d->weight[r] = 1.0f / static_cast<float>(r + 2);
}

}  // namespace

RoutingDecision RandomRouting(const RandomRoutingOptions& options) {
  RoutingDecision d;
  d.num_tokens = options.tokens;
  d.num_experts = options.experts;
  d.top_k = options.top_k;
  d.capacity = options.capacity;
  d.dropless = options.capacity == 0;
  d.slot_classes = options.choice_classes ? options.top_k : 1;
  d.expert.resize(d.num_routes());
  d.slot.assign(d.num_routes(), -1);
  d.weight.assign(d.num_routes(), 0.0f);
  d.assigned.assign(d.num_experts, 0);
  d.kept.assign(d.num_experts, 0);
  const PhiloxStream stream(PhiloxKey(options.seed).Add("random routing"));
  const PhiloxStream mask_stream(PhiloxKey(options.seed).Add("random mask"));
  if (options.masked > 0) d.token_mask.assign(d.num_tokens, 1);
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    if (options.masked > 0 && mask_stream.Uniform(token) < options.masked) d.token_mask[token] = 0;
    d.active_tokens += d.is_active(token) ? 1 : 0;
  }
  ChooseExperts(options, stream, &d);
  const int64_t limit = d.dropless ? std::numeric_limits<int64_t>::max() : d.capacity;
  for (int32_t c = 0; c < d.slot_classes; ++c) {
    for (int64_t token = 0; token < d.num_tokens; ++token) {
      for (int j = 0; j < d.top_k; ++j) {
        if (d.is_active(token) && d.class_of_choice(j) == c) PlaceToken(token, j, limit, &d);
      }
    }
  }
  return d;
}

}  // namespace evenkeel::moe
