// Faults of real jobs at their start and at their end, and its open ports meanwhile.
//
// EVENKEEL_FAULT_RUNS of 14 and more tries every subset of ranks that can be missing (default: a few).
#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/comm/mpi/testing/fault_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Rank 0, through which the launcher and MPI do much of their work, is killed in every phase.
TEST(JobFaultTest, C29_RankZeroDiesInEveryPhase) {
  for (const std::string phase : {"before_init", "before_group", "work", "before_leave"}) {
    SCOPED_TRACE(phase);
    std::vector<std::string> more = {"--start_deadline_ms=3000"};
    if (phase == "work") more.push_back("--after_us=5000");
    if (phase != "work") more.push_back("--phase=" + phase);
    if (phase == "before_leave") more.push_back("--calls=10");
    const JobResult job = RunWithFault("kill", "0", more);
    ASSERT_TRUE(job.finished);
    EXPECT_NE(job.exit_code, 0);
    EXPECT_THAT(job.orphans, IsEmpty());
    const int64_t fault_ns = Number(job.reports[0], "fault_ns");
    ASSERT_GT(fault_ns, 0);
    EXPECT_LE(Milliseconds(job.end_ns - fault_ns), 3000 + 3000 + absl::ToInt64Milliseconds(job.stalled));
    for (int rank = 1; rank < kFaultRanks; ++rank) {
      const RankReport& report = job.reports[rank];
      if (phase == "before_leave") {
        EXPECT_EQ(Text(report, "code"), "OK") << Text(report, "message");
      } else if (phase != "before_init") {  // the launcher may end ranks that wait in MPI_Init before they can report
        EXPECT_EQ(Text(report, "code"), "UNAVAILABLE") << Text(report, "message");
        EXPECT_EQ(Text(report, "ranks"), "0") << Text(report, "message");
      }
    }
  }
}

// MPI_Init does not return before all processes of the job have called it: nobody knows who is missing.
TEST(JobFaultTest, C26_RankMissingInMpiInit) {
  const JobResult job = RunWithFault("stop_before_start", "2", {"--start_deadline_ms=700"});
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(Text(job.reports[rank], "code"), "DEADLINE_EXCEEDED") << Text(job.reports[rank], "message");
    EXPECT_THAT(Text(job.reports[rank], "message"), HasSubstr("not all ranks of the job have started"));
  }
  EXPECT_THAT(job.orphans, IsEmpty());
}

// Once MPI_Init has returned, the missing and the present are listed.
TEST(JobFaultTest, C26_EverySubsetMissingAtTheStartIsNamed) {
  const bool all = FromEnvironment("EVENKEEL_FAULT_RUNS", 3) >= 14;
  for (int mask = 1; mask < 15; ++mask) {
    if (!all && mask != 4 && mask != 9 && mask != 14) continue;
    std::vector<int> missing, present;
    for (int rank = 0; rank < kFaultRanks; ++rank) ((mask >> rank & 1) != 0 ? missing : present).push_back(rank);
    const std::string victims = absl::StrJoin(missing, ",");
    SCOPED_TRACE(victims);
    const JobResult job = RunWithFault("stop_after_init", victims, {"--start_deadline_ms=2000"});
    ASSERT_TRUE(job.finished);
    EXPECT_NE(job.exit_code, 0);
    EXPECT_THAT(job.orphans, IsEmpty());
    for (const int rank : present) {
      EXPECT_EQ(Text(job.reports[rank], "code"), "DEADLINE_EXCEEDED") << Text(job.reports[rank], "message");
      EXPECT_EQ(Text(job.reports[rank], "ranks"), victims) << Text(job.reports[rank], "message");
      EXPECT_THAT(Text(job.reports[rank], "message"),
                  HasSubstr(absl::StrCat("ranks are absent; present: ", absl::StrJoin(present, ","))));
    }
  }
}

// Process 2 believes that it is rank 1. Who hears both names host and process of each; rank 1 misses rank 2.
TEST(JobFaultTest, C26_TwoRankOnesAreNamed) {
  const JobResult job = RunWithFault("claim_rank_1", "2", {"--start_deadline_ms=2000"});
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  EXPECT_THAT(job.orphans, IsEmpty());
  for (const int rank : {0, 3}) {
    const RankReport& report = job.reports[rank];
    EXPECT_EQ(Text(report, "code"), "ALREADY_EXISTS") << Text(report, "message");
    EXPECT_EQ(Text(report, "ranks"), "1,2");
    for (const int named : {1, 2}) {
      EXPECT_THAT(Text(report, "message"),
                  HasSubstr(absl::StrCat("rank 1: process ", Text(job.reports[named], "pid"), " on ")));
    }
  }
}

TEST(JobFaultTest, C10_DifferentStartIsRefusedByAllRanks) {
  const std::pair<std::string, std::string> cases[] = {{"other_config", "configurations differ"},
                                                       {"other_build", "builds differ"},
                                                       {"other_options", "options of the backend differ"}};
  int victim = 0;
  for (const auto& [action, what] : cases) {
    SCOPED_TRACE(action);
    const JobResult job = RunWithFault(action, absl::StrCat(++victim), {});
    ASSERT_TRUE(job.finished);
    EXPECT_NE(job.exit_code, 0);
    for (const RankReport& report : job.reports) {
      EXPECT_EQ(Text(report, "code"), "FAILED_PRECONDITION");
      EXPECT_EQ(Text(report, "ranks"), "0,1,2,3");
      EXPECT_THAT(Text(report, "message"), ::testing::HasSubstr(what));
    }
    EXPECT_THAT(job.orphans, ::testing::IsEmpty());
  }
}

// All calls went well, but one rank does not come to the end of the job.
TEST(JobFaultTest, C25_LeavingIsBounded) {
  const JobResult job = RunWithFault("never_leaves", "1", {"--calls=10"});
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  const int64_t fault_ns = Number(job.reports[1], "fault_ns");
  ASSERT_GT(fault_ns, 0);
  const int64_t stalled = absl::ToInt64Milliseconds(job.stalled);
  for (const int rank : {0, 2, 3}) {
    EXPECT_EQ(Text(job.reports[rank], "code"), "OK");
    ASSERT_GT(Number(job.reports[rank], "left_ns"), 0);
    EXPECT_LE(Milliseconds(Number(job.reports[rank], "left_ns") - fault_ns), kFaultDeadlineMs + 500 + stalled);
  }
  EXPECT_LE(Milliseconds(job.end_ns - fault_ns), kFaultDeadlineMs + 3000 + stalled);
  EXPECT_THAT(job.orphans, ::testing::IsEmpty());
}

// MPI_Finalize does not return, in one rank and so in none: every process says how things are and ends itself.
TEST(JobFaultTest, C25_StuckFinalizeEndsTheProcessWithItsState) {
  const JobResult job = RunWithFault("stuck_finalize", "1", {"--calls=10"});
  ASSERT_TRUE(job.finished) << job.log;
  // The launcher says what the first rank ended with; it was seen to crash itself when it ends such a job.
  EXPECT_NE(job.exit_code, 0);
  EXPECT_THAT(job.log, ::testing::ContainsRegex("Exit code: +86"));
  EXPECT_THAT(job.orphans, IsEmpty());
  const int64_t fault_ns = Number(job.reports[1], "fault_ns");
  ASSERT_GT(fault_ns, 0);
  EXPECT_LE(Milliseconds(job.end_ns - fault_ns), 2000 + 3000 + absl::ToInt64Milliseconds(job.stalled));
  for (const RankReport& report : job.reports) {
    EXPECT_EQ(Text(report, "code"), "OK");
    EXPECT_EQ(Text(report, "left_ns"), "") << "nobody comes back from there";
  }
  EXPECT_THAT(job.log, AllOf(HasSubstr("MPI_Finalize has not returned after 2s: ending the process with code 86"),
                             HasSubstr("this is rank 1/4; rank 0: process")));
}

// Rank 2 comes to the end of the job after the others have gone. Their part of the last meeting lies ready, so nobody
// seems to be missing; but MPI_Finalize, which waits for processes, would not return.
void CheckRankThatIsLate(const std::string& action, const std::string& victims, std::vector<std::string> more) {
  more.insert(more.end(), {"--calls=10", "--late=2"});
  setenv("OMPI_MCA_odls_base_sigkill_timeout", "2", 1);  // seconds that the launcher leaves it
  const JobResult job = RunWithFault(action, victims, more);
  unsetenv("OMPI_MCA_odls_base_sigkill_timeout");
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  EXPECT_THAT(job.orphans, IsEmpty());
  EXPECT_EQ(Text(job.reports[2], "code"), "OK") << Text(job.reports[2], "message");
  EXPECT_EQ(Text(job.reports[2], "finalize_ns"), "") << "MPI_Finalize was called; " << job.log;
  EXPECT_TRUE(Number(job.reports[2], "left_ns") > 0 || job.stalled > absl::Seconds(1)) << job.log;
}

TEST(JobFaultTest, C25_NoFinalizeWhenTheOthersHaveGivenUp) { CheckRankThatIsLate("none", "", {}); }

TEST(JobFaultTest, C25_NoFinalizeWhenTheOthersAreDead) { CheckRankThatIsLate("kill", "0,1,3", {"--phase=leaving"}); }

TEST(JobFaultTest, HealthyJobEndsWithZero) {
  const JobResult job = RunWithFault("none", "", {"--calls=20"});
  ASSERT_TRUE(job.finished);
  EXPECT_EQ(job.exit_code, 0);
  for (const RankReport& report : job.reports) {
    EXPECT_EQ(Text(report, "code"), "OK");
    EXPECT_GT(Number(report, "finalize_ns"), 0);
  }
}

// ---- Strangers ------------------------------------------------------------------------------------------------------

// The launcher and all its descendants.
std::set<pid_t> ProcessesOf(pid_t launcher) {
  std::multimap<pid_t, pid_t> children;
  DIR* const folder = opendir("/proc");
  while (const dirent* entry = readdir(folder)) {
    const pid_t pid = std::atoi(entry->d_name);
    std::ifstream file(absl::StrCat("/proc/", entry->d_name, "/stat"));
    std::string text;
    if (pid <= 0 || !std::getline(file, text) || text.rfind(')') == std::string::npos) continue;
    std::istringstream rest(text.substr(text.rfind(')') + 1));
    char state = 0;
    pid_t parent = 0;
    if (rest >> state >> parent) children.emplace(parent, pid);
  }
  closedir(folder);
  std::set<pid_t> found;
  std::vector<pid_t> open = {launcher};
  while (!open.empty()) {
    const pid_t pid = open.back();
    open.pop_back();
    if (!found.insert(pid).second) continue;
    for (auto [it, end] = children.equal_range(pid); it != end; ++it) open.push_back(it->second);
  }
  return found;
}

std::set<std::string> SocketsOf(pid_t pid) {
  std::set<std::string> sockets;
  const std::string path = absl::StrCat("/proc/", pid, "/fd");
  DIR* const folder = opendir(path.c_str());
  while (const dirent* entry = folder == nullptr ? nullptr : readdir(folder)) {
    char target[64] = {};
    if (readlink(absl::StrCat(path, "/", entry->d_name).c_str(), target, sizeof(target) - 1) > 0)
      sockets.insert(target);
  }
  if (folder != nullptr) closedir(folder);
  return sockets;
}

// TCP ports on which a process listens.
std::set<int> PortsOf(pid_t pid) {
  const std::set<std::string> sockets = SocketsOf(pid);
  std::set<int> ports;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    unsigned address = 0, port = 0, state = 0;
    unsigned long inode = 0;
    if (std::sscanf(line.c_str(), " %*d: %x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %*d %*d %lu", &address, &port, &state,
                    &inode) != 4) {
      continue;
    }
    constexpr unsigned kListens = 0x0a;
    if (state == kListens && sockets.count(absl::StrCat("socket:[", inode, "]")) != 0) ports.insert(port);
  }
  return ports;
}

// Strangers find nobody to talk to: ranks have no port open, from their start to their end. (The launcher has; what it
// makes of strangers is its own matter, see docs/comm.md.)
TEST(JobFaultTest, C27_RanksListenNowhere) {
  std::set<pid_t> looked_at;
  std::set<int> ports_of_launcher, ports_of_ranks;
  const JobResult job = RunWithFault("none", "", {"--calls=20"}, [&](pid_t launcher) {
    for (const pid_t pid : ProcessesOf(launcher)) {
      std::ifstream name(absl::StrCat("/proc/", pid, "/comm"));
      std::string text;
      std::getline(name, text);
      if (text == "fault_rank") looked_at.insert(pid);
      (text == "fault_rank" ? ports_of_ranks : ports_of_launcher).merge(PortsOf(pid));
    }
  });
  ASSERT_TRUE(job.finished);
  EXPECT_EQ(job.exit_code, 0) << job.log;
  for (const RankReport& report : job.reports) {
    EXPECT_EQ(looked_at.count(static_cast<pid_t>(Number(report, "pid"))), 1u);
  }
  EXPECT_THAT(ports_of_ranks, IsEmpty());
  EXPECT_FALSE(ports_of_launcher.empty()) << "the search finds no ports at all";
}

}  // namespace
}  // namespace evenkeel::comm
