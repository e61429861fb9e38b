// Ranks that leave, come late or never, skip calls or share the process among threads: over real processes that all
// stay alive. Killed and stopped processes are process_fault_test's.
#include <dirent.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/testing/stall_meter.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

class MpiAbsenceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(group_, MpiTestWorld().CreateGroup(WorldGroup(MpiTestWorld().size())));
    ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream("absence"));
  }
  // The rank that misbehaves.
  bool odd() const { return MpiTestWorld().rank() == OddRank(); }
  static int OddRank() { return MpiTestWorld().size() - 1; }

  static void ExpectNames(const absl::Status& status, absl::StatusCode code, int rank) {
    EXPECT_EQ(status.code(), code) << status;
    const auto context = GetErrorContext(status);
    ASSERT_TRUE(context.has_value()) << status;
    ASSERT_EQ(context->findings.size(), 1u) << status;
    EXPECT_EQ(context->findings[0].rank, rank) << status;
  }
  // All ranks are well again: a new group works.
  void ExpectNextGroupWorks() {
    group_.reset();
    ASSERT_OK_AND_ASSIGN(auto fresh, MpiTestWorld().CreateGroup(WorldGroup(MpiTestWorld().size())));
    ASSERT_OK_AND_ASSIGN(auto stream, device_->CreateStream("fresh"));
    EXPECT_OK(fresh->Barrier(*stream));
  }

  // Word between ranks that makes no MPI call: a file per rank and cycle, in the folder that the launcher made for the
  // job.
  static std::string GivenUpFile(int cycle, int rank) {
    return absl::StrCat(std::getenv("OMPI_MCA_orte_tmpdir_base"), "/given_up_", cycle, "_", rank);
  }
  static void SayGivenUp(int cycle) { std::ofstream(GivenUpFile(cycle, MpiTestWorld().rank())) << "given up"; }
  static void AwaitOthers(int cycle) {
    const absl::Time limit = absl::Now() + absl::Seconds(20);
    for (int rank = 0; rank < OddRank(); ++rank) {
      while (!std::filesystem::exists(GivenUpFile(cycle, rank))) {
        ASSERT_LT(absl::Now(), limit) << "rank " << rank << " does not give up";
        absl::SleepFor(absl::Milliseconds(5));
      }
    }
  }

  std::unique_ptr<HostDevice> device_ = HostDevice::Create();
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Communicator> group_;
};

TEST_F(MpiAbsenceTest, C08_RankThatLeftIsNamedAtOnce) {
  ASSERT_OK(group_->Barrier(*stream_));
  if (!odd()) {
    const absl::Time begin = absl::Now();
    ExpectNames(group_->Barrier(*stream_), absl::StatusCode::kUnavailable, OddRank());
    EXPECT_LT(absl::Now() - begin, absl::Seconds(5)) << "the deadline is 10 s";
  }
  ExpectNextGroupWorks();
}

TEST_F(MpiAbsenceTest, C08_AbsentRankIsNamedAtTheDeadline) {
  for (int cycle = 0; cycle < 5; ++cycle) {
    ASSERT_OK(group_->Barrier(*stream_));
    ASSERT_OK(group_->SetDeadline(absl::Milliseconds(200)));
    if (odd()) {
      // Nothing of this rank's moves until all others have given up: their records and their notices wait for it, and
      // it must see both at once.
      AwaitOthers(cycle);
      const absl::Status late = group_->Barrier(*stream_);
      EXPECT_FALSE(late.ok());
      EXPECT_TRUE(absl::StrContains(late.message(), "gave the group up")) << late;
    } else {
      const StallMeter stalls;
      const absl::Time begin = absl::Now();
      const absl::Status status = group_->Barrier(*stream_);
      EXPECT_LT(absl::Now() - begin, absl::Milliseconds(200 + 500) + stalls.Total());
      ExpectNames(status, absl::StatusCode::kDeadlineExceeded, OddRank());
      EXPECT_TRUE(absl::StrContains(status.message(), "its last call: barrier")) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "is alive")) << status;
      EXPECT_TRUE(absl::IsAborted(group_->Barrier(**device_->CreateStream("again"))));
      SayGivenUp(cycle);
    }
    ExpectNextGroupWorks();
    if (HasFailure()) return;
    ASSERT_OK_AND_ASSIGN(group_, MpiTestWorld().CreateGroup(WorldGroup(MpiTestWorld().size())));
    ASSERT_OK_AND_ASSIGN(stream_, device_->CreateStream("absence"));
  }
}

TEST_F(MpiAbsenceTest, C24_SlowRankInsideItsLimitIsNoError) {
  ASSERT_OK(group_->SetDeadline(absl::Seconds(3)));
  if (odd()) absl::SleepFor(absl::Seconds(1));
  EXPECT_OK(group_->Barrier(*stream_));
  if (!odd()) {
    EXPECT_EQ(group_->stragglers()[OddRank()].calls, 1);
  }
}

// All ranks are inside CreateGroup, and one wants another group.
TEST_F(MpiAbsenceTest, AnotherGroupOnOneRankIsRefusedByAll) {
  if (odd()) absl::SleepFor(absl::Milliseconds(300));
  Group wanted = WorldGroup(MpiTestWorld().size());
  if (odd()) wanted = {.axis = Axis::kTp, .name = "tp", .ranks = {0, OddRank()}};
  const auto group = MpiTestWorld().CreateGroup(wanted);
  ASSERT_FALSE(group.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(group.status())) << group.status();
  absl::SleepFor(absl::Milliseconds(300));  // until all have given up
  ExpectNextGroupWorks();
}

TEST_F(MpiAbsenceTest, C30_FaultAfterFaultLeavesNothingBehind) {
  const auto num_descriptors = [] {
    int count = 0;
    DIR* folder = opendir("/proc/self/fd");
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
  };
  const int before = num_descriptors();
  for (int cycle = 0; cycle < 30; ++cycle) {
    ASSERT_OK_AND_ASSIGN(auto group, MpiTestWorld().CreateGroup(WorldGroup(MpiTestWorld().size())));
    ASSERT_OK_AND_ASSIGN(auto stream, device_->CreateStream("cycle"));
    float value = 1;
    const TensorView one(&value, DType::kF32, Shape({1}));
    const absl::Status status = odd() ? group->Barrier(*stream) : group->AllReduce(one, one, ReduceOp::kSum, *stream);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  }
  EXPECT_EQ(num_descriptors(), before);
  ExpectNextGroupWorks();
}

// MPI itself gives wrong sums when two threads share it without rules; here they take turns.
TEST_F(MpiAbsenceTest, ThreadsWithGroupsOfTheirOwnTakeTurns) {
  constexpr int kThreads = 3, kCalls = 100;
  std::vector<std::unique_ptr<Communicator>> groups;
  for (int t = 0; t < kThreads; ++t) {
    ASSERT_OK_AND_ASSIGN(auto group, MpiTestWorld().CreateGroup(WorldGroup(MpiTestWorld().size())));
    groups.push_back(std::move(group));
  }
  std::vector<std::string> failures(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      auto stream = device_->CreateStream(absl::StrCat("thread", t));
      std::vector<int64_t> values(600), sums(600);
      for (int call = 0; call < kCalls && failures[t].empty(); ++call) {
        const int size = MpiTestWorld().size();
        for (int i = 0; i < 600; ++i) values[i] = (MpiTestWorld().rank() + 1) * 1000 * (t + 1) + call + i;
        const absl::Status status =
            groups[t]->AllReduce(ConstTensorView(values.data(), DType::kI64, Shape({600})),
                                 TensorView(sums.data(), DType::kI64, Shape({600})), ReduceOp::kSum, **stream);
        if (!status.ok()) failures[t] = status.ToString();
        for (int i = 0; i < 600 && failures[t].empty(); ++i) {
          const int64_t expected = size * (size + 1) / 2 * 1000 * (t + 1) + size * (call + i);
          if (sums[i] != expected) failures[t] = absl::StrCat("call ", call, " index ", i, ": ", sums[i]);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) EXPECT_EQ(failure, "");
}

}  // namespace
}  // namespace evenkeel::comm
