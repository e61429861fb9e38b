#include "evenkeel/moe/router_config.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

absl::Status Bad(const RouterConfig& config, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("router of layer \"", config.layer, "\": ", what));
}

absl::Status CheckGroups(const RouterConfig& config) {
  if (config.groups < 1 || config.groups_kept < 1 || config.groups_kept > config.groups ||
      config.experts % config.groups != 0) {
    return Bad(config, absl::StrCat("cannot keep ", config.groups_kept, " of ", config.groups, " groups of ",
                                    config.experts, " experts"));
  }
  const int group_size = config.experts / config.groups;
  if (config.top_k > config.groups_kept * group_size) {
    return Bad(config, absl::StrCat("k ", config.top_k, " exceeds the ", config.groups_kept * group_size,
                                    " experts of the groups kept (", config.groups_kept, " of ", group_size, ")"));
  }
  if (config.groups > 1 && config.group_score == GroupScore::kTopTwoSum && group_size < 2) {
    return Bad(config, absl::StrCat("groups of ", group_size, " expert have no two best ones"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RouterConfig::Validate() const {
  if (hidden < 1 || experts < 1) {
    return Bad(*this, absl::StrCat("hidden size ", hidden, " and ", experts, " experts must be at least 1"));
  }
  if (top_k < 1 || top_k > experts) {
    return Bad(*this, absl::StrCat("k ", top_k, " must be between 1 and the number of experts, ", experts));
  }
  if (!(jitter >= 0 && jitter < 1)) return Bad(*this, absl::StrCat("jitter ", jitter, " must be in [0, 1)"));
  if (!(route_scale > 0 && route_scale <= std::numeric_limits<float>::max())) {
    return Bad(*this, absl::StrCat("route scale ", route_scale, " must be positive and fit f32"));
  }
  if (capacity.min_capacity < 0) return Bad(*this, absl::StrCat("minimum capacity ", capacity.min_capacity));
  if (capacity.mode == CapacityMode::kFactor && capacity.factor.is_zero()) {
    return Bad(*this, "a capacity factor of 0 has no slots; choose dropless or no-drop instead");
  }
  if (kind == kExpertChoice && capacity.mode != CapacityMode::kFactor) {
    return Bad(*this, "expert choice needs a capacity factor: it says how many tokens each expert takes");
  }
  return CheckGroups(*this);
}

DropPolicy RouterConfig::effective_drop() const {
  if (drop != DropPolicy::kByTopK) return drop;
  if (top_k == 1 || kind == kExpertChoice) return DropPolicy::kPosition;
  return top_k == 2 ? DropPolicy::kChoiceThenPosition : DropPolicy::kProbs;
}

WeightNormalization RouterConfig::effective_normalization() const {
  if (normalization != WeightNormalization::kByTopK) return normalization;
  return top_k == 1 || kind == kExpertChoice ? WeightNormalization::kNone : WeightNormalization::kOverKept;
}

BalanceChoices RouterConfig::effective_balance() const {
  if (balance != BalanceChoices::kByTopK) return balance;
  return top_k <= 2 && kind != kExpertChoice ? BalanceChoices::kFirst : BalanceChoices::kAll;
}

}  // namespace evenkeel::moe
