#include "evenkeel/comm/mpi/mpi_job.h"

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/mpi/end_process.h"

namespace evenkeel::comm {
namespace {

constexpr int kNeededLevel = MPI_THREAD_SERIALIZED;

constexpr absl::Duration kLinger = absl::Milliseconds(300);

std::atomic<bool> finalized{false};

void Linger() {
  if (!finalized.load()) absl::SleepFor(kLinger);
}

absl::Status CheckLevel(int provided) {
  if (provided >= kNeededLevel) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("MPI offers thread level ", provided, ", MPI_THREAD_SERIALIZED (", kNeededLevel, ") is needed"));
}

}  // namespace

struct MpiJob::State {
  absl::Mutex mutex;
  bool initialized ABSL_GUARDED_BY(mutex) = false;
  int provided ABSL_GUARDED_BY(mutex) = -1;
  bool leave ABSL_GUARDED_BY(mutex) = false;  // wanted: MPI_Finalize
  bool quit ABSL_GUARDED_BY(mutex) = false;   // wanted: the end of the thread
  bool ended ABSL_GUARDED_BY(mutex) = false;

  static void Run(const std::shared_ptr<State>& state) {
    int provided = -1;
    MPI_Init_thread(nullptr, nullptr, kNeededLevel, &provided);
    absl::MutexLock lock(&state->mutex);
    state->provided = provided;
    state->initialized = true;
    auto wanted = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state->mutex) { return state->leave || state->quit; };
    state->mutex.Await(absl::Condition(&wanted));
    if (state->leave) {
      state->mutex.Unlock();
      MPI_Finalize();
      finalized.store(true);
      state->mutex.Lock();
    }
    state->ended = true;
  }
};

MpiJob::MpiJob(std::shared_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<MpiJob>> MpiJob::Join(absl::Duration limit) {
  int flag = 0;
  MPI_Finalized(&flag);
  if (flag != 0) return absl::FailedPreconditionError("MPI has been finalized: a process can join one job only");
  MPI_Initialized(&flag);
  if (flag != 0) {
    int provided = -1;
    MPI_Query_thread(&provided);
    if (absl::Status status = CheckLevel(provided); !status.ok()) return status;
    return std::unique_ptr<MpiJob>(new MpiJob(nullptr));
  }
  std::atexit(Linger);
  auto state = std::make_shared<State>();
  std::thread([state] { State::Run(state); }).detach();
  absl::MutexLock lock(&state->mutex);
  if (!state->mutex.AwaitWithTimeout(absl::Condition(&state->initialized), limit)) {
    return absl::DeadlineExceededError(absl::StrCat("MPI_Init has not returned after ", absl::FormatDuration(limit),
                                                    ": not all ranks of the job have started"));
  }
  std::unique_ptr<MpiJob> job(new MpiJob(state));
  if (absl::Status status = CheckLevel(state->provided); !status.ok()) {
    state->quit = true;
    return status;
  }
  return job;
}

MpiJob::~MpiJob() {
  if (state_ == nullptr) return;
  absl::MutexLock lock(&state_->mutex);
  if (state_->leave) return;
  state_->quit = true;
  state_->mutex.Await(absl::Condition(&state_->ended));
}

void MpiJob::Leave(absl::Duration limit, absl::FunctionRef<std::string()> state) {
  if (state_ == nullptr) return;
  absl::MutexLock lock(&state_->mutex);
  state_->leave = true;
  if (state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended), limit)) return;
  std::fprintf(stderr, "comm finalize: MPI_Finalize has not returned after %s: ending the process with code %d; %s\n",
               absl::FormatDuration(limit).c_str(), kStuckInMpiExitCode, state().c_str());
  EndProcess(kStuckInMpiExitCode);
}

void EndProcess(int exit_code) {
  std::fflush(nullptr);
  Linger();
  _exit(exit_code);
}

}  // namespace evenkeel::comm
