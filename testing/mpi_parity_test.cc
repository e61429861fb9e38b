// The same job as processes and as threads: the same bits of every loss and every parameter.
#include <string>
#include <vector>

#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

// Four ranks: tp 2, ep 2, dp 2.
ParityConfig FourRanks(DType dtype) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference", "drop_gather", "fused", "token_sliced", "unsharded"}, 3);
  config.base.model.dtype = dtype;
  config.judge_reference = true;
  return config;
}

class MpiParityTest : public ::testing::TestWithParam<DType> {};

TEST_P(MpiParityTest, ProcessesGiveTheBitsOfThreads) {
  comm::MpiBackend& world = comm::MpiTestWorld();
  ASSERT_EQ(world.size(), 4);
  const ParityConfig config = FourRanks(GetParam());
  ASSERT_OK_AND_ASSIGN(const ParityResult processes, RunParity(config, TestCorpus(), world));
  EXPECT_TRUE(processes.AllHold()) << ResultText(processes);
  // Made by every process for itself: the result must be the same on all of them.
  ASSERT_OK_AND_ASSIGN(const ParityResult threads, RunParityOnThreads(config, TestCorpus()));
  ASSERT_EQ(processes.runs.size(), threads.runs.size());
  for (size_t i = 0; i < threads.runs.size(); ++i) {
    const ParityRun& a = processes.runs[i];
    const ParityRun& b = threads.runs[i];
    EXPECT_EQ(a.loss_digest, b.loss_digest) << a.order;
    EXPECT_EQ(a.parameter_digest, b.parameter_digest) << a.order;
    EXPECT_EQ(a.loss, b.loss) << a.order;
    EXPECT_EQ(a.verdict, b.verdict) << a.order;
    EXPECT_EQ(a.max_abs_diff, b.max_abs_diff) << a.order;
    EXPECT_EQ(a.bytes.ep.counted, b.bytes.ep.counted) << a.order;
    EXPECT_EQ(a.bytes.tp.counted, b.bytes.tp.counted) << a.order;
    EXPECT_EQ(a.collectives, b.collectives) << a.order;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, MpiParityTest, ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

}  // namespace
}  // namespace evenkeel::testutil
