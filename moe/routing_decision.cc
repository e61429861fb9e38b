#include "evenkeel/moe/routing_decision.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

absl::Status CheckExtents(const RoutingDecision& d) {
  const auto routes = static_cast<size_t>(d.num_routes());
  const auto experts = static_cast<size_t>(d.num_experts);
  const bool extents = d.num_tokens >= 0 && d.num_experts >= 1 && d.top_k >= 1 && d.top_k <= d.num_experts &&
                       d.capacity >= 0 && (d.slot_classes == 1 || d.slot_classes == d.top_k) &&
                       (!d.dropless || d.capacity == 0);
  const bool sizes = d.expert.size() == routes && d.slot.size() == routes && d.weight.size() == routes &&
                     d.assigned.size() == experts && d.kept.size() == experts &&
                     (d.token_mask.empty() || d.token_mask.size() == static_cast<size_t>(d.num_tokens));
  if (extents && sizes) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "routing decision of inconsistent extents: tokens ", d.num_tokens, ", k ", d.top_k, ", experts ", d.num_experts,
      ", capacity ", d.capacity, ", slot classes ", d.slot_classes, ", arrays ", d.expert.size(), "/", d.slot.size(),
      "/", d.weight.size(), " routes, ", d.assigned.size(), "/", d.kept.size(), " experts"));
}

absl::Status RouteError(const RoutingDecision& d, int64_t token, int choice, absl::string_view what) {
  const int64_t r = token * d.top_k + choice;
  return absl::InternalError(absl::StrCat("token ", token, " choice ", choice, " (expert ", d.expert[r], ", slot ",
                                          d.slot[r], ", weight ", d.weight[r], "): ", what));
}

// One token's routes: range, distinctness, and the link between slot, mask and weight.
absl::Status CheckToken(const RoutingDecision& d, int64_t token) {
  const int32_t* expert = &d.expert[token * d.top_k];
  for (int j = 0; j < d.top_k; ++j) {
    const int64_t r = token * d.top_k + j;
    if (expert[j] < 0 || expert[j] >= d.num_experts) return RouteError(d, token, j, "no such expert");
    if (std::find(expert, expert + j, expert[j]) != expert + j) return RouteError(d, token, j, "chosen twice");
    if (d.slot[r] < -1 || (!d.dropless && d.slot[r] >= d.capacity)) return RouteError(d, token, j, "no such slot");
    if (d.slot[r] >= 0 && !d.is_active(token)) return RouteError(d, token, j, "a masked token has a slot");
    if (!std::isfinite(d.weight[r]) || (d.slot[r] < 0 && d.weight[r] != 0)) {
      return RouteError(d, token, j, "bad weight");
    }
  }
  return absl::OkStatus();
}

// Slots of every expert are 0, 1, 2, ... in order of (class, token).
absl::Status CheckSlots(const RoutingDecision& d) {
  std::vector<int64_t> next(d.num_experts, 0);
  for (int32_t c = 0; c < d.slot_classes; ++c) {
    const int first = d.slot_classes > 1 ? c : 0;
    const int last = d.slot_classes > 1 ? c + 1 : d.top_k;
    for (int64_t token = 0; token < d.num_tokens; ++token) {
      for (int j = first; j < last; ++j) {
        const int64_t r = token * d.top_k + j;
        if (d.slot[r] < 0) continue;
        if (d.slot[r] != next[d.expert[r]]++) return RouteError(d, token, j, "slots of the expert are not in order");
      }
    }
  }
  for (int e = 0; e < d.num_experts; ++e) {
    if (next[e] != d.kept[e] || d.kept[e] > d.assigned[e]) {
      return absl::InternalError(absl::StrCat("expert ", e, ": ", next[e], " slots taken, ", d.kept[e],
                                              " counted as kept, ", d.assigned[e], " assigned"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

int64_t RoutingDecision::num_kept() const { return std::accumulate(kept.begin(), kept.end(), int64_t{0}); }

absl::Status RoutingDecision::Validate() const {
  EK_RETURN_IF_ERROR(CheckExtents(*this));
  for (int64_t token = 0; token < num_tokens; ++token) EK_RETURN_IF_ERROR(CheckToken(*this, token));
  return CheckSlots(*this);
}

uint64_t RoutingDecision::Digest() const {
  const int64_t extents[] = {num_tokens, num_experts, top_k, dropless, capacity, slot_classes};
  uint64_t digest = Digest64(extents, sizeof(extents));
  digest = CombineDigests(digest, Digest64(expert.data(), expert.size() * sizeof(int32_t)));
  digest = CombineDigests(digest, Digest64(slot.data(), slot.size() * sizeof(int32_t)));
  return CombineDigests(digest, Digest64(weight.data(), weight.size() * sizeof(float)));
}

uint64_t RoutingDecision::TokenDigest(int64_t token) const {
  const int64_t r = token * top_k;
  uint64_t digest = Digest64(&expert[r], top_k * sizeof(int32_t));
  digest = CombineDigests(digest, Digest64(&slot[r], top_k * sizeof(int32_t)));
  return CombineDigests(digest, Digest64(&weight[r], top_k * sizeof(float)));
}

}  // namespace evenkeel::moe
