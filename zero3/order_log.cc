#include "evenkeel/zero3/order_log.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::zero3 {
namespace {

// Calls shown in front of the first difference and from it on.
constexpr size_t kCallsBefore = 3;
constexpr size_t kCallsShown = 16;

std::string CallText(int64_t word, absl::Span<const std::string> unit_names) {
  const int64_t unit = word / 2;
  const char* verb = word % 2 == static_cast<int64_t>(OrderLog::Call::kGather) ? "gather " : "reduce ";
  const bool known = unit >= 0 && unit < static_cast<int64_t>(unit_names.size());
  return known ? absl::StrCat(verb, unit_names[static_cast<size_t>(unit)]) : absl::StrCat(verb, "unit ", unit);
}

std::string ListText(const std::vector<int64_t>& list, size_t difference, absl::Span<const std::string> unit_names) {
  const size_t begin = difference - std::min(difference, kCallsBefore);
  const size_t end = std::min(list.size(), begin + kCallsShown);
  std::string text = absl::StrCat(list.size(), " calls [", begin > 0 ? "..., " : "");
  for (size_t i = begin; i < end; ++i) {
    absl::StrAppend(&text, i == begin ? "" : ", ", CallText(list[i], unit_names));
  }
  return absl::StrCat(text, end < list.size() ? ", ...]" : "]");
}

}  // namespace

void OrderLog::Add(Call call, int unit) {
  const int64_t word = 2 * static_cast<int64_t>(unit) + static_cast<int64_t>(call);
  digest_ = CombineDigests(digest_, static_cast<uint64_t>(word));
  calls_.push_back(word);
}

std::vector<RankFinding> CompareOrders(const std::vector<std::vector<int64_t>>& lists,
                                       absl::Span<const std::string> unit_names) {
  std::vector<RankFinding> findings;
  if (lists.empty()) return findings;
  const auto votes = [&lists](const std::vector<int64_t>& list) {
    return std::count(lists.begin(), lists.end(), list);
  };
  const std::vector<int64_t>* common = &lists[0];
  for (const std::vector<int64_t>& list : lists) {
    if (votes(list) > votes(*common)) common = &list;
  }
  for (size_t r = 0; r < lists.size(); ++r) {
    const std::vector<int64_t>& list = lists[r];
    if (list == *common) continue;
    const size_t shorter = std::min(list.size(), common->size());
    const auto at = std::mismatch(list.begin(), list.begin() + static_cast<int64_t>(shorter), common->begin()).first;
    const size_t difference = static_cast<size_t>(at - list.begin());
    findings.push_back({static_cast<int>(r), absl::StrCat("has an order of its own from call ", difference, " on: ",
                                                          ListText(list, difference, unit_names), " where others have ",
                                                          ListText(*common, difference, unit_names))});
  }
  return findings;
}

}  // namespace evenkeel::zero3
