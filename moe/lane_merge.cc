#include "evenkeel/moe/lane_merge.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "evenkeel/moe/ragged_plan.h"

namespace evenkeel::moe {
namespace {

// A row at some lane's experts; rows lie there in this order.
struct Row {
  int64_t expert = 0;  // local
  int64_t slot = 0;
  friend bool operator<(const Row& a, const Row& b) { return std::tie(a.expert, a.slot) < std::tie(b.expert, b.slot); }
};

// The rows of every lane, in order.
std::vector<std::vector<Row>> RowsByLane(const RoutingDecision& d, const LanePlace& place) {
  const int64_t local_experts = d.num_experts / place.ep;
  std::vector<std::vector<Row>> rows(place.tp);
  const auto add = [&](int source_lane, int64_t expert, int64_t slot) {
    const int64_t lane = source_lane / place.ep * place.ep + expert / local_experts;
    rows[lane].push_back({expert % local_experts, slot});
  };
  if (place.padded) {
    for (int64_t expert = 0; expert < d.num_experts; ++expert) {
      for (int64_t slot = 0; slot < d.capacity; ++slot) {
        add(static_cast<int>(slot / (d.capacity / place.tp)), expert, slot);
      }
    }
  } else {
    for (int lane = 0; lane < place.tp; ++lane) {
      const TokenRange own = OwnTokens(d.num_tokens, place.tp, lane);
      for (int64_t route = own.begin * d.top_k; route < own.end * d.top_k; ++route) {
        if (d.slot[route] >= 0) add(lane, d.expert[route], d.slot[route]);
      }
    }
  }
  for (std::vector<Row>& of_lane : rows) std::sort(of_lane.begin(), of_lane.end());
  return rows;
}

}  // namespace

int64_t LaneMerge::num_gathered() const {
  return std::accumulate(rows_of_lane.begin(), rows_of_lane.end(), int64_t{0});
}

LaneMerge MergeLanes(const RoutingDecision& decision, const LanePlace& place) {
  const std::vector<std::vector<Row>> rows = RowsByLane(decision, place);
  struct Gathered {
    Row row;
    int32_t at = 0;
    int32_t own = -1;
  };
  LaneMerge merge;
  merge.adds_gradients = place.lane < place.ep;
  std::vector<Gathered> mine;
  int32_t at = 0;
  for (int lane = 0; lane < place.tp; ++lane) {
    merge.rows_of_lane.push_back(static_cast<int64_t>(rows[lane].size()));
    const bool same_experts = lane % place.ep == place.lane % place.ep;
    for (size_t i = 0; i < rows[lane].size(); ++i, ++at) {
      if (!same_experts) continue;
      mine.push_back({rows[lane][i], at, lane == place.lane ? static_cast<int32_t>(i) : -1});
    }
  }
  std::sort(mine.begin(), mine.end(), [](const Gathered& a, const Gathered& b) { return a.row < b.row; });
  merge.merged_of_own.resize(rows[place.lane].size());
  merge.rows_of_expert.assign(decision.num_experts / place.ep, 0);
  for (const Gathered& one : mine) {
    if (one.own >= 0) merge.merged_of_own[one.own] = static_cast<int32_t>(merge.num_merged());
    merge.gathered_of_merged.push_back(one.at);
    ++merge.rows_of_expert[one.row.expert];
    merge.positions.push_back(one.row.slot);
  }
  return merge;
}

}  // namespace evenkeel::moe
