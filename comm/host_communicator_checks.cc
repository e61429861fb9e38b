// What is refused before there is a communicator.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/comm/host_communicator.h"

namespace evenkeel::comm {
namespace {

constexpr absl::Duration kMaxDeadline = absl::Hours(24);

}  // namespace

absl::Status CheckGroup(const Group& group, int world_rank, int world_size) {
  const auto text = [&group] { return absl::StrCat("group ", group.name, " [", absl::StrJoin(group.ranks, ","), "]"); };
  if (group.ranks.empty()) return absl::InvalidArgumentError(absl::StrCat(text(), " has no ranks"));
  std::vector<int> sorted = group.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front() < 0 || sorted.back() >= world_size) {
    return absl::InvalidArgumentError(absl::StrCat(text(), " has a rank outside [0, ", world_size, ")"));
  }
  const auto doubled = std::adjacent_find(sorted.begin(), sorted.end());
  if (doubled != sorted.end()) {
    return absl::InvalidArgumentError(absl::StrCat(text(), " lists rank ", *doubled, " twice"));
  }
  if (group.IndexOf(world_rank) < 0) {
    return absl::InvalidArgumentError(absl::StrCat(text(), " does not hold rank ", world_rank));
  }
  return absl::OkStatus();
}

absl::Status CheckDeadline(absl::Duration deadline) {
  if (deadline > absl::ZeroDuration() && deadline <= kMaxDeadline) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("deadline ", absl::FormatDuration(deadline), " is not in (0, ",
                                                 absl::FormatDuration(kMaxDeadline), "]"));
}

}  // namespace evenkeel::comm
