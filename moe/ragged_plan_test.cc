#include "evenkeel/moe/ragged_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <vector>

#include "evenkeel/moe/random_routing.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

TEST(OwnTokensTest, C41_PartitionsAnyCountOverAnyLanes) {
  for (int t = 1; t <= 8; ++t) {
    for (int64_t tokens = 0; tokens <= 2 * t + 1; ++tokens) {
      int64_t next = 0;
      for (int lane = 0; lane < t; ++lane) {
        const TokenRange own = OwnTokens(tokens, t, lane);
        EXPECT_EQ(own.begin, next);
        EXPECT_GE(own.size(), tokens / t);
        EXPECT_LE(own.size(), (tokens + t - 1) / t);
        next = own.end;
      }
      EXPECT_EQ(next, tokens);
    }
  }
  EXPECT_EQ(OwnTokens(8, 2, 1), (TokenRange{4, 8}));
}

// A row that says where it came from.
using Row = std::tuple<int, int64_t>;  // replica, route of the whole replica

// All ranks of one layout, exchanges done by hand.
struct World {
  int tp = 1;
  int replicas = 1;  // data-parallel
  int ep = 1;
  bool expert_tp = true;                   // else whole experts, EP groups of consecutive ranks
  std::vector<RoutingDecision> decisions;  // by replica

  int size() const { return tp * replicas; }
  // World ranks of the EP group of `rank`, as in comm/mesh.h.
  std::vector<int> EpGroup(int rank) const {
    std::vector<int> group;
    const int first = expert_tp ? (rank / tp / ep) * ep * tp + rank % tp : rank / ep * ep;
    for (int i = 0; i < ep; ++i) group.push_back(first + i * (expert_tp ? tp : 1));
    return group;
  }
};

struct RankState {
  RaggedSendPlan send;
  RaggedReceivePlan receive;
  std::vector<Row> rows;     // as sent
  std::vector<Row> arrived;  // before the gather
  std::vector<Row> experts;  // as the experts see them
};

class RaggedWorld {
 public:
  explicit RaggedWorld(const World& world) : world_(world), ranks_(world.size()) {}

  void Run() {
    for (int rank = 0; rank < world_.size(); ++rank) Send(rank);
    for (int rank = 0; rank < world_.size(); ++rank) Exchange(rank);
    for (int rank = 0; rank < world_.size(); ++rank) Gather(rank);
    for (int rank = 0; rank < world_.size(); ++rank) CheckExperts(rank);
    for (int rank = 0; rank < world_.size(); ++rank) CheckReturn(rank);
  }

 private:
  const RoutingDecision& Decision(int rank) const { return world_.decisions[rank / world_.tp]; }
  int64_t LocalExperts() const { return world_.decisions[0].num_experts / world_.ep; }
  int PlaceInEpGroup(int rank) const {
    const std::vector<int> group = world_.EpGroup(rank);
    return static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
  }

  void Send(int rank) {
    const RaggedSender sender{.ep_size = world_.ep, .tp_size = world_.tp, .lane = rank % world_.tp};
    RankState& state = ranks_[rank];
    ASSERT_OK_AND_ASSIGN(state.send, BuildRaggedSendPlan(Decision(rank), sender));
    ASSERT_OK(CheckConservation(state.send, Decision(rank), sender));
    const int64_t first_route = state.send.own.begin * Decision(rank).top_k;
    for (const int32_t route : state.send.route_of_row) state.rows.push_back({rank / world_.tp, first_route + route});
  }

  void Exchange(int rank) {
    RankState& state = ranks_[rank];
    const std::vector<int> group = world_.EpGroup(rank);
    const int me = PlaceInEpGroup(rank);
    RaggedReceiver receiver;
    receiver.tp_size = world_.tp;
    receiver.local_experts = static_cast<int>(LocalExperts());
    receiver.slot_classes = Decision(rank).slot_classes;
    receiver.capacity = Decision(rank).capacity;
    receiver.gathers_over_tp = world_.expert_tp;
    std::vector<int64_t> segments;
    for (int i = 0; i < world_.ep; ++i) {
      const RaggedSendPlan& source = ranks_[group[i]].send;
      receiver.source_lane.push_back(group[i] % world_.tp);
      receiver.source_replica.push_back(world_.expert_tp ? i : group[i] / world_.tp - group[0] / world_.tp);
      const size_t block = source.segments.size() / world_.ep;
      segments.insert(segments.end(), source.segments.begin() + me * block, source.segments.begin() + (me + 1) * block);
    }
    ASSERT_OK_AND_ASSIGN(state.receive, BuildRaggedReceivePlan(receiver, rank % world_.tp, segments));
    for (int i = 0; i < world_.ep; ++i) {
      const RankState& source = ranks_[group[i]];
      EXPECT_EQ(source.send.rows_to[me], state.receive.rows_from[i]);  // sent = received
      const auto begin = source.rows.begin() +
                         std::accumulate(source.send.rows_to.begin(), source.send.rows_to.begin() + me, int64_t{0});
      state.arrived.insert(state.arrived.end(), begin, begin + source.send.rows_to[me]);
    }
  }

  void Gather(int rank) {
    RankState& state = ranks_[rank];
    std::vector<Row> all = state.arrived;
    if (world_.expert_tp) {
      all.clear();
      for (int lane = 0; lane < world_.tp; ++lane) {
        const RankState& other = ranks_[rank / world_.tp * world_.tp + lane];
        EXPECT_EQ(static_cast<int64_t>(other.arrived.size()), state.receive.rows_of_lane[lane]);
        all.insert(all.end(), other.arrived.begin(), other.arrived.end());
      }
    }
    ASSERT_EQ(static_cast<int64_t>(all.size()), state.receive.num_rows());
    for (const int32_t arrival : state.receive.arrival_of_expert_row) state.experts.push_back(all[arrival]);
    for (int64_t i = 0; i < state.receive.num_rows(); ++i) {
      EXPECT_EQ(state.receive.arrival_of_expert_row[state.receive.expert_row_of_arrival[i]], i);
    }
  }

  // The rows of each expert are contiguous, sorted by (replica, slot), and each lies where its position says.
  void CheckExperts(int rank) {
    const RankState& state = ranks_[rank];
    int64_t row = 0;
    const int first_replica =
        world_.expert_tp ? rank / world_.tp / world_.ep * world_.ep : world_.EpGroup(rank)[0] / world_.tp;
    for (int64_t l = 0; l < LocalExperts(); ++l) {
      std::tuple<int, int> last = {-1, -1};
      int64_t last_position = -1;
      for (int64_t n = 0; n < state.receive.rows_of_expert[l]; ++n, ++row) {
        const auto [replica, route] = state.experts[row];
        const RoutingDecision& d = world_.decisions[replica];
        EXPECT_EQ(d.expert[route], PlaceInEpGroup(rank) * LocalExperts() + l);
        EXPECT_LT(last, std::make_tuple(replica, d.slot[route]));
        last = {replica, d.slot[route]};
        EXPECT_GT(state.receive.canonical_position[row], last_position);
        last_position = state.receive.canonical_position[row];
        EXPECT_EQ(last_position, d.dropless ? n : (replica - first_replica) * d.capacity + d.slot[route]);
        ++seen_[{rank, replica, route}];
      }
    }
    EXPECT_EQ(row, state.receive.num_rows());
  }

  // Back through the inverse maps: every kept own route finds its own row, seen by an expert as often as it must be.
  void CheckReturn(int rank) {
    const RankState& state = ranks_[rank];
    const RoutingDecision& d = Decision(rank);
    for (int64_t r = 0; r < static_cast<int64_t>(state.send.row_of_route.size()); ++r) {
      const int64_t route = state.send.own.begin * d.top_k + r;
      const int32_t row = state.send.row_of_route[r];
      EXPECT_EQ(row == -1, d.slot[route] == -1);
      if (row == -1) continue;
      EXPECT_EQ(state.rows[row], Row(rank / world_.tp, route));
      const int target = world_.EpGroup(rank)[d.expert[route] / LocalExperts()];
      EXPECT_EQ((seen_[{target, rank / world_.tp, route}]), 1);
    }
  }

  const World& world_;
  std::vector<RankState> ranks_;
  std::map<std::tuple<int, int, int64_t>, int> seen_;
};

void RunLayout(int tp, int replicas, int ep, bool expert_tp, int top_k, int64_t capacity, bool classes, double skew) {
  SCOPED_TRACE(::testing::Message() << "tp " << tp << " replicas " << replicas << " ep " << ep << " expert tp "
                                    << expert_tp << " k " << top_k << " capacity " << capacity << " skew " << skew);
  World world{.tp = tp, .replicas = replicas, .ep = ep, .expert_tp = expert_tp, .decisions = {}};
  for (int replica = 0; replica < replicas; ++replica) {
    world.decisions.push_back(RandomRouting({.tokens = replica == 1 ? 0 : 11 + 2 * replica,
                                             .experts = 2 * ep,
                                             .top_k = top_k,
                                             .capacity = capacity,
                                             .choice_classes = classes,
                                             .skew = skew,
                                             .masked = replica == 2 ? 0.5 : 0.0,
                                             .seed = static_cast<uint64_t>(1 + replica)}));
  }
  RaggedWorld(world).Run();
}

// Rows from every rank to every expert and back, for both expert layouts; one replica has no tokens (Trail 22).
TEST(RaggedPlanTest, C43_Trail22_EveryRowArrivesOnceInCanonicalOrder) {
  for (const int tp : {1, 2, 3, 4}) {
    for (const int ep : {1, 2, 4}) {
      for (const bool classes : {false, true}) {
        for (const double skew : {0.0, 0.5, 1.0}) {
          RunLayout(tp, ep, ep, true, 2, 6, classes, skew);
          RunLayout(tp, 2 * ep, ep, true, 1, 0, classes, skew);
          if (4 * tp % ep == 0) RunLayout(tp, 4, ep, false, 2, 6, classes, skew);
        }
      }
    }
  }
}

// Whole experts whose EP group cuts through a TP group.
TEST(RaggedPlanTest, EpGroupsMaySpanLanesUnevenly) {
  RunLayout(4, 2, 2, false, 2, 5, false, 0.2);
  RunLayout(2, 3, 3, false, 3, 5, true, 0.2);
  RunLayout(3, 2, 2, false, 2, 0, false, 0.2);
}

TEST(RaggedPlanTest, SendsRowsInOrderOfExpertAndSlot) {
  RoutingDecision d;
  d.num_tokens = 3;
  d.num_experts = 4;
  d.top_k = 2;
  d.capacity = 2;
  d.expert = {3, 1, 1, 0, 0, 1};
  d.slot = {0, 0, 1, 0, 1, -1};
  d.weight = {.5f, .5f, .5f, .5f, 1, 0};
  d.assigned = {2, 3, 0, 1};
  d.kept = {2, 2, 0, 1};
  ASSERT_OK(d.Validate());
  ASSERT_OK_AND_ASSIGN(const RaggedSendPlan lane0, BuildRaggedSendPlan(d, {.ep_size = 2, .tp_size = 2, .lane = 0}));
  EXPECT_THAT(lane0.route_of_row, ElementsAre(3, 1, 2, 0));  // own tokens 0 and 1
  EXPECT_THAT(lane0.rows_to, ElementsAre(3, 1));
  ASSERT_OK_AND_ASSIGN(const RaggedSendPlan lane1, BuildRaggedSendPlan(d, {.ep_size = 2, .tp_size = 2, .lane = 1}));
  EXPECT_THAT(lane1.route_of_row, ElementsAre(0));  // own token 2: its kept route, counted from the lane's first token
  EXPECT_THAT(lane1.row_of_route, ElementsAre(0, -1));
  EXPECT_THAT(lane1.segments, ElementsAre(1, 1, 2, 0, 0, 0, 1, 0));
  EXPECT_EQ(lane0.segments, lane1.segments);
}

TEST(RaggedPlanTest, Trail11_RefusesBadSenders) {
  const RoutingDecision d = RandomRouting({.tokens = 6, .experts = 4, .top_k = 2});
  EXPECT_THAT(BuildRaggedSendPlan(d, {.ep_size = 3}), StatusIs(kInvalid, HasSubstr("EP size 3 does not divide 4")));
  EXPECT_THAT(BuildRaggedSendPlan(d, {.tp_size = 2, .lane = 2}), StatusIs(kInvalid, HasSubstr("no lane 2 of 2")));
  RoutingDecision holes = d;
  holes.slot[0] += 1;
  EXPECT_THAT(BuildRaggedSendPlan(holes, {}), StatusIs(kInvalid, HasSubstr("token 0 choice 0: slot 1")));
  RoutingDecision outside = d;
  outside.expert[3] = 4;
  EXPECT_THAT(BuildRaggedSendPlan(outside, {}), StatusIs(kInvalid, HasSubstr("expert 4 of 4")));
}

// Counts come from peers: negative, too many, contradictory, wrong length.
TEST(RaggedPlanTest, RefusesBadAnnouncements) {
  RaggedReceiver receiver;
  receiver.tp_size = 2;
  receiver.capacity = 4;
  receiver.source_lane = {0, 1};
  receiver.source_replica = {0, 0};
  EXPECT_OK(BuildRaggedReceivePlan(receiver, 0, {3, 1, 3, 1}).status());
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {3, 1, 2, 1}),
              StatusIs(kFailedPrecondition, HasSubstr("EP sources 0 and 1 are lanes of one replica")));
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {3, 2, 3, 2}),
              StatusIs(kFailedPrecondition, HasSubstr("EP source 0 announces 5 rows for local expert 0")));
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {3, -1, 3, 1}),
              StatusIs(kFailedPrecondition, HasSubstr("announces -1 rows")));
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {3, 1}), StatusIs(kInvalid, HasSubstr("expected 4 segment counts")));
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 2, {3, 1, 3, 1}), StatusIs(kInvalid, HasSubstr("lane 2")));
  receiver.capacity = 0;
  const int64_t huge = int64_t{1} << 31;
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {huge, 0, huge, 0}), StatusIs(kFailedPrecondition, HasSubstr("")));
  receiver.source_lane = {1, 0};
  EXPECT_THAT(BuildRaggedReceivePlan(receiver, 0, {3, 1, 3, 1}), StatusIs(kInvalid, HasSubstr("in order of")));
}

}  // namespace
}  // namespace evenkeel::moe
