#include "evenkeel/tools/bench/comm_report.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMiB = 1 << 20;

TEST(CommReportTest, KeepsTheShortestWindow) {
  CommReport report;
  const Row row = {Kind::kInProcess, Op::kAllGather, 2, kMiB};
  report.Add(row, 50);
  report.Add(row, 40);
  report.Add(row, 60);
  EXPECT_EQ(report.Find(row), 40);
  EXPECT_EQ(report.Find({Kind::kCopy, Op::kAllGather, 2, kMiB}), std::nullopt);
}

TEST(CommReportTest, TableHasRatiosOfSpeed) {
  CommReport report;
  report.Add({Kind::kInProcess, Op::kAllToAll, 4, kMiB}, 200);
  report.Add({Kind::kCopy, Op::kAllToAll, 4, kMiB}, 150);
  report.Add({Kind::kRawMpi, Op::kAllToAll, 4, kMiB}, 800);
  report.Add({Kind::kMpi, Op::kAllToAll, 4, kMiB}, 1000);
  EXPECT_THAT(report.Table(), AllOf(HasSubstr("all_to_all, 4 ranks"), HasSubstr("0.75"), HasSubstr("4.00"),
                                    HasSubstr("0.80"), Not(HasSubstr("all_gather"))));
}

TEST(CommReportTest, TargetIsMissedByTheRowsThatMissIt) {
  CommReport report;
  for (const int64_t bytes : {kMiB, 4 * kMiB}) report.Add({Kind::kRawMpi, Op::kAllGather, 2, bytes}, 90);
  report.Add({Kind::kMpi, Op::kAllGather, 2, kMiB}, 95);
  report.Add({Kind::kMpi, Op::kAllGather, 2, 4 * kMiB}, 105);
  EXPECT_THAT(report.Targets(), HasSubstr("missed        mpi >= 0.9 of raw MPI, from 1 MiB; "
                                          "all_gather 2 ranks 4 MiB 0.86\n"));
  report.Add({Kind::kMpi, Op::kAllGather, 2, 4 * kMiB}, 100);
  EXPECT_THAT(report.Targets(), HasSubstr("met           mpi >= 0.9 of raw MPI, from 1 MiB: "
                                          "worst 0.90 (all_gather 2 ranks 4 MiB)\n"));
}

TEST(CommReportTest, TargetWithoutRowsIsNotMeasured) {
  const CommReport report;
  EXPECT_THAT(report.Targets(), AllOf(HasSubstr("not measured  in_process"), HasSubstr("not measured  the fingerprint"),
                                      Not(HasSubstr("met   ")), Not(HasSubstr("missed"))));
  EXPECT_EQ(report.Table(), "");
}

TEST(CommReportTest, FingerprintIsTheBarrierOfFourProcesses) {
  CommReport report;
  report.Add({Kind::kMpi, Op::kBarrier, 4, 1 << 10}, 26);
  EXPECT_THAT(report.Targets(), HasSubstr("missed        the fingerprint"));
  report.Add({Kind::kMpi, Op::kBarrier, 4, 1 << 10}, 24);
  EXPECT_THAT(report.Targets(), HasSubstr("met           the fingerprint"));
}

}  // namespace
}  // namespace evenkeel::bench
