#include "evenkeel/testing/bitwise_judge.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/testing/tensor_difference.h"

namespace evenkeel::testutil {
namespace {

// Parameters of a step come behind everything else of it: they are what the step left.
constexpr int64_t kBehindAll = int64_t{1} << 40;

}  // namespace

std::string TapText(TapKind kind, absl::string_view name) {
  return name.empty() ? std::string(TapKindName(kind)) : absl::StrCat(TapKindName(kind), " ", name);
}

void StepRecord::Add(const Tap& tap) {
  const auto* bytes = static_cast<const std::byte*>(tap.value.raw());
  entries_.push_back({tap.kind, std::string(tap.name), tap.value.dtype(), tap.value.shape(),
                      std::vector<std::byte>(bytes, bytes + tap.value.num_bytes())});
}

void BitwiseJudge::StartStep(int64_t step, const StepRecord* record) {
  step_ = step;
  record_ = record;
  next_ = 0;
}

void BitwiseJudge::See(const Tap& tap) {
  const int64_t place = static_cast<int64_t>(next_);
  const bool initial = tap.kind == TapKind::kParameter && step_ == 0;
  FirstDifference found;
  found.step = step_;
  found.tensor = initial ? "initial " : "";
  found.tensor += TapText(tap.kind, tap.name);
  found.rank = rank_;
  const auto& entries = record_->entries();
  const StepRecord::Entry* wanted = next_ < entries.size() ? &entries[next_] : nullptr;
  ++next_;
  if (wanted == nullptr || wanted->kind != tap.kind || wanted->name != tap.name) {
    found.tensor += wanted == nullptr
                        ? " (the reference shows no more)"
                        : absl::StrCat(" (the reference shows ", TapText(wanted->kind, wanted->name), ")");
    found.index = -1;
    finding_.max_abs_diff = std::numeric_limits<double>::infinity();
    finding_.Add(place, std::move(found));
    return;
  }
  finding_.values_compared += tap.value.num_elements();
  const std::optional<TensorDifference> difference = CompareBits(wanted->view(), tap.value);
  if (!difference.has_value()) return;
  finding_.max_abs_diff = std::max(finding_.max_abs_diff, difference->max_abs_diff);
  found.index = difference->index;
  found.reference = difference->reference;
  found.candidate = difference->candidate;
  found.ulps = difference->ulps;
  const bool left_by_last_step = tap.kind == TapKind::kParameter && !initial;
  if (left_by_last_step) --found.step;
  finding_.Add(left_by_last_step ? kBehindAll + place : place, std::move(found));
}

void BitwiseJudge::EndStep() {
  if (next_ >= record_->entries().size()) return;
  const StepRecord::Entry& missing = record_->entries()[next_];
  FirstDifference found;
  found.step = step_;
  found.tensor = absl::StrCat(TapText(missing.kind, missing.name), " (the candidate does not show it)");
  found.rank = rank_;
  found.index = -1;
  finding_.max_abs_diff = std::numeric_limits<double>::infinity();
  finding_.Add(static_cast<int64_t>(next_), std::move(found));
}

}  // namespace evenkeel::testutil
