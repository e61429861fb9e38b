// Routers of several ranks: one capacity, one routing over the lanes, and ranks that cannot route.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/testing/router_bench.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

using RankBody = std::function<absl::Status(int lane, int source, const RouterGroups& groups)>;

// Runs `body` on every rank of a layout; lane = rank % tp, source = rank / tp.
std::vector<absl::Status> RunMesh(const comm::MeshShape& shape, const RankBody& body) {
  auto world = comm::InProcessWorld::Create({.world_size = shape.tp * shape.dp, .deadline = absl::Seconds(20)});
  EXPECT_OK(world.status());
  return comm::RunRanks(**world, [&](comm::Backend& backend) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(shape));
    EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(mesh.GroupOf(comm::Axis::kTp, backend.rank())));
    EK_ASSIGN_OR_RETURN(const auto ep, backend.CreateGroup(mesh.GroupOf(comm::Axis::kEp, backend.rank())));
    return body(mesh.Coordinate(comm::Axis::kTp, backend.rank()), mesh.Coordinate(comm::Axis::kDp, backend.rank()),
                {.tp = tp.get(), .ep = ep.get(), .tp_size = shape.tp});
  });
}

// Experts with expert TP, one EP group per lane.
std::vector<absl::Status> RunLayout(int tp_size, int ep_size, const RankBody& body) {
  return RunMesh({.tp = tp_size, .ep = ep_size, .dp = ep_size, .etp = tp_size}, body);
}

// Different token counts on every source, every capacity mode, expert TP on: one capacity, a multiple of T, everywhere;
// and random routing that is the same on all lanes because no lane enters the key (the digest check would object).
TEST(RouterRanksTest, Trail1_Trail3_Trail4_Trail21_OneCapacityAndOneRouting) {
  constexpr int kTp = 2, kEp = 3;
  for (const CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop, CapacityMode::kDropless}) {
    for (const int k : {1, 2, 3}) {
      RouterConfig config = Config(8, 6, k);
      config.capacity.mode = mode;
      config.capacity.factor = *Rational::Parse("1.25");
      config.capacity.min_capacity = 1;
      config.noise = SelectionNoise::kAllChoices;
      config.jitter = 0.1f;
      std::vector<RoutingDecision> decisions(kTp * kEp);
      const auto statuses = RunLayout(kTp, kEp, [&](int lane, int source, const RouterGroups& groups) -> absl::Status {
        RouterBench bench;
        std::vector<float> x = Values(8 * (source == 1 ? 0 : 11 + 6 * source), absl::StrCat("x", source));
        const RouterStep step{.seed = 9, .step = 4, .source = static_cast<uint64_t>(source)};
        EK_ASSIGN_OR_RETURN(decisions[source * kTp + lane], bench.Route(config, x, step, groups));
        return decisions[source * kTp + lane].Validate();
      });
      for (const absl::Status& status : statuses) ASSERT_OK(status);
      for (int rank = 0; rank < kTp * kEp; ++rank) {
        EXPECT_EQ(decisions[rank].capacity, decisions[0].capacity);
        EXPECT_EQ(decisions[rank].capacity % kTp, 0);
        EXPECT_EQ(decisions[rank].Digest(), decisions[rank / kTp * kTp].Digest());
      }
      if (mode == CapacityMode::kNoDrop) {
        int64_t fullest = 0;
        for (const RoutingDecision& d : decisions) {
          fullest = std::max(fullest, *std::max_element(d.assigned.begin(), d.assigned.end()));
          EXPECT_EQ(d.kept, d.assigned);
        }
        EXPECT_EQ(decisions[0].capacity, (fullest + 1) / 2 * 2);
      }
    }
  }
}

// Whole experts: EP groups span lanes, and where T and E divide neither the other, they cut TP groups in two. Then the
// maximum has to travel through lanes and EP groups until all have it.
TEST(RouterRanksTest, Trail3_Trail4_OneCapacityWhereEpGroupsCutTpGroups) {
  for (const comm::MeshShape& shape :
       {comm::MeshShape{.tp = 2, .ep = 3, .dp = 3, .etp = 1}, comm::MeshShape{.tp = 2, .ep = 4, .dp = 4, .etp = 1},
        comm::MeshShape{.tp = 4, .ep = 2, .dp = 2, .etp = 1}, comm::MeshShape{.tp = 3, .ep = 2, .dp = 2, .etp = 1},
        comm::MeshShape{.tp = 2, .ep = 5, .dp = 5, .etp = 1}, comm::MeshShape{.tp = 4, .ep = 3, .dp = 3, .etp = 1},
        comm::MeshShape{.tp = 4, .ep = 6, .dp = 3, .etp = 1}, comm::MeshShape{.tp = 3, .ep = 1, .dp = 2, .etp = 1}}) {
    SCOPED_TRACE(absl::StrCat("tp ", shape.tp, " ep ", shape.ep, " dp ", shape.dp));
    for (int fullest = 0; fullest < shape.dp; ++fullest) {
      std::vector<int64_t> capacity(shape.tp * shape.dp, -1);
      const auto statuses = RunMesh(shape, [&](int lane, int source, const RouterGroups& groups) -> absl::Status {
        RouterBench bench;
        RouterConfig config = Config(4, 60, 2);
        config.capacity.mode = CapacityMode::kNoDrop;
        std::vector<float> x(4 * (source == fullest ? 23 : 3), 1.0f);  // equal tokens: all to the same two experts
        EK_ASSIGN_OR_RETURN(const RoutingDecision d, bench.Route(config, x, {}, groups));
        capacity[source * shape.tp + lane] = d.capacity;
        return d.Validate();
      });
      for (const absl::Status& status : statuses) ASSERT_OK(status);
      // Equal on every EP group and every TP group, and enough for the source that needs most.
      EXPECT_GE(capacity[fullest * shape.tp], 23);
      const comm::Mesh mesh = *comm::Mesh::Create(shape);
      for (const comm::Axis axis : {comm::Axis::kEp, comm::Axis::kTp}) {
        for (const comm::Group& group : mesh.Groups(axis)) {
          for (const int rank : group.ranks) EXPECT_EQ(capacity[rank], capacity[group.ranks[0]]);
        }
      }
    }
  }
}

// Ranks outside the EP group take no part: they may be in another stage, or finished.
TEST(RouterRanksTest, Trail15_OnlyTheOwnGroupsAreAsked) {
  const auto statuses =
      RunMesh({.tp = 1, .ep = 2, .dp = 4, .etp = 1}, [&](int, int source, const RouterGroups& groups) -> absl::Status {
        if (source >= 2) return absl::OkStatus();
        RouterBench bench;
        RouterConfig config = Config(8, 4, 2);
        config.capacity.mode = CapacityMode::kNoDrop;
        return bench.Route(config, Values(8 * 5, "x"), {}, groups).status();
      });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

// One lane's gate is one ulp away at a tie: every lane gets the same error, which names the token and both decisions.
TEST(RouterRanksTest, C41_Trail21_ALaneThatRoutesDifferentlyIsNamed) {
  for (int odd = 0; odd < 3; ++odd) {
    const auto statuses = RunLayout(3, 1, [&](int lane, int, const RouterGroups& groups) -> absl::Status {
      RouterBench bench;
      bench.gate = {1.0f, 1.0f, 0.5f};  // experts 0 and 1 tie
      if (lane == odd) bench.gate[1] = std::nextafter(1.0f, 2.0f);
      RouterConfig config = Dropless(1, 3, 1);
      // Tokens 0 and 1 are zero and tie on all lanes. Token 2 is where lanes part.
      return bench.Route(config, {0, 0, 1, 1}, {}, groups).status();
    });
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, StatusIs(kFailedPrecondition,
                                   AllOf(HasSubstr("moe route group=blocks.1.moe"), HasSubstr("first at token 2"),
                                         HasSubstr(absl::StrCat("rank ", odd, " chose expert 1 slot 0")),
                                         HasSubstr("expert 0 slot 2"))));
      ASSERT_TRUE(GetErrorContext(status).has_value());
      EXPECT_EQ(GetErrorContext(status)->findings.size(), 3u);
    }
  }
}

TEST(RouterRanksTest, C41_LanesWithDifferentTokenCountsAreNamed) {
  const auto statuses = RunLayout(2, 1, [&](int lane, int, const RouterGroups& groups) {
    RouterBench bench;
    return bench.Route(Dropless(4, 4, 1), Values(4 * (2 + lane), "x"), {}, groups).status();
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(kFailedPrecondition,
                                 AllOf(HasSubstr("rank 0 has 2 tokens"), HasSubstr("rank 1 has 3 tokens"))));
  }
}

// Fewer tokens than lanes, down to none: small batches are right.
TEST(RouterRanksTest, C41_FewTokens) {
  for (int64_t tokens = 0; tokens <= 6; ++tokens) {
    const auto statuses = RunLayout(3, 1, [&](int, int, const RouterGroups& groups) -> absl::Status {
      RouterBench bench;
      EK_ASSIGN_OR_RETURN(const RoutingDecision d, bench.Route(Config(4, 4, 2), Values(4 * tokens, "x"), {}, groups));
      return d.capacity % 3 == 0 ? d.Validate() : absl::InternalError("capacity is no multiple of T");
    });
    for (const absl::Status& status : statuses) ASSERT_OK(status);
  }
}

// A rank that cannot route still takes part, so nobody waits for it: its peers hear of it at once.
TEST(RouterRanksTest, C38_AFailingSourceDoesNotHangItsPeers) {
  const auto statuses = RunLayout(2, 2, [&](int, int source, const RouterGroups& groups) {
    RouterBench bench;
    std::vector<float> x = Values(8 * 6, "x");
    if (source == 1) x[17] = std::nanf("");
    return bench.Route(Config(8, 4, 2), x, {}, groups).status();
  });
  for (int rank = 0; rank < 4; ++rank) {
    if (rank / 2 == 1) {
      EXPECT_THAT(statuses[rank], StatusIs(kInvalid, HasSubstr("token 2")));
    } else {
      EXPECT_THAT(statuses[rank],
                  StatusIs(kFailedPrecondition, HasSubstr("another rank of the EP group could not route")));
    }
  }
}

// Only one lane sees the bad value (its memory differs): the other lane learns that from the digest exchange.
TEST(RouterRanksTest, C38_AFailingLaneDoesNotHangItsPeers) {
  const auto statuses = RunLayout(2, 1, [&](int lane, int, const RouterGroups& groups) {
    RouterBench bench;
    std::vector<float> x = Values(8 * 6, "x");
    if (lane == 1) x[17] = std::nanf("");
    return bench.Route(Dropless(8, 4, 2), x, {}, groups).status();
  });
  EXPECT_THAT(statuses[0], StatusIs(kFailedPrecondition, HasSubstr("rank 1 could not route its tokens")));
  EXPECT_THAT(statuses[1], StatusIs(kInvalid, HasSubstr("token 2")));
}

// Other sources' tokens never change mine: with equal counts nothing is exchanged but the capacity.
TEST(RouterRanksTest, OtherSourcesTokensNeverChangeMine) {
  std::vector<uint64_t> digests;
  for (const char* other : {"one", "two"}) {
    uint64_t mine = 0;
    const auto statuses = RunLayout(1, 2, [&](int, int source, const RouterGroups& groups) -> absl::Status {
      RouterBench bench;
      EK_ASSIGN_OR_RETURN(const RoutingDecision d,
                          bench.Route(Config(8, 4, 2), Values(8 * 9, source == 0 ? "mine" : other), {}, groups));
      if (source == 0) mine = d.Digest();
      return absl::OkStatus();
    });
    for (const absl::Status& status : statuses) ASSERT_OK(status);
    digests.push_back(mine);
  }
  EXPECT_EQ(digests[0], digests[1]);
}

}  // namespace
}  // namespace evenkeel::moe
