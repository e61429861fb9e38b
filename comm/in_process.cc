#include "evenkeel/comm/in_process.h"

#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/in_process_deadlock.h"
#include "evenkeel/comm/in_process_gathering.h"
#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/in_process_streams.h"
#include "evenkeel/comm/in_process_transport.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class World;

class InProcessBackend final : public Backend {
 public:
  InProcessBackend(World* world, int rank) : world_(world), rank_(rank) {}
  absl::string_view name() const override { return "in_process"; }
  int rank() const override { return rank_; }
  int size() const override;
  const Topology& topology() const override;
  ByteLedger& ledger() override { return ledger_; }
  absl::StatusOr<std::unique_ptr<Communicator>> CreateGroup(const Group& group) override;

 private:
  World* const world_;
  const int rank_;
  ByteLedger ledger_;
};

class World final : public InProcessWorld, public InProcessHost {
 public:
  World(const InProcessOptions& options, Topology topology)
      : options_(options), topology_(std::move(topology)), seats_(options.world_size) {
    const int processors = static_cast<int>(std::thread::hardware_concurrency());
    wait_ = {.wait_ns = absl::ToInt64Nanoseconds(options.spin), .yields = options.world_size > processors};
    num_running_.store(options.world_size);
    for (int rank = 0; rank < options.world_size; ++rank) {
      backends_.push_back(std::make_unique<InProcessBackend>(this, rank));
    }
  }

  int size() const override { return options_.world_size; }
  const Topology& topology() const override { return topology_; }
  Backend& backend(int rank) override {
    EK_CHECK(rank >= 0 && rank < size());
    return *backends_[rank];
  }
  const InProcessOptions& options() const { return options_; }
  StreamDeadlocks* streams() { return &streams_; }

  void EnterRank(int rank) override;
  void LeaveRank(int rank) override;
  void AdmitAll() override;
  std::vector<absl::Status> Run(const std::function<absl::Status(Backend&)>& body) override;

  absl::StatusOr<std::shared_ptr<InProcessGroup>> Gather(const Group& group, int rank);
  int64_t NextEpoch() {
    absl::MutexLock lock(&mutex_);
    return ++last_epoch_;
  }
  // The group's memory stays while anybody may look at it: gives up one reference under the world's lock.
  void Release(std::shared_ptr<InProcessGroup> group) override;
  Rendezvous::Outcome Sleep(InProcessGroup* group, uint64_t phase, const Call& call, int rank,
                            int64_t until_ns) override;

 private:
  void LookForDeadlock(int num_running) {
    if (num_running > 0) return;
    absl::MutexLock lock(&mutex_);
    FindDeadlock();
  }
  void FindDeadlock() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitGathering(Gathering* gathering, int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const InProcessOptions options_;
  const Topology topology_;
  WaitPolicy wait_;
  std::vector<std::unique_ptr<InProcessBackend>> backends_;
  std::vector<Seat> seats_;
  StreamDeadlocks streams_;
  // Ranks that are not known to be asleep: not entered, or entered and running.
  std::atomic<int> num_running_{0};
  // Counts every falling asleep and waking up.
  std::atomic<uint64_t> num_moves_{0};
  absl::Mutex mutex_;
  int64_t last_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  Gatherings gatherings_ ABSL_GUARDED_BY(mutex_);
  std::map<InProcessGroup*, std::weak_ptr<InProcessGroup>> groups_ ABSL_GUARDED_BY(mutex_);
};

// Which rank of which world the calling thread has entered.
struct Entered {
  const World* world = nullptr;
  int rank = -1;
};
thread_local Entered t_entered;

int InProcessBackend::size() const { return world_->size(); }
const Topology& InProcessBackend::topology() const { return world_->topology(); }

absl::StatusOr<std::unique_ptr<Communicator>> InProcessBackend::CreateGroup(const Group& group) {
  EK_RETURN_IF_ERROR(CheckGroup(group, rank_, size()));
  HostCommunicator::Options options{.group = group,
                                    .rank = group.IndexOf(rank_),
                                    .ledger = &ledger_,
                                    .topology = &world_->topology(),
                                    .deadline = world_->options().deadline,
                                    .two_level = world_->options().two_level,
                                    .scratch = world_->options().scratch,
                                    .stragglers = world_->options().stragglers,
                                    .watch = world_->streams()};
  std::unique_ptr<Transport> transport;
  if (group.size() == 1) {
    options.epoch = world_->NextEpoch();
  } else {
    EK_ASSIGN_OR_RETURN(std::shared_ptr<InProcessGroup> shared, world_->Gather(group, rank_));
    options.epoch = shared->epoch();
    transport = CreateInProcessTransport(world_, std::move(shared), options.rank, rank_, world_->options().before_copy);
  }
  return HostCommunicator::Create(std::move(options), std::move(transport));
}

void World::EnterRank(int rank) {
  EK_CHECK(rank >= 0 && rank < size());
  t_entered = {this, rank};
  absl::MutexLock lock(&mutex_);
  seats_[rank].entered = true;
}

void World::LeaveRank(int rank) {
  EK_CHECK(rank >= 0 && rank < size());
  std::vector<std::shared_ptr<InProcessGroup>> groups;
  {
    absl::MutexLock lock(&mutex_);
    Seat& seat = seats_[rank];
    seat.entered = false;
    if (!std::exchange(seat.left, true)) num_running_.fetch_sub(1, std::memory_order_seq_cst);
    for (const auto& [key, weak] : groups_) {
      std::shared_ptr<InProcessGroup> group = weak.lock();
      if (group != nullptr && group->group().IndexOf(rank) >= 0) groups.push_back(std::move(group));
    }
    gatherings_.CheckAllLeft([this](int other) { return seats_[other].left; });
  }
  if (t_entered.world == this && t_entered.rank == rank) t_entered = Entered();
  for (std::shared_ptr<InProcessGroup>& group : groups) {
    group->Depart(group->group().IndexOf(rank));
    Release(std::move(group));
  }
  LookForDeadlock(num_running_.load(std::memory_order_seq_cst));
}

void World::AdmitAll() {
  absl::MutexLock lock(&mutex_);
  for (Seat& seat : seats_) {
    if (std::exchange(seat.left, false)) num_running_.fetch_add(1, std::memory_order_seq_cst);
  }
}

std::vector<absl::Status> World::Run(const std::function<absl::Status(Backend&)>& body) {
  AdmitAll();
  std::vector<absl::Status> statuses(size());
  std::vector<std::thread> threads;
  threads.reserve(size());
  for (int rank = 0; rank < size(); ++rank) {
    threads.emplace_back([this, &body, &statuses, rank] {
      EnterRank(rank);
      statuses[rank] = body(backend(rank));
      LeaveRank(rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

void World::Release(std::shared_ptr<InProcessGroup> group) {
  absl::MutexLock lock(&mutex_);
  InProcessGroup* const key = group.get();
  group.reset();
  const auto found = groups_.find(key);
  if (found != groups_.end() && found->second.expired()) groups_.erase(found);
}

Rendezvous::Outcome World::Sleep(InProcessGroup* group, uint64_t phase, const Call& call, int rank, int64_t until_ns) {
  if (t_entered.world != this || t_entered.rank != rank) return streams_.Sleep(group, phase, call, rank, until_ns);
  Seat& seat = seats_[rank];
  seat.phase.store(phase, std::memory_order_relaxed);
  seat.operation.store(static_cast<int>(call.operation), std::memory_order_relaxed);
  seat.sequence.store(call.sequence, std::memory_order_relaxed);
  num_moves_.fetch_add(1, std::memory_order_seq_cst);
  seat.group.store(group, std::memory_order_seq_cst);
  LookForDeadlock(num_running_.fetch_sub(1, std::memory_order_seq_cst) - 1);
  const Rendezvous::Outcome outcome = group->rendezvous().Wait(phase, until_ns);
  num_moves_.fetch_add(1, std::memory_order_seq_cst);
  num_running_.fetch_add(1, std::memory_order_seq_cst);
  seat.group.store(nullptr, std::memory_order_seq_cst);
  return outcome;
}

// Called when nobody seems to run. A rank whose phase has completed or broken is about to wake up: then there is no
// deadlock. Groups stay alive while the mutex is held (see Release).
void World::FindDeadlock() {
  const uint64_t moves = num_moves_.load(std::memory_order_seq_cst);
  std::map<int, Sleeper> sleepers;  // by world rank
  for (int rank = 0; rank < size(); ++rank) {
    if (seats_[rank].left) continue;
    std::optional<Sleeper> sleeper = LookAt(seats_[rank]);
    if (!sleeper.has_value()) return;
    sleepers.emplace(rank, *std::move(sleeper));
  }
  // A rank that moved while the seats were read may have been seen before and after: no picture of one moment. Who
  // falls asleep last looks again.
  if (sleepers.empty() || num_moves_.load(std::memory_order_seq_cst) != moves) return;
  ReportDeadlock(sleepers, &gatherings_);
}

void World::AwaitGathering(Gathering* gathering, int rank) {
  const int64_t start_ns = MonotonicNs();
  const bool entered = t_entered.world == this && t_entered.rank == rank;
  if (entered && !gathering->done) {
    seats_[rank].gathering = gathering;
    if (num_running_.fetch_sub(1, std::memory_order_seq_cst) == 1) FindDeadlock();
  }
  while (!gathering->done) {
    const absl::Duration elapsed = absl::Nanoseconds(MonotonicNs() - start_ns);
    if (elapsed < options_.deadline) {
      gathering->changed.WaitWithTimeout(&mutex_, options_.deadline - elapsed);
      continue;
    }
    std::vector<RankFinding> missing;
    for (const int other : gathering->Missing()) {
      missing.push_back({gathering->group.IndexOf(other), absl::StrCat("(world rank ", other, ") has not come")});
    }
    gathering->elapsed = elapsed;
    gatherings_.End(gathering, absl::StatusCode::kDeadlineExceeded, "not all members came", std::move(missing));
  }
  if (seats_[rank].gathering == gathering && entered) {
    num_running_.fetch_add(1, std::memory_order_seq_cst);
    num_moves_.fetch_add(1, std::memory_order_seq_cst);
    seats_[rank].gathering = nullptr;
  }
}

absl::StatusOr<std::shared_ptr<InProcessGroup>> World::Gather(const Group& group, int rank) {
  absl::MutexLock lock(&mutex_);
  const bool conflict = gatherings_.RefuseConflicts(group, rank);
  const std::shared_ptr<Gathering> gathering = gatherings_.Join(group, rank);
  if (conflict) {
    gatherings_.End(
        gathering.get(), absl::StatusCode::kFailedPrecondition, "the members disagree about the group",
        {{group.IndexOf(rank), absl::StrCat("makes ", GroupText(group), ", others another group with it")}});
  } else if (gathering->num_joined == group.size()) {
    gathering->result =
        std::make_shared<InProcessGroup>(group, ++last_epoch_, wait_, options_.eager_bytes, options_.scratch);
    groups_[gathering->result.get()] = gathering->result;
    gatherings_.End(gathering.get(), absl::StatusCode::kOk, "", {});
  } else {
    gatherings_.CheckLeft(gathering.get(), [this](int other) { return seats_[other].left; });
  }
  AwaitGathering(gathering.get(), rank);
  if (gathering->code == absl::StatusCode::kOk) return gathering->result;
  return GatheringError(*gathering, rank, options_.deadline);
}

}  // namespace

absl::StatusOr<std::unique_ptr<InProcessWorld>> InProcessWorld::Create(const InProcessOptions& options) {
  if (options.world_size < 1 || options.world_size > 4096) {
    return absl::InvalidArgumentError(absl::StrCat("world_size ", options.world_size, " is not in [1, 4096]"));
  }
  EK_RETURN_IF_ERROR(CheckDeadline(options.deadline));
  if (options.eager_bytes < 0 || options.eager_bytes > (1 << 20)) {
    return absl::InvalidArgumentError(absl::StrCat("eager_bytes ", options.eager_bytes, " is not in [0, 1 MiB]"));
  }
  if (options.spin < absl::ZeroDuration() || options.spin > absl::Milliseconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("spin ", absl::FormatDuration(options.spin), " is not in [0, 1 ms]"));
  }
  Topology topology = options.topology.value_or(Topology::SingleNode(options.world_size));
  if (topology.world_size() != options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the topology has ", topology.world_size(), " ranks, the world ", options.world_size));
  }
  return std::make_unique<World>(options, std::move(topology));
}

}  // namespace evenkeel::comm
