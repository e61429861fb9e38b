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

class InProcessConformanceTest : public ::testing::TestWithParam<std::tuple<int, Form>> {};

// Ranks on nodes in turn, unlike the consecutive blocks of the other worlds of two levels.
Topology Interleaved(int ranks) {
  std::vector<int> nodes(ranks);
  for (int rank = 0; rank < ranks; ++rank) nodes[rank] = rank % 3;
  return Topology(nodes);
}

void RunCases(int ranks, Form form, const std::vector<ConformanceCase>& cases) {
  InProcessOptions options{.world_size = ranks, .deadline = absl::Seconds(20)};
  if (form == Form::kNoEager || form == Form::kTwoLevelNoEager) options.eager_bytes = 0;
  if (OptionsOf(form, ranks).two_level) {
    options.two_level = true;
    options.topology = ranks == 9 ? Interleaved(ranks) : *Topology::Blocks(ranks, ranks == 6 ? 3 : 2);
  }
  for (const ConformanceCase& c : cases) {
    if (ranks < c.min_world) continue;
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create(options));
    const std::vector<absl::Status> statuses = RunRanks(*world, c.run);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_OK(statuses[rank]) << c.name << " rank " << rank << "/" << ranks;
  }
}

TEST_P(InProcessConformanceTest, Operations) {
  const auto [ranks, form] = GetParam();
  RunCases(ranks, form, OperationCases(OptionsOf(form, ranks)));
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<int, Form>>& info) {
  const char* const forms[] = {"Inline", "Worker", "NoEager", "TwoLevel", "TwoLevelNoEager"};
  return absl::StrCat("Ranks", std::get<0>(info.param), forms[static_cast<int>(std::get<1>(info.param))]);
}

INSTANTIATE_TEST_SUITE_P(Worlds, InProcessConformanceTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 6, 7, 8),
                                            ::testing::Values(Form::kInline)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Forms, InProcessConformanceTest,
                         ::testing::Combine(::testing::Values(2, 3, 5),
                                            ::testing::Values(Form::kWorker, Form::kNoEager)),
                         NameOf);

// 4 and 8 ranks: nodes of 2; 5: not a grid, so direct; 6: nodes of 3, whose sums are no subtrees; 9: interleaved.
INSTANTIATE_TEST_SUITE_P(TwoLevels, InProcessConformanceTest,
                         ::testing::Combine(::testing::Values(4, 5, 6, 8, 9),
                                            ::testing::Values(Form::kTwoLevel, Form::kTwoLevelNoEager)),
                         NameOf);

// One test a row of the fault table.
class InProcessAgreementTest : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(InProcessAgreementTest, SameErrorEverywhere) {
  const auto [ranks, index] = GetParam();
  RunCases(ranks, Form::kInline, {AgreementCases({})[index]});
}

std::string AgreementName(const ::testing::TestParamInfo<std::tuple<int, int>>& info) {
  return absl::StrCat(AgreementCases({})[std::get<1>(info.param)].name, "_Ranks", std::get<0>(info.param));
}

INSTANTIATE_TEST_SUITE_P(FaultTable, InProcessAgreementTest,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Range(0, 10)), AgreementName);

TEST(InProcessAgreementTest, AllCasesAreInstantiated) { EXPECT_EQ(AgreementCases({}).size(), 10u); }

}  // namespace
}  // namespace evenkeel::comm
