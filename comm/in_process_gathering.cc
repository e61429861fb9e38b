#include "evenkeel/comm/in_process_gathering.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::comm {

std::string GroupText(const Group& group) {
  return absl::StrCat(group.name.empty() ? AxisName(group.axis) : absl::string_view(group.name), " [",
                      absl::StrJoin(group.ranks, ","), "]");
}

std::vector<int> Gathering::Missing() const {
  std::vector<int> missing;
  for (int i = 0; i < group.size(); ++i) {
    if (!joined[i]) missing.push_back(group.ranks[i]);
  }
  return missing;
}

absl::Status GatheringError(const Gathering& gathering, int rank, absl::Duration limit) {
  ErrorContext context =
      CallContext(gathering.group, -1, gathering.group.IndexOf(rank), {.operation = Operation::kCreateGroup});
  context.sequence = -1;
  context.findings = gathering.findings;
  context.next_step = "all members, and only they, create the group with the same list of ranks";
  if (gathering.elapsed > absl::ZeroDuration()) {
    context.elapsed = gathering.elapsed;
    context.limit = limit;
  }
  return MakeError(gathering.code, context, gathering.what);
}

std::shared_ptr<Gathering> Gatherings::Join(const Group& group, int rank) {
  const int index = group.IndexOf(rank);
  auto found = std::find_if(pending_.begin(), pending_.end(), [&group, index](const auto& other) {
    return other->group == group && !other->joined[index];
  });
  if (found == pending_.end()) found = pending_.insert(found, std::make_shared<Gathering>(group));
  (*found)->joined[index] = true;
  ++(*found)->num_joined;
  return *found;
}

// A rank that waits for `rank` in another group than the one `rank` makes with it will wait for ever.
bool Gatherings::RefuseConflicts(const Group& group, int rank) {
  const std::vector<std::shared_ptr<Gathering>> pending = pending_;
  for (const auto& gathering : pending) {
    if (gathering->group == group || gathering->group.IndexOf(rank) < 0) continue;
    for (int i = 0; i < gathering->group.size(); ++i) {
      if (!gathering->joined[i] || group.IndexOf(gathering->group.ranks[i]) < 0) continue;
      End(gathering.get(), absl::StatusCode::kFailedPrecondition, "the members disagree about the group",
          {{i, absl::StrCat("makes ", GroupText(gathering->group))},
           {gathering->group.IndexOf(rank), absl::StrCat("makes ", GroupText(group))}});
      break;
    }
  }
  return pending_.size() != pending.size();
}

void Gatherings::End(Gathering* gathering, absl::StatusCode code, std::string what, std::vector<RankFinding> findings) {
  if (gathering->done) return;
  gathering->done = true;
  gathering->code = code;
  gathering->what = std::move(what);
  gathering->findings = std::move(findings);
  gathering->changed.SignalAll();
  const auto found = std::find_if(pending_.begin(), pending_.end(),
                                  [gathering](const auto& other) { return other.get() == gathering; });
  if (found != pending_.end()) pending_.erase(found);
}

void Gatherings::CheckLeft(Gathering* gathering, HasLeft has_left) {
  std::vector<RankFinding> gone;
  for (const int rank : gathering->Missing()) {
    if (has_left(rank)) gone.push_back({gathering->group.IndexOf(rank), "has left"});
  }
  if (!gone.empty()) End(gathering, absl::StatusCode::kUnavailable, "a rank is gone", std::move(gone));
}

void Gatherings::CheckAllLeft(HasLeft has_left) {
  const std::vector<std::shared_ptr<Gathering>> pending = pending_;  // those that end are taken out
  for (const auto& gathering : pending) CheckLeft(gathering.get(), has_left);
}

}  // namespace evenkeel::comm
