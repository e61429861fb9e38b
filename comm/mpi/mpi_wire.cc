#include "evenkeel/comm/mpi/mpi_wire.h"

#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

static_assert(sizeof(MPI_Request) <= sizeof(void*), "a request does not fit Transfer::request");

constexpr int kHelloTag = 0x454b;  // on MPI_COMM_WORLD, before there is a communicator of our own
constexpr int kLookEvery = 256;    // polls between looks at notices while payload moves
// Polls of a wait before the first yield, where every rank has a processor: some 20 us. A yield costs more than most
// messages take, all the more when other programs want the processor.
constexpr int kBusyPolls = 100;

// When the launcher first asked this process to end; 0: it has not. A launcher may ask several times within
// milliseconds; who asks again a second later means it.
std::atomic<int64_t> end_wanted_ns{0};

void WantEnd(int signal_number) {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
  int64_t first = 0;
  if (end_wanted_ns.compare_exchange_strong(first, now) || now - first < 1'000'000'000) return;
  signal(signal_number, SIG_DFL);
  raise(signal_number);
}

std::string MpiErrorText(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(text, length);
}

MPI_Request RequestOf(const Transfer& transfer) {
  MPI_Request request;
  std::memcpy(&request, &transfer.request, sizeof(request));
  return request;
}

void SetRequest(MPI_Request request, Transfer* transfer) {
  std::memcpy(&transfer->request, &request, sizeof(request));
  transfer->done = request == MPI_REQUEST_NULL;
}

class Impl final : public MpiWire {
 public:
  explicit Impl(const Options& options) : options_(options) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    hellos_.resize(size_);
    watch_ = std::make_unique<ProcessWatch>(size_);
  }

  absl::Status Start() {
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    void* bound = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &bound, &found);
    if (found == 0 || *static_cast<int*>(bound) < kMaxTag) {
      return absl::UnimplementedError(absl::StrCat("this MPI offers tags up to ",
                                                   found == 0 ? 0 : *static_cast<int*>(bound), ", needed: ", kMaxTag,
                                                   " (Open MPI: choose the messaging layer ob1)"));
    }
    const absl::Duration limit = Now() + options_.start_limit;
    EK_RETURN_IF_ERROR(ExchangeHellos(limit));
    EK_RETURN_IF_ERROR(CompareHellos(hellos_, rank_));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) watch_->Add(peer, hellos_[peer].process);
    }
    EK_RETURN_IF_ERROR(MakeCommunicator(limit));
    if (NumRanksHere() <= sysconf(_SC_NPROCESSORS_ONLN)) busy_polls_ = kBusyPolls;
    return absl::OkStatus();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  absl::Duration Now() override { return Clock::Real()->Now(); }
  absl::Span<const Hello> hellos() const override { return hellos_; }

  absl::Status StartSend(int peer, int tag, const void* data, int64_t bytes, Transfer* transfer) override {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(condemned_);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &request);
    if (code != MPI_SUCCESS) return MpiError("MPI_Isend", peer, code);
    SetRequest(request, transfer);
    return absl::OkStatus();
  }

  absl::Status StartReceive(int peer, int tag, void* data, int64_t capacity, Transfer* transfer) override {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(condemned_);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = MPI_Irecv(data, static_cast<int>(capacity), MPI_BYTE, peer, tag, comm_, &request);
    if (code != MPI_SUCCESS) return MpiError("MPI_Irecv", peer, code);
    SetRequest(request, transfer);
    return absl::OkStatus();
  }

  absl::Status Test(absl::Span<Transfer* const> transfers) override {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(condemned_);
    requests_.clear();
    tested_.clear();
    for (Transfer* transfer : transfers) {
      if (transfer->done) continue;
      requests_.push_back(RequestOf(*transfer));
      tested_.push_back(transfer);
    }
    if (requests_.empty()) return absl::OkStatus();
    const int n = static_cast<int>(requests_.size());
    indices_.resize(n);
    statuses_.resize(n);
    int num_done = 0;
    int code = MPI_Testsome(n, requests_.data(), &num_done, indices_.data(), statuses_.data());
    // Open MPI looks at the requests first and makes progress after it: what that progress completed is seen only by
    // another look. Without it a notice that came right behind a record would be overlooked.
    if (code == MPI_SUCCESS && num_done == 0) {
      code = MPI_Testsome(n, requests_.data(), &num_done, indices_.data(), statuses_.data());
    }
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return MpiError("MPI_Testsome", -1, code);
    for (int i = 0; i < num_done; ++i) Finish(statuses_[i], code, tested_[indices_[i]]);
    return absl::OkStatus();
  }

  bool Cancel(Transfer* transfer) override {
    absl::MutexLock lock(&mutex_);
    if (transfer->done) return true;
    if (!condemned_.ok()) return false;
    MPI_Request request = RequestOf(*transfer);
    // A receive that no message has matched is taken back at once; whatever else is on its way gets a moment.
    MPI_Cancel(&request);
    for (int i = 0; i < 100; ++i) {
      int flag = 0;
      MPI_Status status;
      if (MPI_Test(&request, &flag, &status) != MPI_SUCCESS || flag != 0) {
        transfer->done = true;
        return true;
      }
    }
    return false;
  }

  bool Pause(const PauseHint& hint) override {
    if (hint.attempt < busy_polls_) return false;
    const absl::Duration waited = Now() - hint.since;
    if (waited < std::max(options_.spin, hint.busy_for)) {
      sched_yield();
      return hint.attempt % kLookEvery == kLookEvery - 1;
    }
    const absl::Duration sleep = std::min(options_.max_sleep, std::max(absl::Microseconds(20), waited / 16));
    Clock::Real()->Sleep(std::max(absl::ZeroDuration(), std::min(sleep, hint.until - Now())));
    return true;
  }

  PeerHealth Health(int peer, bool describe) override {
    PeerHealth health;
    if (peer == rank_) return health;
    if (watch_->IsDead(peer)) {
      health.state = PeerHealth::State::kDead;
    } else if (watch_->CanKnow(peer)) {
      health.state = PeerHealth::State::kAlive;
    }
    if (describe || health.state == PeerHealth::State::kDead) health.text = watch_->Describe(peer);
    return health;
  }

  absl::Status status() const override {
    if (end_wanted_ns.load(std::memory_order_relaxed) != 0) return EndWanted();
    if (!is_condemned_.load(std::memory_order_acquire)) return absl::OkStatus();  // asked at every poll
    absl::MutexLock lock(&mutex_);
    return condemned_;
  }

  void Condemn(const absl::Status& cause) override {
    absl::MutexLock lock(&mutex_);
    if (condemned_.ok()) condemned_ = absl::AbortedError(absl::StrCat("this rank carries no more: ", cause.message()));
    is_condemned_.store(true, std::memory_order_release);
  }

  bool AwaitAll(absl::Duration limit) override {
    MPI_Request request = MPI_REQUEST_NULL;
    Transfer transfer;
    {
      absl::MutexLock lock(&mutex_);
      if (!condemned_.ok() || MPI_Ibarrier(comm_, &request) != MPI_SUCCESS) return false;
      SetRequest(request, &transfer);
    }
    const absl::Duration since = Now();
    for (int attempt = 0; !transfer.done; ++attempt) {
      Transfer* const one[] = {&transfer};
      if (!Test(one).ok()) return false;
      if (transfer.done) break;
      if (Now() - since >= limit || !status().ok()) return false;
      if (!Pause({.attempt = attempt, .until = since + limit, .since = since})) continue;
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != rank_ && watch_->IsDead(peer)) return false;
      }
    }
    return true;
  }

  std::string DescribeWorld() const override {
    std::string text = absl::StrCat("this is rank ", rank_, "/", size_);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) absl::StrAppend(&text, "; rank ", peer, ": ", watch_->Describe(peer));
    }
    return text;
  }

 private:
  absl::Status MpiError(absl::string_view call, int peer, int code) {
    return absl::InternalError(absl::StrCat(call, peer >= 0 ? absl::StrCat(" with rank ", peer) : "", " on rank ",
                                            rank_, ": ", MpiErrorText(code)));
  }

  static void Finish(const MPI_Status& status, int code, Transfer* transfer) {
    transfer->done = true;
    int count = -1;  // what is longer than the receiver's memory arrives as a damaged message
    if (code == MPI_SUCCESS || status.MPI_ERROR == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &count);
    transfer->bytes = count;
  }

  int NumRanksHere() const {
    const uint64_t here = hellos_[rank_].process.host;
    return static_cast<int>(std::count_if(hellos_.begin(), hellos_.end(),
                                          [here](const Hello& hello) { return hello.process.host == here; }));
  }

  absl::Status EndWanted() const {
    std::string dead;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && watch_->IsDead(peer)) absl::StrAppend(&dead, "; world rank ", peer, " is dead");
    }
    return absl::UnavailableError(absl::StrCat("the launcher ends the job (SIGTERM)", dead));
  }

  absl::Status ExchangeHellos(absl::Duration limit) {
    Hello& mine = hellos_[rank_];
    mine = options_.hello;
    mine.rank = rank_;
    mine.size = size_;
    mine.process = ProcessIdentity::Self();
    std::vector<MPI_Request> receives(size_, MPI_REQUEST_NULL), sends(size_, MPI_REQUEST_NULL);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      MPI_Irecv(&hellos_[peer], sizeof(Hello), MPI_BYTE, peer, kHelloTag, MPI_COMM_WORLD, &receives[peer]);
      MPI_Isend(&mine, sizeof(Hello), MPI_BYTE, peer, kHelloTag, MPI_COMM_WORLD, &sends[peer]);
    }
    const absl::Duration since = Now();
    for (int attempt = 0;; ++attempt) {
      int sent = 0;
      MPI_Testall(size_, sends.data(), &sent, MPI_STATUSES_IGNORE);
      // One by one: a request becomes null when its own message is here, whoever else is missing.
      bool received = true;
      int code = MPI_SUCCESS;
      for (MPI_Request& receive : receives) {
        int here = 0;
        if (code == MPI_SUCCESS) code = MPI_Test(&receive, &here, MPI_STATUS_IGNORE);
        received = received && here != 0;
      }
      if (code != MPI_SUCCESS) {
        return absl::FailedPreconditionError(absl::StrCat("comm start rank=", rank_, "/", size_,
                                                          ": a rank's hello has another size than ", sizeof(Hello),
                                                          " bytes: the ranks run different builds"));
      }
      if (received && sent != 0) return absl::OkStatus();
      if (Now() >= limit) return MissingHellos(receives, Now() - since);
      Pause({.attempt = attempt, .until = limit, .since = since});
    }
  }

  absl::Status MissingHellos(const std::vector<MPI_Request>& receives, absl::Duration elapsed) {
    ErrorContext context;
    context.module = "comm";
    context.operation = "start";
    context.group = "world";
    context.rank = rank_;
    context.size = size_;
    std::string present;
    for (int peer = 0; peer < size_; ++peer) {
      if (receives[peer] != MPI_REQUEST_NULL) {
        context.findings.push_back({peer, "has not said hello"});
      } else {
        absl::StrAppend(&present, present.empty() ? "" : ",", peer);
      }
    }
    context.elapsed = elapsed;
    context.limit = options_.start_limit;
    context.next_step = "end the job";
    return MakeError(absl::StatusCode::kDeadlineExceeded, context,
                     absl::StrCat("ranks are absent; present: ", present));
  }

  absl::Status MakeCommunicator(absl::Duration limit) {
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &comm_, &request);
    const absl::Duration since = Now();
    for (int attempt = 0; code == MPI_SUCCESS; ++attempt) {
      int flag = 0;
      code = MPI_Test(&request, &flag, MPI_STATUS_IGNORE);
      if (flag != 0) break;
      if (Now() >= limit) return absl::DeadlineExceededError("comm start: MPI_Comm_idup has not finished");
      Pause({.attempt = attempt, .until = limit, .since = since});
    }
    if (code != MPI_SUCCESS) return MpiError("MPI_Comm_idup", -1, code);
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    return absl::OkStatus();
  }

  const Options options_;
  int rank_ = 0;
  int size_ = 1;
  int busy_polls_ = 0;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::vector<Hello> hellos_;
  std::unique_ptr<ProcessWatch> watch_;

  mutable absl::Mutex mutex_;  // of all MPI calls after the start
  absl::Status condemned_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> is_condemned_{false};
  std::vector<MPI_Request> requests_ ABSL_GUARDED_BY(mutex_);
  std::vector<Transfer*> tested_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> indices_ ABSL_GUARDED_BY(mutex_);
  std::vector<MPI_Status> statuses_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

void CatchSigterm() {
  struct sigaction current;
  if (sigaction(SIGTERM, nullptr, &current) != 0 || current.sa_handler != SIG_DFL) return;
  struct sigaction action;
  std::memset(&action, 0, sizeof(action));
  action.sa_handler = WantEnd;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
}

absl::StatusOr<std::unique_ptr<MpiWire>> MpiWire::Create(const Options& options) {
  auto wire = std::make_unique<Impl>(options);
  EK_RETURN_IF_ERROR(wire->Start());
  return wire;
}

}  // namespace evenkeel::comm
