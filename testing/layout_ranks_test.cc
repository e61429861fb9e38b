// Layouts compared on the ranks of one world, some of which have no part in the smaller ones.
#include <string>
#include <vector>

#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/layout_parity.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/parity_test_util.h"
#include "evenkeel/testing/training_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

constexpr int kRanks = 4;

// One rank, two ranks in a layout of their own, and all four in two.
LayoutParityConfig Config() {
  LayoutParityConfig config;
  config.base = SmallConfig(1, 1, 1, {}).base;
  config.base.model.heads = 8;
  config.base.model.numerics = moe::ExpertNumerics::kCanonical;
  config.base.batches = 4;
  config.steps = 2;
  config.runs = {{*NamedEntry("reference", "flat"), {.tp = 1, .ep = 1, .dp = 1, .etp = 1}},
                 {*NamedEntry("fused", "coalesced"), {.tp = 2, .ep = 1, .dp = 1, .etp = 2}},
                 {*NamedEntry("token_sliced", "flat"), {.tp = 2, .ep = 2, .dp = 2, .etp = 2}},
                 {*NamedEntry("dedup", "flat"), {.tp = 1, .ep = 4, .dp = 4, .etp = 1}}};
  return config;
}

// The results by rank, or the first error.
absl::StatusOr<std::vector<ParityResult>> RunOnRanks(const LayoutParityConfig& config) {
  EK_ASSIGN_OR_RETURN(const auto world, comm::InProcessWorld::Create({.world_size = kRanks}));
  std::vector<ParityResult> results(kRanks);
  EK_RETURN_IF_ERROR(comm::FirstFailure(comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    EK_ASSIGN_OR_RETURN(results[backend.rank()], RunLayoutParity(config, TestCorpus(), backend));
    return absl::OkStatus();
  })));
  return results;
}

TEST(LayoutRanksTest, HaveTheDigestsOfRunsOnTheirOwnThreads) {
  const LayoutParityConfig config = Config();
  ASSERT_OK_AND_ASSIGN(const std::vector<ParityResult> by_rank, RunOnRanks(config));
  ASSERT_OK_AND_ASSIGN(const ParityResult alone, RunLayoutParity(config, TestCorpus()));
  const ParityResult& first = by_rank[0];
  EXPECT_TRUE(first.AllHold()) << ResultText(first);
  ASSERT_EQ(first.runs.size(), config.runs.size());
  for (size_t i = 0; i < first.runs.size(); ++i) {
    EXPECT_EQ(first.runs[i].loss_digest, alone.runs[i].loss_digest);
    EXPECT_EQ(first.runs[i].gradient_digest, alone.runs[i].gradient_digest);
    EXPECT_EQ(first.runs[i].parameter_digest, alone.runs[i].parameter_digest);
    EXPECT_EQ(first.runs[i].note, alone.runs[i].note);
    EXPECT_EQ(first.runs[i].values_compared, alone.runs[i].values_compared);
    EXPECT_EQ(first.runs[i].loss, alone.runs[i].loss);
    EXPECT_EQ(first.runs[i].collectives, alone.runs[i].collectives);
    EXPECT_EQ(first.runs[i].bytes.ep.counted, alone.runs[i].bytes.ep.counted);
    for (const ParityResult& result : by_rank) EXPECT_EQ(result.runs[i].verdict, first.runs[i].verdict);
  }
}

// Every rank learns of a difference, also one that has no part in the run.
TEST(LayoutRanksTest, ADifferenceIsEveryRanksVerdict) {
  LayoutParityConfig config = Config();
  config.runs[1].entry.change = [](TrainingConfig& own) { own.zero3.optimizer.weight_decay = 1e-7; };
  ASSERT_OK_AND_ASSIGN(const std::vector<ParityResult> by_rank, RunOnRanks(config));
  for (const ParityResult& result : by_rank) {
    ASSERT_EQ(result.runs.size(), config.runs.size());
    EXPECT_FALSE(result.AllHold());
    for (size_t i = 0; i < result.runs.size(); ++i) {
      EXPECT_EQ(result.runs[i].verdict == Verdict::kMismatch, i == 1) << ResultText(result);
    }
  }
  ASSERT_TRUE(by_rank[0].runs[1].first_difference.has_value());
  EXPECT_THAT(by_rank[0].runs[1].first_difference->tensor, HasSubstr("parameter "));
}

TEST(LayoutRanksTest, ALayoutThatNeedsMoreRanksIsRefusedOnAll) {
  LayoutParityConfig config = Config();
  config.base.batches = 8;
  config.runs[0].mesh = {.tp = 1, .ep = 1, .dp = 8, .etp = 1};
  const absl::Status status = RunOnRanks(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("reference in tp 1 ep 1 dp 8 etp 1 needs 8 ranks, the world has 4"));
}

}  // namespace
}  // namespace evenkeel::testutil
