#include "evenkeel/comm/stragglers.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::comm {
namespace {

bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

std::string DescribeStragglers(const StragglerReport& report) {
  const ErrorContext& where = report.where;
  return absl::StrCat(where.module, " ", where.operation, " group=", where.group, " epoch=", where.epoch,
                      " seq=", where.sequence, " rank=", where.rank, "/", where.size, ": waited ",
                      absl::FormatDuration(report.waited), " of ", absl::FormatDuration(where.limit),
                      report.late.size() == 1 ? " for rank " : " for ranks ", absl::StrJoin(report.late, ","));
}

Stragglers::Stragglers(std::vector<int> world_ranks, StragglerOptions options)
    : world_ranks_(std::move(world_ranks)), options_(std::move(options)), counts_(world_ranks_.size()) {}

absl::Duration Stragglers::After(absl::Duration limit) const { return std::min(options_.after, limit / 4); }

void Stragglers::Note(const ErrorContext& where, absl::Span<const int> late, absl::Duration waited) {
  if (late.empty()) return;
  bool is_new = false;
  int first_in_time = 0;
  {
    absl::MutexLock lock(&mutex_);
    for (const int rank : late) {
      StragglerCount& count = counts_[rank];
      ++count.calls;
      count.total += waited;
      count.longest = std::max(count.longest, waited);
      is_new = is_new || IsPowerOfTwo(count.calls);
    }
  }
  while (std::find(late.begin(), late.end(), first_in_time) != late.end()) ++first_in_time;
  if (first_in_time != where.rank) return;
  StragglerReport report{.where = where, .late = {late.begin(), late.end()}, .late_world = {}, .waited = waited};
  for (const int rank : late) report.late_world.push_back(world_ranks_[rank]);
  if (options_.count != nullptr) options_.count(report);
  if (!is_new) return;
  if (options_.report != nullptr) return options_.report(report);
  std::fprintf(stderr, "%s\n", DescribeStragglers(report).c_str());
}

std::vector<StragglerCount> Stragglers::counts() const {
  absl::MutexLock lock(&mutex_);
  return counts_;
}

std::string DescribeStragglerCounts(absl::Span<const StragglerCount> counts) {
  std::vector<std::string> parts;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    const StragglerCount& count = counts[rank];
    if (count.calls == 0) continue;
    parts.push_back(absl::StrCat("rank ", rank, " was late in ", count.calls, count.calls == 1 ? " call (" : " calls (",
                                 absl::FormatDuration(count.total), " in all, ", absl::FormatDuration(count.longest),
                                 " at most)"));
  }
  return absl::StrJoin(parts, "; ");
}

}  // namespace evenkeel::comm
