#include "evenkeel/comm/mpi/hello.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
        const std::vector<RankFinding> findings = GetErrorContext(status)->findings;
        ASSERT_EQ(findings.size(), static_cast<size_t>(size));
        for (int rank = 0; rank < size; ++rank) {  // what each has, the odd one something else than all others
          EXPECT_EQ(findings[rank].rank, rank);
          EXPECT_EQ(findings[rank].had == findings[(odd + 1) % size].had, rank != odd);
        }
      }
    }
  }
}

TEST(HelloTest, C26_TwoProcessesThatAreTheSameRankAreNamed) {
  for (int claimed = 0; claimed < 4; ++claimed) {
    for (int odd = 0; odd < 4; ++odd) {
      if (odd == claimed) continue;
      std::vector<Hello> hellos = EqualHellos(4);
      for (int rank = 0; rank < 4; ++rank) {
        hellos[rank].process.pid = 100 + rank;
        std::snprintf(hellos[rank].process.host_name, sizeof(hellos[rank].process.host_name), "node%d", rank);
      }
      hellos[odd].rank = claimed;
      const absl::Status status = CompareHellos(hellos, 0);
      EXPECT_THAT(status, testutil::StatusIs(absl::StatusCode::kAlreadyExists, ::testing::HasSubstr("same rank")));
      std::vector<RankFinding> expected;
      for (const int rank : {std::min(odd, claimed), std::max(odd, claimed)}) {
        expected.push_back(
            {rank, absl::StrCat("says it is rank ", claimed, ": process ", 100 + rank, " on node", rank)});
      }
      EXPECT_EQ(GetErrorContext(status)->findings, expected);
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
