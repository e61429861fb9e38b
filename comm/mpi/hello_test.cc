#include "evenkeel/comm/mpi/hello.h"

#include <functional>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

std::vector<Hello> EqualHellos(int size) {
  std::vector<Hello> hellos(size);
  for (int rank = 0; rank < size; ++rank) {
    hellos[rank] = {.protocol = 1, .build = 2, .config = 3, .options = 4, .rank = rank, .size = size, .process = {}};
  }
  return hellos;
}

TEST(HelloTest, EqualOnesAgree) { EXPECT_OK(CompareHellos(EqualHellos(4), 2)); }

TEST(HelloTest, C10_EveryFieldOnEveryRankIsFound) {
  const std::pair<std::function<void(Hello&)>, const char*> changes[] = {
      {[](Hello& h) { h.magic = 0; }, "another language"},
      {[](Hello& h) { h.protocol = 9; }, "protocol versions differ"},
      {[](Hello& h) { h.size = 9; }, "world sizes differ"},
      {[](Hello& h) { h.build = 9; }, "builds differ"},
      {[](Hello& h) { h.options = 9; }, "options of the backend differ"},
      {[](Hello& h) { h.config = 9; }, "configurations differ"},
  };
  for (const int size : {2, 3, 4}) {
    for (int odd = 0; odd < size; ++odd) {
      for (const auto& [change, what] : changes) {
        std::vector<Hello> hellos = EqualHellos(size);
        change(hellos[odd]);
        const absl::Status status = CompareHellos(hellos, 0);
        EXPECT_THAT(status, testutil::StatusIs(absl::StatusCode::kFailedPrecondition, ::testing::HasSubstr(what)));
        ASSERT_TRUE(GetErrorContext(status).has_value());
        EXPECT_EQ(GetErrorContext(status)->findings.size(), static_cast<size_t>(size));
      }
    }
  }
}

TEST(HelloTest, HostsAreNodesInTheOrderOfTheirFirstRank) {
  std::vector<Hello> hellos = EqualHellos(4);
  hellos[0].process.host = hellos[2].process.host = 77;
  hellos[1].process.host = hellos[3].process.host = 11;
  const Topology topology = TopologyOfHosts(hellos);
  EXPECT_EQ(topology.node(0), 0);
  EXPECT_EQ(topology.node(1), 1);
  EXPECT_EQ(topology.node(2), 0);
  EXPECT_EQ(topology.node(3), 1);
}

}  // namespace
}  // namespace evenkeel::comm
