#include "evenkeel/comm/sim/sim_world.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/message/message_backend.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/sim/network.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr int kNobody = -1;

// Hands the one permission to run from thread to thread.
class Baton {
 public:
  explicit Baton(int num_ranks) : turns_(num_ranks + 1) {}

  // `who` may be kNobody: the thread that called Run.
  void Give(int who) {
    absl::MutexLock lock(&mutex_);
    holder_ = who;
    turns_[who + 1].Signal();
  }
  void Await(int who) {
    absl::MutexLock lock(&mutex_);
    while (holder_ != who) turns_[who + 1].Wait(&mutex_);
  }

 private:
  absl::Mutex mutex_;
  int holder_ ABSL_GUARDED_BY(mutex_) = kNobody;
  std::vector<absl::CondVar> turns_;
};

class World;

// One rank's end of the simulated network.
class SimWire final : public Wire {
 public:
  SimWire(World* world, int rank) : world_(world), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override;
  absl::Duration Now() override;
  absl::Status StartSend(int peer, int tag, const void* data, int64_t bytes, Transfer* transfer) override;
  absl::Status StartReceive(int peer, int tag, void* data, int64_t capacity, Transfer* transfer) override;
  absl::Status Test(absl::Span<Transfer* const> transfers) override;
  bool Cancel(Transfer* transfer) override;
  bool Pause(const PauseHint& hint) override;
  PeerHealth Health(int peer, bool describe) override;
  absl::Status status() const override;
  void Condemn(const absl::Status& cause) override;

 private:
  World* const world_;
  const int rank_;
};

enum class RankState : uint8_t { kReady, kWaiting, kStopped, kFinished };

struct RankSeat {
  std::unique_ptr<SimWire> wire;
  std::unique_ptr<MessageBackend> backend;
  std::thread::id thread;
  RankState state = RankState::kReady;
  absl::Duration until = absl::ZeroDuration();  // of kWaiting and kStopped
  bool dead = false;
  bool death_seen = false;
  absl::Duration died_at = absl::ZeroDuration();
  absl::Duration ended_at = absl::ZeroDuration();
  int64_t num_calls = 0;
  absl::Status broken;  // why its wire carries nothing more
};

class World final : public SimWorld {
 public:
  explicit World(const SimOptions& options)
      : options_(options),
        network_(options_),
        baton_(options.world_size),
        random_(PhiloxKey(options.seed).Add("schedule")),
        seats_(options.world_size) {
    const Topology topology =
        options.topology.has_value() ? *options.topology : Topology::SingleNode(options.world_size);
    for (int rank = 0; rank < options.world_size; ++rank) {
      seats_[rank].wire = std::make_unique<SimWire>(this, rank);
      seats_[rank].backend = std::make_unique<MessageBackend>(
          seats_[rank].wire.get(), MessageBackend::Options{.name = "sim",
                                                           .topology = topology,
                                                           .deadline = options.deadline,
                                                           .two_level = options.two_level,
                                                           .message = {.eager_bytes = options.eager_bytes,
                                                                       .piece_bytes = options.piece_bytes,
                                                                       .payload_digest = options.payload_digest},
                                                           .scratch = options.scratch,
                                                           .stragglers = options.stragglers});
    }
  }

  std::vector<absl::Status> Run(const std::function<absl::Status(Backend&)>& body) override {
    EK_CHECK(!ran_);
    ran_ = true;
    std::vector<absl::Status> statuses(size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([this, rank, &body, &statuses] {
        baton_.Await(rank);
        seats_[rank].thread = std::this_thread::get_id();
        statuses[rank] = body(*seats_[rank].backend);
        Finish(rank);
      });
    }
    running_ = true;
    baton_.Give(ChooseNext());
    baton_.Await(kNobody);
    running_ = false;
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  absl::Duration now() const override { return network_.now(); }
  std::vector<absl::Duration> end_times() const override {
    std::vector<absl::Duration> times;
    for (const RankSeat& seat : seats_) times.push_back(seat.ended_at);
    return times;
  }
  uint64_t log_digest() const override { return network_.log_digest(); }
  int64_t num_messages() const override { return network_.num_messages(); }
  int64_t num_faults() const override { return network_.num_faults(); }

  int size() const { return options_.world_size; }
  Network& network() { return network_; }
  RankSeat& seat(int rank) { return seats_[rank]; }

  // At every call of the network: faults of the process, and whether the call may be made at all.
  absl::Status EnterCall(int rank) {
    RankSeat& seat = seats_[rank];
    if (!running_) return seat.broken;
    if (seat.thread != std::this_thread::get_id()) {
      return absl::FailedPreconditionError("the simulation runs calls on the rank's own thread: use an inline stream");
    }
    const int64_t index = seat.num_calls++;
    for (const SimFault& fault : options_.faults) {
      if (fault.rank != rank || fault.index != index || seat.dead) continue;
      if (fault.kind == SimFault::Kind::kDie) {
        network_.CountFault();
        Die(rank);
      } else if (fault.kind == SimFault::Kind::kStop) {
        network_.CountFault();
        seat.until = fault.by == absl::ZeroDuration() ? absl::InfiniteDuration() : network_.now() + fault.by;
        GiveWay(rank, RankState::kStopped);
      }
    }
    return seat.broken;
  }

  // Lets another rank go on when the scheduler wants it.
  void GiveWay(int rank, RankState state) {
    if (!running_) return;
    seats_[rank].state = state;
    const int next = ChooseNext();
    EK_CHECK(next != kNobody);
    if (next == rank) return;
    baton_.Give(next);
    baton_.Await(rank);
  }

  // A rank may lose its turn at any send; where all orders are tried, only at those of records and payload.
  void MaybeGiveWay(int rank, int tag) {
    if (!running_) return;
    const bool give = options_.choose != nullptr ? options_.choose_at_sends && tag != kControlTag
                                                 : random_.Below(next_random_++, 8) == 0;
    if (give) GiveWay(rank, RankState::kReady);
  }

 private:
  void Die(int rank) {
    RankSeat& seat = seats_[rank];
    seat.dead = true;
    seat.died_at = network_.now();
    seat.broken = absl::AbortedError(absl::StrCat("simulated rank ", rank, " is dead"));
    network_.Disconnect(rank);
    network_.Note(3, static_cast<uint64_t>(rank), 0);
    if (!options_.death_seen_after.has_value()) return;
    network_.At(network_.now() + *options_.death_seen_after, [this, rank] {
      seats_[rank].death_seen = true;
      for (int peer = 0; peer < size(); ++peer) network_.Notify(peer);
    });
  }

  void Finish(int rank) {
    if (!seats_[rank].dead) seats_[rank].backend->SayGoodbye();
    seats_[rank].state = RankState::kFinished;
    seats_[rank].ended_at = network_.now();
    baton_.Give(ChooseNext());
  }

  // Who goes on: moves the clock until somebody can. kNobody when all have finished.
  int ChooseNext() {
    for (;;) {
      std::vector<int> ready;
      bool all_finished = true;
      for (int rank = 0; rank < size(); ++rank) {
        if (CanGoOn(rank)) ready.push_back(rank);
        all_finished = all_finished && seats_[rank].state == RankState::kFinished;
      }
      if (all_finished) return kNobody;
      if (!ready.empty()) return Grant(ready[ready.size() == 1 ? 0 : Choose(static_cast<int>(ready.size()))]);
      if (!MoveClock()) ReleaseStopped();
    }
  }

  bool CanGoOn(int rank) {
    const RankSeat& seat = seats_[rank];
    switch (seat.state) {
      case RankState::kReady:
        return true;
      case RankState::kWaiting:
        return seat.dead || network_.HasActivity(rank) || network_.now() >= seat.until;
      case RankState::kStopped:
        return network_.now() >= seat.until;
      default:
        return false;
    }
  }

  int Grant(int rank) {
    seats_[rank].state = RankState::kReady;
    network_.Note(4, static_cast<uint64_t>(rank), 0);
    return rank;
  }

  int Choose(int n) {
    const int chosen = options_.choose != nullptr
                           ? options_.choose(n)
                           : static_cast<int>(random_.Below(next_random_++, static_cast<uint64_t>(n)));
    EK_CHECK(chosen >= 0 && chosen < n);
    return chosen;
  }

  // To the next event or limit; false when there is neither.
  bool MoveClock() {
    absl::Duration limit = absl::InfiniteDuration();
    for (const RankSeat& seat : seats_) {
      if (seat.state == RankState::kWaiting || seat.state == RankState::kStopped) limit = std::min(limit, seat.until);
    }
    if (network_.HasEvents() && network_.NextEventTime() <= limit) {
      network_.RunNextEvent();
      return true;
    }
    if (limit == absl::InfiniteDuration()) return false;
    network_.AdvanceTo(limit);
    return true;
  }

  // Only ranks that stopped for ever are left: they end, so that their threads can.
  void ReleaseStopped() {
    for (int rank = 0; rank < size(); ++rank) {
      if (seats_[rank].state != RankState::kStopped) continue;
      Die(rank);
      seats_[rank].state = RankState::kReady;
    }
  }

  const SimOptions options_;
  Network network_;
  Baton baton_;
  const PhiloxStream random_;
  uint64_t next_random_ = 0;
  bool ran_ = false;
  bool running_ = false;
  std::vector<RankSeat> seats_;
};

int SimWire::size() const { return world_->size(); }
absl::Duration SimWire::Now() { return world_->network().now(); }

absl::Status SimWire::StartSend(int peer, int tag, const void* data, int64_t bytes, Transfer* transfer) {
  EK_RETURN_IF_ERROR(world_->EnterCall(rank_));
  world_->network().StartSend(rank_, peer, tag, data, bytes, transfer);
  world_->MaybeGiveWay(rank_, tag);
  return absl::OkStatus();
}

absl::Status SimWire::StartReceive(int peer, int tag, void* data, int64_t capacity, Transfer* transfer) {
  EK_RETURN_IF_ERROR(world_->EnterCall(rank_));
  world_->network().StartReceive(rank_, peer, tag, data, capacity, transfer);
  return absl::OkStatus();
}

// Deliveries mark transfers themselves.
absl::Status SimWire::Test(absl::Span<Transfer* const>) { return world_->EnterCall(rank_); }

bool SimWire::Cancel(Transfer* transfer) {
  world_->network().Cancel(rank_, transfer);
  return true;
}

bool SimWire::Pause(const PauseHint& hint) {
  if (!world_->EnterCall(rank_).ok()) return true;
  // What came before the last look is no reason to wake up again.
  world_->seat(rank_).until = hint.until;
  world_->GiveWay(rank_, RankState::kWaiting);
  (void)world_->network().TakeActivity(rank_);
  return true;
}

PeerHealth SimWire::Health(int peer, bool) {
  const RankSeat& seat = world_->seat(peer);
  if (!seat.death_seen) return {};
  return {.state = PeerHealth::State::kDead,
          .text = absl::StrCat("simulated rank ", peer, " died at ", absl::FormatDuration(seat.died_at))};
}

absl::Status SimWire::status() const { return world_->seat(rank_).broken; }

void SimWire::Condemn(const absl::Status& cause) {
  absl::Status& broken = world_->seat(rank_).broken;
  if (broken.ok()) broken = absl::AbortedError(cause.message());
}

absl::Status CheckOptions(const SimOptions& options) {
  if (options.world_size < 1 || options.world_size > 4096) {
    return absl::InvalidArgumentError(absl::StrCat("world_size ", options.world_size, " is not in [1, 4096]"));
  }
  if (options.topology.has_value() && options.topology->world_size() != options.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the topology has ", options.topology->world_size(), " ranks, the world ", options.world_size));
  }
  for (const SimLink& link : options.links) {
    if (link.latency < absl::ZeroDuration() || !(link.bytes_per_second > 0)) {
      return absl::InvalidArgumentError("a link needs a latency >= 0 and a bandwidth > 0");
    }
  }
  if (!(options.jitter >= 0) || options.jitter > 1e6) {
    return absl::InvalidArgumentError(absl::StrCat("jitter ", options.jitter, " is not in [0, 1e6]"));
  }
  for (const SimFault& fault : options.faults) {
    if (fault.rank < 0 || fault.rank >= options.world_size || fault.index < 0 || fault.by < absl::ZeroDuration()) {
      return absl::InvalidArgumentError(
          absl::StrCat("fault out of range in a world of ", options.world_size, ": ", DescribeFault(fault)));
    }
  }
  EK_RETURN_IF_ERROR(CheckDeadline(options.deadline));
  return CheckMessageOptions({.eager_bytes = options.eager_bytes,
                              .piece_bytes = options.piece_bytes,
                              .payload_digest = options.payload_digest});
}

}  // namespace

std::string DescribeFault(const SimFault& fault) {
  constexpr const char* kNames[] = {"delay", "reorder", "drop", "duplicate", "corrupt", "stop", "die"};
  return absl::StrCat(kNames[static_cast<int>(fault.kind)], " rank ", fault.rank, " at ", fault.index, " by ",
                      absl::FormatDuration(fault.by));
}

absl::StatusOr<std::unique_ptr<SimWorld>> SimWorld::Create(const SimOptions& options) {
  EK_RETURN_IF_ERROR(CheckOptions(options));
  return std::make_unique<World>(options);
}

}  // namespace evenkeel::comm
