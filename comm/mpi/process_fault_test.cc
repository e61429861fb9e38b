// Faults of real processes: one rank of a job is killed, stopped or exits at a random moment. The others must name it
// in time, the job must end in time, and nobody may be left behind. The limits are the guarantee's, plus the time for
// which the machine kept a waiting thread from running.
//
// The environment variable EVENKEEL_FAULT_RUNS sets the number of random moments per kind of fault (default: a few),
// and EVENKEEL_FAULT_SEED the seed, which every failure prints.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mpi/testing/fault_job.h"
#include "evenkeel/runtime/base/philox.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

constexpr const char* kOperations[] = {"all_reduce", "all_to_all", "reduce_scatter", "all_gather"};

// Runs `action` at random moments, in one operation after the other, and checks what the survivors say and when.
void CheckRandomMoments(const std::string& action, const std::string& expected_code, int64_t default_runs) {
  const int64_t runs = FromEnvironment("EVENKEEL_FAULT_RUNS", default_runs);
  const int64_t seed = FromEnvironment("EVENKEEL_FAULT_SEED", 1);
  const PhiloxStream random(PhiloxKey(static_cast<uint64_t>(seed)).Add(action));
  int64_t slowest_return = 0, slowest_end = 0, most_stalled = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const auto victim = static_cast<int>(random.Below(2 * run, kFaultRanks));
    const auto after_us = static_cast<int64_t>(random.Below(2 * run + 1, 60'000));
    SCOPED_TRACE(absl::StrCat(action, " seed ", seed, " run ", run, ": rank ", victim, " after ", after_us, " us"));
    const std::string operation = kOperations[run % 4];
    SCOPED_TRACE(operation);
    const JobResult job = RunWithFault(
        action, absl::StrCat(victim), {absl::StrCat("--after_us=", after_us), absl::StrCat("--operation=", operation)});
    ASSERT_TRUE(job.finished);
    EXPECT_NE(job.exit_code, 0);
    EXPECT_THAT(job.orphans, ::testing::IsEmpty());
    const int64_t fault_ns = Number(job.reports[victim], "fault_ns");
    ASSERT_GT(fault_ns, 0);
    const int64_t stalled = absl::ToInt64Milliseconds(job.stalled);
    EXPECT_LE(Milliseconds(job.end_ns - fault_ns), kFaultDeadlineMs + 3000 + stalled) << "the job's end";
    most_stalled = std::max(most_stalled, stalled);
    slowest_end = std::max(slowest_end, Milliseconds(job.end_ns - fault_ns));
    for (int rank = 0; rank < kFaultRanks; ++rank) {
      if (rank == victim) continue;
      const RankReport& report = job.reports[rank];
      EXPECT_EQ(Text(report, "code"), expected_code) << "rank " << rank << ": " << Text(report, "message");
      EXPECT_EQ(Text(report, "ranks"), absl::StrCat(victim)) << "rank " << rank << ": " << Text(report, "message");
      EXPECT_THAT(
          Text(report, "message"),
          ::testing::AnyOf(::testing::ContainsRegex(absl::StrCat("its last call: ", operation, ".* seq [0-9]+")),
                           ::testing::HasSubstr("nothing came from it in this group")));
      const int64_t took = Milliseconds(Number(report, "return_ns") - fault_ns);
      EXPECT_LE(took, kFaultDeadlineMs + 500 + stalled) << "rank " << rank;
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

}  // namespace
}  // namespace evenkeel::comm
