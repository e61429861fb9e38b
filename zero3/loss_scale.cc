#include "evenkeel/zero3/loss_scale.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::zero3 {
namespace {

bool IsPowerOfTwo(double x) {
  int exponent = 0;
  return std::isfinite(x) && x > 0 && std::frexp(x, &exponent) == 0.5;
}

absl::Status Bad(absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "loss scale options";
  return MakeError(absl::StatusCode::kInvalidArgument, where, what);
}

}  // namespace

absl::Status ValidateLossScaleOptions(const LossScaleOptions& options) {
  for (double x : {options.initial, options.growth, options.backoff, options.minimum, options.maximum}) {
    if (!IsPowerOfTwo(x)) return Bad(absl::StrCat(x, " is not a power of two"));
  }
  if (options.backoff >= 1 || options.growth <= 1) {
    return Bad(absl::StrCat("backoff ", options.backoff, " must be below 1, growth ", options.growth, " above"));
  }
  if (options.initial < options.minimum || options.initial > options.maximum) {
    return Bad(absl::StrCat("initial ", options.initial, " is not in [", options.minimum, ", ", options.maximum, "]"));
  }
  if (options.growth_interval < 1) return Bad(absl::StrCat("growth_interval ", options.growth_interval, " < 1"));
  return absl::OkStatus();
}

void LossScale::Stepped() {
  if (!enabled_ || !options_.dynamic || ++good_steps_ < options_.growth_interval) return;
  good_steps_ = 0;
  scale_ = std::min(options_.maximum, scale_ * options_.growth);
}

bool LossScale::Skipped() {
  if (!enabled_ || !options_.dynamic) return true;
  good_steps_ = 0;
  if (scale_ <= options_.minimum) return false;
  scale_ = std::max(options_.minimum, scale_ * options_.backoff);
  return true;
}

void LossScale::Restore(double scale, int good_steps) {
  if (!enabled_) return;
  scale_ = scale;
  good_steps_ = good_steps;
}

}  // namespace evenkeel::zero3
