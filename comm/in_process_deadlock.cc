#include "evenkeel/comm/in_process_deadlock.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {
namespace {

// Follows the first awaited rank until one comes again.
std::string CycleText(const std::map<int, Sleeper>& sleepers) {
  std::vector<int> path;
  int rank = sleepers.begin()->first;
  while (sleepers.count(rank) > 0 && std::find(path.begin(), path.end(), rank) == path.end()) {
    path.push_back(rank);
    rank = sleepers.at(rank).waits_for.front();
  }
  path.erase(path.begin(), std::find(path.begin(), path.end(), rank));
  std::string text;
  for (const int member : path) {
    const Sleeper& sleeper = sleepers.at(member);
    absl::StrAppend(&text, text.empty() ? "" : ", ", "world rank ", member, " ", sleeper.text, " for world rank ",
                    sleeper.waits_for.front());
  }
  return text;
}

std::optional<Sleeper> LookInto(Gathering* gathering) {
  if (gathering->done) return std::nullopt;
  return Sleeper{.gathering = gathering,
                 .waits_for = gathering->Missing(),
                 .text = absl::StrCat("waits in create_group of ", GroupText(gathering->group))};
}

}  // namespace

int Sleeper::IndexOf(int world_rank) const {
  if (group == nullptr) return gathering->group.IndexOf(world_rank);
  return group->OuterRank(group->group().IndexOf(world_rank));
}

// Seats are read once: from the first broken group on, ranks wake up and change them.
std::optional<Sleeper> LookAt(const Seat& seat) {
  if (!seat.entered) return std::nullopt;
  if (seat.gathering != nullptr) return LookInto(seat.gathering);
  Sleeper sleeper;
  sleeper.group = seat.group.load(std::memory_order_seq_cst);
  if (sleeper.group == nullptr) return std::nullopt;
  sleeper.phase = seat.phase.load(std::memory_order_relaxed);
  Rendezvous::Outcome outcome = Rendezvous::Outcome::kTimeout;
  if (sleeper.group->rendezvous().IsOver(sleeper.phase, &outcome)) return std::nullopt;
  for (const int absent : sleeper.group->rendezvous().Absent(sleeper.phase)) {
    sleeper.waits_for.push_back(sleeper.group->group().ranks[absent]);
  }
  if (sleeper.waits_for.empty()) return std::nullopt;
  sleeper.text =
      absl::StrCat("waits in ", OperationName(static_cast<Operation>(seat.operation.load())), " of group ",
                   GroupText(sleeper.group->group()), " epoch=", sleeper.group->epoch(), " seq=", seat.sequence.load());
  return sleeper;
}

void ReportDeadlock(const std::map<int, Sleeper>& sleepers, Gatherings* gatherings) {
  const std::string what = absl::StrCat("deadlock, every rank of the process is blocked: ", CycleText(sleepers));
  for (const auto& [rank, sleeper] : sleepers) {
    std::vector<RankFinding> findings;
    for (const int other : sleeper.waits_for) {
      const auto found = sleepers.find(other);
      if (found != sleepers.end()) findings.push_back({sleeper.IndexOf(other), found->second.text});
    }
    if (sleeper.group != nullptr) {
      sleeper.group->ReportDeadlock(sleeper.phase, what, std::move(findings));
    } else {
      gatherings->End(sleeper.gathering, absl::StatusCode::kDeadlineExceeded, what, std::move(findings));
    }
  }
  for (const auto& [rank, sleeper] : sleepers) {
    if (sleeper.group != nullptr) sleeper.group->rendezvous().WakeAll();
  }
}

}  // namespace evenkeel::comm
