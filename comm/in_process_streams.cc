#include "evenkeel/comm/in_process_streams.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {
namespace {

// Whose call the calling thread is in.
struct Running {
  const StreamDeadlocks* world = nullptr;
  const Stream* stream = nullptr;
};
thread_local Running t_running;

}  // namespace

void StreamDeadlocks::Issued(const QueuedCall& call, const Stream* stream) {
  absl::MutexLock lock(&mutex_);
  queued_[call] = stream;
  // It may be what another sleeper waits for: the cycle then goes through this stream.
  Look(stream);
}

void StreamDeadlocks::Began(const QueuedCall& call, const Stream* stream) {
  t_running = {this, stream};
  absl::MutexLock lock(&mutex_);
  queued_.erase(call);
}

void StreamDeadlocks::Ended(const QueuedCall& call) {
  t_running = Running();
  absl::MutexLock lock(&mutex_);
  queued_.erase(call);
}

Rendezvous::Outcome StreamDeadlocks::Sleep(InProcessGroup* group, uint64_t phase, const Call& call, int world_rank,
                                           int64_t until_ns) {
  const Running running = t_running;
  if (running.world != this) return group->rendezvous().Wait(phase, until_ns);
  {
    absl::MutexLock lock(&mutex_);
    sleepers_[running.stream] = {.group = group,
                                 .phase = phase,
                                 .operation = call.operation,
                                 .sequence = call.sequence,
                                 .world_rank = world_rank};
    Look(running.stream);
  }
  const Rendezvous::Outcome outcome = group->rendezvous().Wait(phase, until_ns);
  absl::MutexLock lock(&mutex_);
  sleepers_.erase(running.stream);
  return outcome;
}

std::string StreamDeadlocks::TextOf(const Stream* stream) const {
  const Sleeper& sleeper = sleepers_.at(stream);
  const Group& group = sleeper.group->group();
  return absl::StrCat("waits in ", OperationName(sleeper.operation), " of group ", group.name, " [",
                      absl::StrJoin(group.ranks, ","), "] epoch=", sleeper.group->epoch(), " seq=", sleeper.sequence,
                      " on stream ", stream->name());
}

std::vector<StreamDeadlocks::Edge> StreamDeadlocks::EdgesOf(const Sleeper& sleeper) const {
  InProcessGroup& group = *sleeper.group;
  Rendezvous::Outcome outcome = Rendezvous::Outcome::kTimeout;
  if (group.rendezvous().IsOver(sleeper.phase, &outcome)) return {};
  std::vector<Edge> edges;
  for (const int absent : group.rendezvous().Absent(sleeper.phase)) {
    QueuedCall awaited{.epoch = group.epoch(), .rank = group.OuterRank(absent), .sequence = sleeper.sequence};
    if (group.is_pair()) {
      awaited.low = group.OuterRank(0);
      awaited.high = group.OuterRank(1);
    }
    const auto found = queued_.find(awaited);
    if (found != queued_.end() && sleepers_.count(found->second) > 0) edges.push_back({found->second, absent});
  }
  return edges;
}

void StreamDeadlocks::Look(const Stream* stream) {
  if (sleepers_.count(stream) == 0) return;
  std::vector<Step> path;
  std::vector<const Stream*> seen;
  if (FindCycle(stream, stream, &path, &seen)) Report(path);
}

bool StreamDeadlocks::FindCycle(const Stream* from, const Stream* goal, std::vector<Step>* path,
                                std::vector<const Stream*>* seen) const {
  seen->push_back(from);
  for (const Edge& edge : EdgesOf(sleepers_.at(from))) {
    path->push_back({from, edge.index});
    if (edge.to == goal) return true;
    const bool is_new = std::find(seen->begin(), seen->end(), edge.to) == seen->end();
    if (is_new && FindCycle(edge.to, goal, path, seen)) return true;
    path->pop_back();
  }
  return false;
}

void StreamDeadlocks::Report(const std::vector<Step>& cycle) {
  std::string what = "deadlock, each of these streams waits for the next: ";
  for (const Step& step : cycle) {
    const Sleeper& sleeper = sleepers_.at(step.stream);
    absl::StrAppend(&what, step.stream == cycle.front().stream ? "" : ", ", "world rank ", sleeper.world_rank, " ",
                    TextOf(step.stream), " for world rank ", sleeper.group->group().ranks[step.index]);
  }
  for (size_t i = 0; i < cycle.size(); ++i) {
    const Sleeper& sleeper = sleepers_.at(cycle[i].stream);
    const Stream* const next = cycle[(i + 1) % cycle.size()].stream;
    sleeper.group->ReportDeadlock(sleeper.phase, what, {{sleeper.group->OuterRank(cycle[i].index), TextOf(next)}});
  }
  for (const Step& step : cycle) sleepers_.at(step.stream).group->rendezvous().WakeAll();
}

}  // namespace evenkeel::comm
