// The conformance suite over ranks that are threads.
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

enum class Form { kInline, kWorker, kNoEager, kTwoLevel, kTwoLevelNoEager };

ConformanceOptions OptionsOf(Form form, int ranks) {
  ConformanceOptions options;
  if (ranks > 4) options.large = 5003;  // the oracle's work grows with the square of the ranks
  if (form == Form::kWorker) options.stream_mode = HostDevice::StreamMode::kWorker;
  if (form != Form::kInline) options.large = 3001;
  options.two_level = form == Form::kTwoLevel || form == Form::kTwoLevelNoEager;
  return options;
}

using Parameter = std::tuple<int, Form, int>;  // ranks, form, case

// Ranks on nodes in turn, unlike the consecutive blocks of the other worlds of two levels.
Topology Interleaved(int ranks) {
  std::vector<int> nodes(ranks);
  for (int rank = 0; rank < ranks; ++rank) nodes[rank] = rank % 3;
  return Topology(nodes);
}

void RunCase(int ranks, Form form, const ConformanceCase& c) {
  if (ranks < c.min_world) GTEST_SKIP() << "needs " << c.min_world << " ranks";
  InProcessOptions options{.world_size = ranks, .deadline = absl::Seconds(20)};
  if (form == Form::kNoEager || form == Form::kTwoLevelNoEager) options.eager_bytes = 0;
  if (OptionsOf(form, ranks).two_level) {
    options.two_level = true;
    options.topology = ranks == 9 ? Interleaved(ranks) : *Topology::Blocks(ranks, ranks == 6 ? 3 : 2);
  }
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create(options));
  const std::vector<absl::Status> statuses = RunRanks(*world, c.run);
  for (int rank = 0; rank < ranks; ++rank) EXPECT_OK(statuses[rank]) << c.name << " rank " << rank << "/" << ranks;
}

class InProcessConformanceTest : public ::testing::TestWithParam<Parameter> {};

TEST_P(InProcessConformanceTest, RightCalls) {
  const auto [ranks, form, index] = GetParam();
  RunCase(ranks, form, OperationCases(OptionsOf(form, ranks))[index]);
}

// "C16_NanInfinityAndZeroOnEveryRank_Ranks3Inline".
std::string NameOf(const ::testing::TestParamInfo<Parameter>& info) {
  const char* const forms[] = {"Inline", "Worker", "NoEager", "TwoLevel", "TwoLevelNoEager"};
  return absl::StrCat(OperationCases({})[std::get<2>(info.param)].name, "_Ranks", std::get<0>(info.param),
                      forms[static_cast<int>(std::get<1>(info.param))]);
}

constexpr int kNumOperationCases = 16;

INSTANTIATE_TEST_SUITE_P(Worlds, InProcessConformanceTest,
                         ::testing::Combine(::testing::Range(1, 9), ::testing::Values(Form::kInline),
                                            ::testing::Range(0, kNumOperationCases)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Forms, InProcessConformanceTest,
                         ::testing::Combine(::testing::Values(2, 3, 5),
                                            ::testing::Values(Form::kWorker, Form::kNoEager),
                                            ::testing::Range(0, kNumOperationCases)),
                         NameOf);

// 4 and 8 ranks: nodes of 2; 5: not a grid, so direct; 6: nodes of 3, whose sums are no subtrees; 9: interleaved.
INSTANTIATE_TEST_SUITE_P(TwoLevels, InProcessConformanceTest,
                         ::testing::Combine(::testing::Values(4, 5, 6, 8, 9),
                                            ::testing::Values(Form::kTwoLevel, Form::kTwoLevelNoEager),
                                            ::testing::Range(0, kNumOperationCases)),
                         NameOf);

// One test a row of the fault table.
class InProcessAgreementTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(InProcessAgreementTest, SameErrorEverywhere) {
  const auto [ranks, index] = GetParam();
  RunCase(ranks, Form::kInline, AgreementCases({})[index]);
}

std::string AgreementName(const ::testing::TestParamInfo<std::tuple<int, int>>& info) {
  return absl::StrCat(AgreementCases({})[std::get<1>(info.param)].name, "_Ranks", std::get<0>(info.param));
}

INSTANTIATE_TEST_SUITE_P(FaultTable, InProcessAgreementTest,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Range(0, 10)), AgreementName);

TEST(InProcessConformanceTest, AllCasesAreInstantiated) {
  EXPECT_EQ(AgreementCases({}).size(), 10u);
  EXPECT_EQ(OperationCases({}).size(), static_cast<size_t>(kNumOperationCases));
}

}  // namespace
}  // namespace evenkeel::comm
