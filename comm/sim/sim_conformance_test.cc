// The conformance suite of backends over simulated ranks, and that a seed decides everything.
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/failing_scratch.h"
#include "evenkeel/comm/testing/registered_tests.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

FailingScratch* Scratch() {
  static FailingScratch scratch;
  return &scratch;
}

struct Parameter {
  SimOptions options;
  ConformanceCase c;
  friend std::ostream& operator<<(std::ostream& out, const Parameter& p) {
    return out << p.c.name << " on " << p.options.world_size << " ranks";
  }
};

// Every case that a world is large enough for; C12 in pieces of a thousand bytes, nothing with the record.
std::vector<Parameter> Parameters(const std::vector<int>& worlds, const SimOptions& options) {
  std::vector<Parameter> parameters;
  for (const int ranks : worlds) {
    for (ConformanceCase& c : ConformanceCases({.large = 3001, .two_level = options.two_level, .scratch = Scratch()})) {
      if (ranks < c.min_world) continue;
      parameters.push_back({options, std::move(c)});
      parameters.back().options.world_size = ranks;
      parameters.back().options.scratch = Scratch();
      if (options.two_level) parameters.back().options.topology = *Topology::Blocks(ranks, 2);
    }
  }
  return parameters;
}

class SimConformanceTest : public ::testing::TestWithParam<Parameter> {};

TEST_P(SimConformanceTest, Holds) {
  const auto& [options, c] = GetParam();
  ASSERT_OK_AND_ASSIGN(auto world, SimWorld::Create(options));
  const std::vector<absl::Status> statuses = world->Run(c.run);
  world.reset();
  EXPECT_EQ(Scratch()->num_live(), 0);
  for (int rank = 0; rank < options.world_size; ++rank) EXPECT_OK(statuses[rank]) << c.name << " rank " << rank;
}

std::string NameOf(const ::testing::TestParamInfo<Parameter>& info) {
  return absl::StrCat(info.param.c.name, "_Ranks", info.param.options.world_size);
}

INSTANTIATE_TEST_SUITE_P(Worlds, SimConformanceTest,
                         ::testing::ValuesIn(Parameters({1, 2, 3, 4, 5, 6, 7, 8}, {.seed = 5})), NameOf);
INSTANTIATE_TEST_SUITE_P(C12_PiecesOfAThousandBytes, SimConformanceTest,
                         ::testing::ValuesIn(Parameters({3}, {.seed = 6, .eager_bytes = 0, .piece_bytes = 1000})),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(TwoLevels, SimConformanceTest, ::testing::ValuesIn(Parameters({4}, {.two_level = true})),
                         NameOf);

// Every case on 1 to 8 ranks.
TEST(SimConformanceListTest, EveryCaseIsATestInEveryWorld) {
  const std::set<std::string> tests = RegisteredTests();
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const ConformanceCase& c : ConformanceCases({.scratch = Scratch()})) {
      if (ranks < c.min_world) continue;
      const std::string test = absl::StrCat("Worlds/SimConformanceTest.Holds/", c.name, "_Ranks", ranks);
      EXPECT_EQ(tests.count(test), 1u) << test;
    }
  }
}

// What every rank gets, in one world.
absl::StatusOr<std::vector<std::vector<OperationDigest>>> Digests(const SimOptions& options, uint64_t* log) {
  EK_ASSIGN_OR_RETURN(auto world, SimWorld::Create(options));
  std::vector<std::vector<OperationDigest>> digests(options.world_size);
  const std::vector<absl::Status> statuses = world->Run([&digests](Backend& rank) -> absl::Status {
    EK_ASSIGN_OR_RETURN(digests[rank.rank()], DigestAllOperations(rank, {DType::kF32, DType::kBF16}, {1, 500}));
    return absl::OkStatus();
  });
  EK_RETURN_IF_ERROR(FirstFailure(statuses));
  *log = world->log_digest();
  return digests;
}

TEST(SimWorldTest, ASeedReplaysExactly) {
  uint64_t first = 0, again = 0, other = 0;
  ASSERT_OK(Digests({.world_size = 3, .seed = 1}, &first));
  ASSERT_OK(Digests({.world_size = 3, .seed = 1}, &again));
  ASSERT_OK(Digests({.world_size = 3, .seed = 2}, &other));
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
}

TEST(SimWorldTest, C18_BitsDoNotDependOnScheduleOrPieces) {
  for (const int ranks : {2, 3, 5}) {
    uint64_t log = 0;
    ASSERT_OK_AND_ASSIGN(const auto expected, Digests({.world_size = ranks, .seed = 1}, &log));
    for (uint64_t seed = 2; seed < 6; ++seed) {
      const SimOptions options{.world_size = ranks,
                               .seed = seed,
                               .jitter = 20,
                               .eager_bytes = static_cast<int64_t>(seed % 2 * 300),
                               .piece_bytes = static_cast<int64_t>(64 * seed)};
      ASSERT_OK_AND_ASSIGN(const auto got, Digests(options, &log));
      EXPECT_EQ(got, expected) << ranks << " ranks, seed " << seed;
    }
  }
}

}  // namespace
}  // namespace evenkeel::comm
