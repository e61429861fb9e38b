#include "evenkeel/comm/stragglers.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::testing::ElementsAre;

// Keeps what is reported.
struct Reports {
  StragglerOptions options(absl::Duration after) {
    return {.after = after, .report = [this](const StragglerReport& report) {
              absl::MutexLock lock(&mutex);
              all.push_back(report);
            }};
  }
  absl::Mutex mutex;
  std::vector<StragglerReport> all;
};

TEST(StragglersTest, LinesNameWhoWhatAndHowLong) {
  Reports reports;
  StragglerOptions options = reports.options(absl::Seconds(1));
  std::vector<std::vector<int>> counted;
  options.count = [&counted](const StragglerReport& report) { counted.push_back(report.late_world); };
  Stragglers stragglers({4, 5, 6, 7}, options);
  EXPECT_EQ(stragglers.After(absl::Seconds(30)), absl::Seconds(1));
  EXPECT_EQ(stragglers.After(absl::Seconds(2)), absl::Milliseconds(500));
  ErrorContext where{.module = "comm", .operation = "all_reduce", .group = "ep", .epoch = 3, .sequence = 8, .rank = 1};
  where.size = 4;
  where.limit = absl::Seconds(30);
  // Rank 0 is late itself, so rank 1 reports; at the first, second, fourth time.
  for (int i = 0; i < 5; ++i) stragglers.Note(where, {0, 2}, absl::Milliseconds(1200));
  ASSERT_EQ(reports.all.size(), 3u);
  EXPECT_EQ(DescribeStragglers(reports.all[0]),
            "comm all_reduce group=ep epoch=3 seq=8 rank=1/4: waited 1.2s of 30s for ranks 0,2");
  EXPECT_EQ(
      DescribeStragglerCounts(stragglers.counts()),
      "rank 0 was late in 5 calls (6s in all, 1.2s at most); rank 2 was late in 5 calls (6s in all, 1.2s at most)");
  // Another rank waits too, but does not report: one line a call.
  where.rank = 3;
  stragglers.Note(where, {2}, absl::Seconds(1));
  EXPECT_EQ(reports.all.size(), 3u);
  EXPECT_EQ(counted, std::vector<std::vector<int>>(5, {4, 6})) << "every call once";
  EXPECT_EQ(DescribeStragglerCounts(Stragglers({0, 1}, {}).counts()), "");
}

// A second late with a limit of two: the call succeeds, one line says who, in which operation, how long. On a virtual
// clock, for every rank.
TEST(StragglersTest, C24_SlowRankInsideItsLimitIsOneLine) {
  for (int odd = 0; odd < 4; ++odd) {
    Reports reports;
    SimOptions options{.world_size = 4, .deadline = absl::Seconds(2)};
    options.faults = {{.kind = SimFault::Kind::kStop, .rank = odd, .index = 60, .by = absl::Seconds(1)}};
    options.stragglers = reports.options(absl::Seconds(1));
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    std::vector<std::vector<StragglerCount>> counts(4);
    const auto statuses = world->Run([&counts](Backend& rank) -> absl::Status {
      const auto device = HostDevice::Create();
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(4)));
      for (int call = 0; call < 20; ++call) EK_RETURN_IF_ERROR(group->Barrier(*stream));
      counts[rank.rank()] = group->stragglers();
      return absl::OkStatus();
    });
    for (const absl::Status& status : statuses) EXPECT_OK(status);
    EXPECT_EQ(world->num_faults(), 1);
    ASSERT_EQ(reports.all.size(), 1u) << "odd rank " << odd;
    const StragglerReport& report = reports.all[0];
    EXPECT_THAT(report.late, ElementsAre(odd));
    EXPECT_EQ(report.where.rank, odd == 0 ? 1 : 0);
    EXPECT_EQ(report.where.operation, "barrier");
    EXPECT_EQ(report.where.group, "world");
    EXPECT_EQ(report.where.limit, absl::Seconds(2));
    EXPECT_GE(report.waited, absl::Milliseconds(900));
    EXPECT_LE(report.waited, absl::Milliseconds(1100));
    for (int rank = 0; rank < 4; ++rank) {
      for (int other = 0; other < 4; ++other) {
        EXPECT_EQ(counts[rank][other].calls, rank != odd && other == odd ? 1 : 0) << rank << " for " << other;
      }
    }
  }
}

// The same in process, on a real clock.
TEST(StragglersTest, C24_SlowThreadIsCounted) {
  Reports reports;
  ASSERT_OK_AND_ASSIGN(
      const auto world,
      InProcessWorld::Create(
          {.world_size = 3, .deadline = absl::Seconds(60), .stragglers = reports.options(absl::Milliseconds(50))}));
  std::atomic<int> coming{0};
  std::vector<std::vector<StragglerCount>> counts(3);
  const auto statuses = RunRanks(*world, [&](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(3)));
    if (backend.rank() == 2) {
      while (coming.load() < 2) absl::SleepFor(absl::Milliseconds(1));
      absl::SleepFor(absl::Seconds(1));
    }
    coming.fetch_add(1);
    EK_RETURN_IF_ERROR(group->Barrier(*stream));
    counts[backend.rank()] = group->stragglers();
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(counts[rank][2].calls, 1);
    EXPECT_GE(counts[rank][2].longest, absl::Milliseconds(50));
  }
  ASSERT_GE(reports.all.size(), 1u);
  EXPECT_THAT(reports.all[0].late, ::testing::Contains(2));
}

// Long waits for processors are no failures.
TEST(StragglersTest, C24_HundredRunsUnderFullLoadRaiseNoAlarm) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> load;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    load.emplace_back([&stop] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  for (int run = 0; run < 100; ++run) {
    auto world = InProcessWorld::Create({.world_size = 4, .deadline = absl::Seconds(60)});
    EXPECT_OK(world);
    if (!world.ok()) break;
    const auto statuses = RunRanks(**world, [](Backend& backend) -> absl::Status {
      const auto device = HostDevice::Create();
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(4)));
      std::vector<float> sum(3000, 1.0f);
      const TensorView view(sum.data(), DType::kF32, Shape({3000}));
      EK_RETURN_IF_ERROR(group->AllReduce(view, view, ReduceOp::kSum, *stream));
      return group->Barrier(*stream);
    });
    EXPECT_OK(FirstFailure(statuses)) << "run " << run;
  }
  stop.store(true);
  for (std::thread& thread : load) thread.join();
}

}  // namespace
}  // namespace evenkeel::comm
