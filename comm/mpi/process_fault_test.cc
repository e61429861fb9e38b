// Faults of real processes: one rank of a job is killed, stopped or exits at a random moment. The others must name it
// in time, the job must end in time, and nobody may be left behind. The limits are the guarantee's, plus the time for
// which the machine kept a waiting thread from running.
//
// The environment variable EVENKEEL_FAULT_RUNS sets the number of random moments per kind of fault (default: a few),
// and EVENKEEL_FAULT_SEED the seed, which every failure prints.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mpi/testing/job.h"
#include "evenkeel/runtime/base/philox.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kDeadlineMs = 1000;

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

int64_t Milliseconds(int64_t ns) { return ns / 1'000'000; }

int64_t Number(const RankReport& report, const std::string& key) {
  const auto found = report.find(key);
  int64_t value = -1;
  if (found != report.end() && !absl::SimpleAtoi(found->second, &value)) value = -1;
  return value;
}

std::string Text(const RankReport& report, const std::string& key) {
  const auto found = report.find(key);
  return found == report.end() ? "" : found->second;
}

JobResult RunWithFault(const std::string& action, int victim, std::vector<std::string> more) {
  std::vector<std::string> arguments = {absl::StrCat("--action=", action), absl::StrCat("--victim=", victim),
                                        absl::StrCat("--deadline_ms=", kDeadlineMs)};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunJob({.program = "comm/mpi/testing/fault_rank",
                 .ranks = kRanks,
                 .arguments = arguments,
                 .folder = absl::StrCat(::testing::TempDir(), "/job")});
}

// Runs `action` at random moments and checks what the survivors say and when.
void CheckRandomMoments(const std::string& action, const std::string& expected_code, int64_t default_runs) {
  const int64_t runs = FromEnvironment("EVENKEEL_FAULT_RUNS", default_runs);
  const int64_t seed = FromEnvironment("EVENKEEL_FAULT_SEED", 1);
  const PhiloxStream random(PhiloxKey(static_cast<uint64_t>(seed)).Add(action));
  int64_t slowest_return = 0, slowest_end = 0, most_stalled = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const auto victim = static_cast<int>(random.Below(2 * run, kRanks));
    const auto after_us = static_cast<int64_t>(random.Below(2 * run + 1, 60'000));
    SCOPED_TRACE(absl::StrCat(action, " seed ", seed, " run ", run, ": rank ", victim, " after ", after_us, " us"));
    const JobResult job = RunWithFault(action, victim, {absl::StrCat("--after_us=", after_us)});
    ASSERT_TRUE(job.finished);
    EXPECT_NE(job.exit_code, 0);
    EXPECT_THAT(job.orphans, ::testing::IsEmpty());
    const int64_t fault_ns = Number(job.reports[victim], "fault_ns");
    ASSERT_GT(fault_ns, 0);
    const int64_t stalled = absl::ToInt64Milliseconds(job.stalled);
    EXPECT_LE(Milliseconds(job.end_ns - fault_ns), kDeadlineMs + 3000 + stalled) << "the job's end";
    most_stalled = std::max(most_stalled, stalled);
    slowest_end = std::max(slowest_end, Milliseconds(job.end_ns - fault_ns));
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      const RankReport& report = job.reports[rank];
      EXPECT_EQ(Text(report, "code"), expected_code) << "rank " << rank << ": " << Text(report, "message");
      EXPECT_EQ(Text(report, "ranks"), absl::StrCat(victim)) << "rank " << rank << ": " << Text(report, "message");
      const int64_t took = Milliseconds(Number(report, "return_ns") - fault_ns);
      EXPECT_LE(took, kDeadlineMs + 500 + stalled) << "rank " << rank;
      slowest_return = std::max(slowest_return, took);
    }
  }
  ::testing::Test::RecordProperty("slowest_return_ms", static_cast<int>(slowest_return));
  std::fprintf(stderr, "%s: %d jobs, slowest return %d ms, slowest end of job %d ms after the fault, stalled %d ms\n",
               action.c_str(), static_cast<int>(runs), static_cast<int>(slowest_return), static_cast<int>(slowest_end),
               static_cast<int>(most_stalled));
}

TEST(ProcessFaultTest, C22_KilledRankIsNamedUnavailable) { CheckRandomMoments("kill", "UNAVAILABLE", 4); }

TEST(ProcessFaultTest, C22_SilentExitIsNamedUnavailable) { CheckRandomMoments("exit", "UNAVAILABLE", 2); }

TEST(ProcessFaultTest, C23_StoppedRankIsNamedAtTheDeadline) { CheckRandomMoments("stop", "DEADLINE_EXCEEDED", 4); }

TEST(ProcessFaultTest, C29_RankZeroIsNoSpecialCase) {
  const JobResult job = RunWithFault("kill", 0, {"--after_us=5000"});
  ASSERT_TRUE(job.finished);
  for (int rank = 1; rank < kRanks; ++rank) {
    EXPECT_EQ(Text(job.reports[rank], "code"), "UNAVAILABLE") << Text(job.reports[rank], "message");
    EXPECT_EQ(Text(job.reports[rank], "ranks"), "0");
  }
  EXPECT_THAT(job.orphans, ::testing::IsEmpty());
}

TEST(ProcessFaultTest, C26_RankMissingAtTheStart) {
  const JobResult job = RunWithFault("stop_before_start", 2, {"--start_deadline_ms=700"});
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  for (const int rank : {0, 1, 3}) {
    EXPECT_EQ(Text(job.reports[rank], "code"), "DEADLINE_EXCEEDED") << Text(job.reports[rank], "message");
  }
  EXPECT_THAT(job.orphans, ::testing::IsEmpty());
}

TEST(ProcessFaultTest, C10_DifferentStartIsRefusedByAllRanks) {
  const std::pair<std::string, std::string> cases[] = {{"other_config", "configurations differ"},
                                                       {"other_build", "builds differ"},
                                                       {"other_options", "options of the backend differ"}};
  int victim = 0;
  for (const auto& [action, what] : cases) {
    SCOPED_TRACE(action);
    const JobResult job = RunWithFault(action, ++victim, {});
    ASSERT_TRUE(job.finished);
    EXPECT_EQ(job.exit_code, 3);
    for (const RankReport& report : job.reports) {
      EXPECT_EQ(Text(report, "code"), "FAILED_PRECONDITION");
      EXPECT_EQ(Text(report, "ranks"), "0,1,2,3");
      EXPECT_THAT(Text(report, "message"), ::testing::HasSubstr(what));
    }
    EXPECT_THAT(job.orphans, ::testing::IsEmpty());
  }
}

// All calls went well, but one rank does not come to the end of the job.
TEST(ProcessFaultTest, C25_LeavingIsBounded) {
  const JobResult job = RunWithFault("never_leaves", 1, {"--calls=10"});
  ASSERT_TRUE(job.finished);
  EXPECT_NE(job.exit_code, 0);
  const int64_t fault_ns = Number(job.reports[1], "fault_ns");
  ASSERT_GT(fault_ns, 0);
  const int64_t stalled = absl::ToInt64Milliseconds(job.stalled);
  for (const int rank : {0, 2, 3}) {
    EXPECT_EQ(Text(job.reports[rank], "code"), "OK");
    ASSERT_GT(Number(job.reports[rank], "left_ns"), 0);
    EXPECT_LE(Milliseconds(Number(job.reports[rank], "left_ns") - fault_ns), kDeadlineMs + 500 + stalled);
  }
  EXPECT_LE(Milliseconds(job.end_ns - fault_ns), kDeadlineMs + 3000 + stalled);
  EXPECT_THAT(job.orphans, ::testing::IsEmpty());
}

TEST(ProcessFaultTest, HealthyJobEndsWithZero) {
  const JobResult job = RunWithFault("none", -1, {"--calls=20"});
  ASSERT_TRUE(job.finished);
  EXPECT_EQ(job.exit_code, 0);
  for (const RankReport& report : job.reports) EXPECT_EQ(Text(report, "code"), "OK");
}

}  // namespace
}  // namespace evenkeel::comm
