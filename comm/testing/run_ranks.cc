#include "evenkeel/comm/testing/run_ranks.h"

#include <numeric>

namespace evenkeel::comm {

Group WorldGroup(int size) {
  Group group{.axis = Axis::kWorld, .name = "world", .ranks = std::vector<int>(size)};
  std::iota(group.ranks.begin(), group.ranks.end(), 0);
  return group;
}

std::vector<absl::Status> RunRanks(InProcessWorld& world, const std::function<absl::Status(Backend&)>& body) {
  return world.Run(body);
}

absl::Status FirstFailure(const std::vector<absl::Status>& statuses) {
  absl::Status echo;
  for (const absl::Status& status : statuses) {
    if (status.ok()) continue;
    if (status.code() != absl::StatusCode::kAborted) return status;
    if (echo.ok()) echo = status;
  }
  return echo;
}

}  // namespace evenkeel::comm
