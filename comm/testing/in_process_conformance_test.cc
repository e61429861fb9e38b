// The conformance suite over ranks that are threads.
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/failing_scratch.h"
#include "evenkeel/comm/testing/registered_tests.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

enum class Form { kInline, kWorker, kNoEager, kTwoLevel, kTwoLevelNoEager };

FailingScratch* Scratch() {
  static FailingScratch scratch;
  return &scratch;
}

ConformanceOptions OptionsOf(Form form, int ranks) {
  ConformanceOptions options;
  if (ranks > 4) options.large = 5003;  // the oracle's work grows with the square of the ranks
  if (form == Form::kWorker) options.stream_mode = HostDevice::StreamMode::kWorker;
  if (form != Form::kInline) options.large = 3001;
  options.two_level = form == Form::kTwoLevel || form == Form::kTwoLevelNoEager;
  options.scratch = Scratch();
  return options;
}

// A case in a world of so many ranks.
struct Parameter {
  int ranks = 1;
  Form form = Form::kInline;
  ConformanceCase c;
  friend std::ostream& operator<<(std::ostream& out, const Parameter& p) {
    return out << p.c.name << " on " << p.ranks << " ranks";
  }
};

// Worlds that are too small for a case have no test of it.
std::vector<Parameter> Parameters(const std::vector<int>& worlds, const std::vector<Form>& forms,
                                  std::vector<ConformanceCase> (*cases)(const ConformanceOptions&)) {
  std::vector<Parameter> parameters;
  for (const int ranks : worlds) {
    for (const Form form : forms) {
      for (ConformanceCase& c : cases(OptionsOf(form, ranks))) {
        if (ranks >= c.min_world) parameters.push_back({ranks, form, std::move(c)});
      }
    }
  }
  return parameters;
}

// Ranks on nodes in turn, unlike the consecutive blocks of the other worlds of two levels.
Topology Interleaved(int ranks) {
  std::vector<int> nodes(ranks);
  for (int rank = 0; rank < ranks; ++rank) nodes[rank] = rank % 3;
  return Topology(nodes);
}

void RunCase(int ranks, Form form, const ConformanceCase& c) {
  InProcessOptions options{.world_size = ranks, .deadline = absl::Seconds(20), .scratch = Scratch()};
  if (form == Form::kNoEager || form == Form::kTwoLevelNoEager) options.eager_bytes = 0;
  if (OptionsOf(form, ranks).two_level) {
    options.two_level = true;
    options.topology = ranks == 9 ? Interleaved(ranks) : *Topology::Blocks(ranks, ranks == 6 ? 3 : 2);
  }
  ASSERT_OK_AND_ASSIGN(auto world, InProcessWorld::Create(options));
  const std::vector<absl::Status> statuses = RunRanks(*world, c.run);
  world.reset();
  EXPECT_EQ(Scratch()->num_live(), 0);
  for (int rank = 0; rank < ranks; ++rank) EXPECT_OK(statuses[rank]) << c.name << " rank " << rank << "/" << ranks;
}

class InProcessConformanceTest : public ::testing::TestWithParam<Parameter> {};

TEST_P(InProcessConformanceTest, Holds) { RunCase(GetParam().ranks, GetParam().form, GetParam().c); }

// "C16_NanInfinityAndZeroOnEveryRank_Ranks3Inline".
std::string NameOf(const ::testing::TestParamInfo<Parameter>& info) {
  const char* const forms[] = {"Inline", "Worker", "NoEager", "TwoLevel", "TwoLevelNoEager"};
  return absl::StrCat(info.param.c.name, "_Ranks", info.param.ranks, forms[static_cast<int>(info.param.form)]);
}

// Every right call on 1 to 8 ranks, every disagreement on 2 to 4.
TEST(InProcessConformanceListTest, EveryCaseIsATestInEveryWorld) {
  const std::set<std::string> tests = RegisteredTests();
  const auto check = [&tests](absl::string_view suite, const ConformanceCase& c, int ranks) {
    const std::string test = absl::StrCat(suite, "/InProcessConformanceTest.Holds/", c.name, "_Ranks", ranks, "Inline");
    EXPECT_EQ(tests.count(test), 1u) << test;
  };
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const ConformanceCase& c : OperationCases({})) check("Worlds", c, ranks);
    if (ranks > 4) continue;
    for (const ConformanceCase& c : AgreementCases({})) {
      if (ranks >= c.min_world) check("FaultTable", c, ranks);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, InProcessConformanceTest,
                         ::testing::ValuesIn(Parameters({1, 2, 3, 4, 5, 6, 7, 8}, {Form::kInline}, OperationCases)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(Forms, InProcessConformanceTest,
                         ::testing::ValuesIn(Parameters({2, 3, 5}, {Form::kWorker, Form::kNoEager}, OperationCases)),
                         NameOf);
// 4 and 8 ranks: nodes of 2; 5: not a grid, so direct; 6: nodes of 3, whose sums are no subtrees; 9: interleaved.
INSTANTIATE_TEST_SUITE_P(TwoLevels, InProcessConformanceTest,
                         ::testing::ValuesIn(Parameters({4, 5, 6, 8, 9}, {Form::kTwoLevel, Form::kTwoLevelNoEager},
                                                        OperationCases)),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(FaultTable, InProcessConformanceTest,
                         ::testing::ValuesIn(Parameters({1, 2, 3, 4}, {Form::kInline}, AgreementCases)), NameOf);
INSTANTIATE_TEST_SUITE_P(Memory, InProcessConformanceTest,
                         ::testing::ValuesIn(Parameters({2, 3, 4, 6, 8}, {Form::kInline, Form::kTwoLevel},
                                                        MemoryCases)),
                         NameOf);

}  // namespace
}  // namespace evenkeel::comm
