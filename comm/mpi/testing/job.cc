#include "evenkeel/comm/mpi/testing/job.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/testing/stall_meter.h"

extern char** environ;

namespace evenkeel::comm {
namespace {

constexpr char kLauncher[] = "tools/mpi_test.sh";
// How long it may take after the last rank has ended.
constexpr absl::Duration kLauncherEnds = absl::Seconds(5);

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// In a process group of its own, output into the job's folder.
pid_t Launch(const JobSpec& spec) {
  std::vector<std::string> words = {kLauncher, absl::StrCat(spec.ranks), spec.program};
  words.insert(words.end(), spec.arguments.begin(), spec.arguments.end());
  words.push_back(absl::StrCat("--out=", spec.folder));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  const std::string log = absl::StrCat(spec.folder, "/log");
  posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t pid = -1;
  if (posix_spawn(&pid, kLauncher, &files, &attributes, argv.data(), environ) != 0) pid = -1;
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  return pid;
}

RankReport ReadReport(const std::string& path) {
  RankReport report;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find('=');
    if (equals != std::string::npos) report.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  return report;
}

bool Lives(pid_t pid) {
  std::ifstream stat(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(stat, text)) return false;
  const size_t end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() || text[end + 2] != 'Z';
}

// All ranks have written who they are, and none of them lives any more.
bool AllHaveEnded(const JobSpec& spec) {
  for (int rank = 0; rank < spec.ranks; ++rank) {
    const RankReport report = ReadReport(absl::StrCat(spec.folder, "/rank_", rank));
    const auto pid = report.find("pid");
    if (pid == report.end() || Lives(std::atoi(pid->second.c_str()))) return false;
  }
  return true;
}

}  // namespace

JobResult RunJob(const JobSpec& spec) {
  JobResult result;
  mkdir(spec.folder.c_str(), 0755);
  for (int rank = 0; rank < spec.ranks; ++rank) std::remove(absl::StrCat(spec.folder, "/rank_", rank).c_str());
  const StallMeter stalls;
  const int64_t start = NowNs();
  const pid_t launcher = Launch(spec);
  if (launcher < 0) return result;
  int status = 0;
  int64_t ended_ns = 0;  // when no rank was left
  for (int round = 0; NowNs() - start < absl::ToInt64Nanoseconds(spec.watchdog); ++round) {
    result.finished = waitpid(launcher, &status, WNOHANG) == launcher;
    if (result.finished) break;
    if (spec.meanwhile != nullptr) spec.meanwhile(launcher);
    // mpirun 4.1.4 was seen to hang by itself after all ranks had ended and it had said so: the job is over then.
    if (ended_ns == 0 && round % 20 == 19 && AllHaveEnded(spec)) ended_ns = NowNs();
    if (ended_ns != 0 && NowNs() - ended_ns > absl::ToInt64Nanoseconds(kLauncherEnds)) break;
    absl::SleepFor(absl::Milliseconds(5));
  }
  if (!result.finished) {
    kill(-launcher, SIGKILL);
    waitpid(launcher, &status, 0);
    result.finished = ended_ns != 0;
  }
  result.end_ns = ended_ns != 0 ? ended_ns : NowNs();
  result.stalled = stalls.Total();
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  std::ifstream log(absl::StrCat(spec.folder, "/log"));
  result.log.assign(std::istreambuf_iterator<char>(log), std::istreambuf_iterator<char>());
  for (int rank = 0; rank < spec.ranks; ++rank) {
    result.reports.push_back(ReadReport(absl::StrCat(spec.folder, "/rank_", rank)));
    const auto pid = result.reports.back().find("pid");
    if (pid == result.reports.back().end()) continue;
    const pid_t process = std::atoi(pid->second.c_str());
    for (int i = 0; i < 50 && Lives(process); ++i) absl::SleepFor(absl::Milliseconds(10));
    if (!Lives(process)) continue;
    result.orphans.push_back(rank);
    kill(process, SIGKILL);
  }
  return result;
}

}  // namespace evenkeel::comm
