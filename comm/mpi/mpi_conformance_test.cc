// The conformance suite of backends over ranks that are processes. Every rank runs its part of every case.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

// Those that a world of the launched size is large enough for.
std::vector<ConformanceCase> AllCases() {
  std::vector<ConformanceCase> cases;
  for (ConformanceCase& c : ConformanceCases({.scratch = MpiTestScratch()})) {
    if (LaunchedWorldSize() >= c.min_world) cases.push_back(std::move(c));
  }
  // Calls from a worker stream: another thread than the one that makes the groups.
  ConformanceOptions worker{.large = 3001, .stream_mode = HostDevice::StreamMode::kWorker};
  for (ConformanceCase& c : OperationCases(worker)) {
    c.name = absl::StrCat(c.name, "_WorkerStream");
    cases.push_back(std::move(c));
  }
  return cases;
}

class MpiConformanceTest : public ::testing::TestWithParam<ConformanceCase> {};

TEST_P(MpiConformanceTest, Holds) { EXPECT_OK(GetParam().run(MpiTestWorld())); }

INSTANTIATE_TEST_SUITE_P(Cases, MpiConformanceTest, ::testing::ValuesIn(AllCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel::comm
