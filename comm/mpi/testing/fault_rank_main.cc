// One rank of a job in which some ranks, the victims, go wrong: the program under process_fault_test.
//
// All ranks run --operation, or a mix of collectives. The victims (--victim=1,3) do what --action says: at --phase, or
// --after_us microseconds after the work began. Rank --late=N comes to the end of the job only when every other rank
// has left or is dead, and the launcher cannot talk it into ending. Each rank writes what it saw into the file
// OUT/rank_N, one "key=value" per line, before it ends:
//   pid, fault_ns (victim: when it went wrong), return_ns, code, ranks (of the findings), message, calls, left_ns,
//   finalize_ns (MPI_Finalize was called).
// Times are nanoseconds of the host's monotonic clock, comparable between processes. Exit code: 0 no error, 3 an error.
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/mpi/end_process.h"
#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/comm/mpi/testing/mpi_hooks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {
namespace {

using Arguments = std::map<std::string, std::string>;

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

int64_t Number(const Arguments& arguments, const std::string& name, int64_t otherwise) {
  const auto found = arguments.find(name);
  int64_t value = otherwise;
  if (found != arguments.end() && !absl::SimpleAtoi(found->second, &value)) value = otherwise;
  return value;
}

class Report {
 public:
  explicit Report(const std::string& path) : path_(path) { Add("pid", absl::StrCat(getpid())); }
  void Add(absl::string_view key, const std::string& value) {
    FILE* file = std::fopen(path_.c_str(), "ae");
    if (file == nullptr) return;
    const std::string line = absl::StrCat(key, "=", absl::StrReplaceAll(value, {{"\n", "\\n"}}), "\n");
    std::fwrite(line.data(), 1, line.size(), file);
    std::fclose(file);
  }
  void AddStatus(const absl::Status& status) {
    Add("return_ns", absl::StrCat(NowNs()));
    Add("code", absl::StatusCodeToString(status.code()));
    Add("message", std::string(status.message()));
    std::vector<int> ranks;
    if (const auto context = GetErrorContext(status); context.has_value()) {
      for (const RankFinding& finding : context->findings) ranks.push_back(finding.rank);
    }
    Add("ranks", absl::StrJoin(ranks, ","));
  }

 private:
  const std::string path_;
};

// One operation, or a mix of small and large calls, for ever or `num_calls` calls.
class Work {
 public:
  static constexpr int64_t kLarge = 200'000;

  Work(Communicator& group, Stream& stream, const std::string& operation)
      : group_(group),
        stream_(stream),
        operation_(operation),
        from_(kLarge * group.size(), 1.5f),
        to_(kLarge * group.size()) {}

  absl::Status Next() {
    int64_t call = num_calls_++ % 5;
    if (operation_ == "all_to_all") call = 1;
    if (operation_ == "reduce_scatter") call = 2;
    if (operation_ == "all_gather") call = 3;
    if (operation_ == "all_reduce") {
      return group_.AllReduce(In(kLarge), Out(kLarge), ReduceOp::kSum, stream_);
    }
    switch (call) {
      case 0:
        return group_.AllReduce(In(100), Out(100), ReduceOp::kSum, stream_);
      case 1:
        return group_.AllToAll(In(kLarge * group_.size()), Out(kLarge * group_.size()), stream_);
      case 2:
        return group_.ReduceScatter(In(kLarge * group_.size()), Out(kLarge), ReduceOp::kSum, stream_);
      case 3:
        return group_.AllGather(In(1000), Out(1000 * group_.size()), stream_);
      default:
        return group_.Barrier(stream_);
    }
  }
  int64_t num_calls() const { return num_calls_; }

 private:
  ConstTensorView In(int64_t n) const { return ConstTensorView(from_.data(), DType::kF32, Shape({n})); }
  TensorView Out(int64_t n) { return TensorView(to_.data(), DType::kF32, Shape({n})); }

  Communicator& group_;
  Stream& stream_;
  const std::string operation_;
  std::vector<float> from_, to_;
  int64_t num_calls_ = 0;
};

void GoWrong(const std::string& action, Report* report) {
  report->Add("fault_ns", absl::StrCat(NowNs()));
  if (action == "kill") raise(SIGKILL);
  if (action == "stop") kill(getpid(), SIGSTOP);
  if (action == "exit") _exit(0);
}

// Goes wrong at a moment that has nothing to do with what the rank is doing.
void GoWrongLater(const std::string& action, int64_t after_us, Report* report) {
  std::thread([action, after_us, report] {
    std::this_thread::sleep_for(std::chrono::microseconds(after_us));
    GoWrong(action, report);
  }).detach();
}

// To a moment, 200 to 600 ms away, at which victims that ask at about the same time go wrong together: none of them can
// tell the others.
int64_t MicrosecondsToCommonMoment() {
  constexpr int64_t kEvery = 400'000;
  return 200'000 + kEvery - (NowNs() / 1000 + 200'000) % kEvery;
}

// The rank that reports to `path` has left its world or is dead.
bool IsGone(const std::string& path) {
  std::ifstream report(path);
  pid_t pid = 0;
  for (std::string line; std::getline(report, line);) {
    if (absl::StartsWith(line, "left_ns=")) return true;
    if (absl::StartsWith(line, "pid=")) pid = std::atoi(line.c_str() + 4);
  }
  if (pid == 0) return false;
  const int process = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (process < 0) return errno == ESRCH;
  pollfd ended = {.fd = process, .events = POLLIN, .revents = 0};
  const bool dead = poll(&ended, 1, 0) > 0;
  close(process);
  return dead;
}

void AwaitOthers(const std::string& folder, int64_t rank, int size) {
  for (int other = 0; other < size; ++other) {
    while (other != rank && !IsGone(absl::StrCat(folder, "/rank_", other))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
}

// What happens inside MPI's own calls.
void SetHooks(const std::string& action, Report* report) {
  MpiHooks& hooks = GetMpiHooks();
  if (action == "stop_after_init") hooks.after_init = [] { kill(getpid(), SIGSTOP); };
  if (action == "claim_rank_1") hooks.claimed_rank = 1;
  if (action == "stuck_finalize") {
    hooks.before_finalize = [report] {
      report->Add("fault_ns", absl::StrCat(NowNs()));
      for (;;) pause();
    };
  }
}

absl::Status RunWork(Communicator& group, Stream& stream, const std::string& operation, int64_t num_calls,
                     Report* report) {
  Work work(group, stream, operation);
  absl::Status status;
  while (status.ok() && (num_calls < 0 || work.num_calls() < num_calls)) status = work.Next();
  report->AddStatus(status);
  report->Add("calls", absl::StrCat(work.num_calls()));
  return status;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::pair<std::string, std::string> both = absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    arguments.insert(both);
  }
  const std::string action = arguments["--action"];
  const char* launched_as = std::getenv("OMPI_COMM_WORLD_RANK");
  const int64_t rank = launched_as == nullptr ? 0 : std::atoi(launched_as);
  const std::vector<std::string> victims = absl::StrSplit(arguments["--victim"], ',');
  const bool victim = std::find(victims.begin(), victims.end(), absl::StrCat(rank)) != victims.end();
  const std::string phase = arguments["--phase"];
  Report report(absl::StrCat(arguments["--out"], "/rank_", rank));

  if (victim && action == "stop_before_start") kill(getpid(), SIGSTOP);
  if (victim && phase == "before_init") GoWrong(action, &report);
  GetMpiHooks().before_finalize = [&report] { report.Add("finalize_ns", absl::StrCat(NowNs())); };
  if (victim) SetHooks(action, &report);
  const bool late = arguments["--late"] == absl::StrCat(rank);
  if (late) signal(SIGTERM, SIG_IGN);
  MpiOptions options;
  options.deadline = absl::Milliseconds(Number(arguments, "--deadline_ms", 1000));
  options.start_deadline = absl::Milliseconds(Number(arguments, "--start_deadline_ms", 10000));
  options.config = victim && action == "other_config" ? "lr=2" : "lr=1";
  if (victim && action == "other_build") options.build = 12345;
  if (victim && action == "other_options") options.eager_bytes = 77;
  auto world = MpiBackend::Create(options);
  if (!world.ok()) {
    report.AddStatus(world.status());
    // MPI_Init may still be running on its thread: only the hard way out is left.
    if (absl::IsDeadlineExceeded(world.status())) EndProcess(3);
    return 3;
  }
  if (victim && phase == "before_group") GoWrong(action, &report);
  const auto device = HostDevice::Create();
  auto stream = device->CreateStream("work");
  Group all{.axis = Axis::kWorld, .name = "world", .ranks = std::vector<int>((*world)->size())};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  auto group = (*world)->CreateGroup(all);
  if (!group.ok()) {
    report.AddStatus(group.status());
    return 3;
  }
  if (victim && phase.empty()) GoWrongLater(action, Number(arguments, "--after_us", 0), &report);
  const absl::Status status =
      RunWork(**group, **stream, arguments["--operation"], Number(arguments, "--calls", -1), &report);
  if (victim && phase == "before_leave") GoWrong(action, &report);
  if (victim && action == "never_leaves") {
    report.Add("fault_ns", absl::StrCat(NowNs()));
    std::this_thread::sleep_for(std::chrono::seconds(60));
  }
  if (victim && phase == "leaving") GoWrongLater(action, MicrosecondsToCommonMoment(), &report);
  if (late) AwaitOthers(arguments["--out"], rank, (*world)->size());
  group->reset();
  world->reset();
  report.Add("left_ns", absl::StrCat(NowNs()));
  return status.ok() ? 0 : 3;
}

}  // namespace
}  // namespace evenkeel::comm

int main(int argc, char** argv) { return evenkeel::comm::Main(argc, argv); }
