#include "evenkeel/moe/dedup_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

int32_t BitsOf(float value) {
  int32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float FloatOf(int32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

absl::Status CheckSender(const RoutingDecision& d, const RaggedSender& sender) {
  if (sender.ep_size < 1 || sender.tp_size < 1 || sender.lane < 0 || sender.lane >= sender.tp_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("no lane ", sender.lane, " of ", sender.tp_size, " with EP size ", sender.ep_size));
  }
  if (d.num_experts < 1 || d.num_experts % sender.ep_size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("EP size ", sender.ep_size, " does not divide ", d.num_experts, " experts"));
  }
  if (d.num_tokens < 0 || d.top_k < 1) return absl::InvalidArgumentError("a decision without extents");
  EK_ASSIGN_OR_RETURN(const int64_t routes, CheckedMul(d.num_tokens, d.top_k));
  const int64_t sizes[] = {static_cast<int64_t>(d.expert.size()), static_cast<int64_t>(d.slot.size()),
                           static_cast<int64_t>(d.weight.size())};
  if (routes > std::numeric_limits<int32_t>::max() || std::count(std::begin(sizes), std::end(sizes), routes) != 3) {
    return absl::InvalidArgumentError(absl::StrCat("the decision says ", routes, " routes (at most 2^31 - 1), holds ",
                                                   sizes[0], " experts, ", sizes[1], " slots, ", sizes[2], " weights"));
  }
  return absl::OkStatus();
}

// A kept route, sortable as (expert, route).
using Kept = std::pair<int32_t, int32_t>;

// The kept routes of one token by expert.
std::vector<Kept> KeptRoutes(const RoutingDecision& d, int64_t token) {
  std::vector<Kept> kept;
  for (int64_t route = token * d.top_k; route < (token + 1) * d.top_k; ++route) {
    if (d.slot[route] >= 0) kept.push_back({d.expert[route], static_cast<int32_t>(route)});
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

// The (token, destination) pairs of one lane's tokens, by destination.
class LaneRows {
 public:
  LaneRows(const RoutingDecision& d, TokenRange tokens, int ep_size, int64_t experts_per_rank) {
    tokens_.resize(ep_size);
    records_.resize(ep_size);
    routes_.resize(ep_size);
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      for (const Kept& kept : KeptRoutes(d, token)) {
        const int to = static_cast<int>(kept.first / experts_per_rank);
        if (tokens_[to].empty() || tokens_[to].back() != token) tokens_[to].push_back(token);
        records_[to].push_back(static_cast<int32_t>(tokens_[to].size()) - 1);
        records_[to].push_back(static_cast<int32_t>(kept.first % experts_per_rank));
        records_[to].push_back(d.slot[kept.second]);
        records_[to].push_back(BitsOf(d.weight[kept.second]));
        routes_[to].push_back(kept.second);
      }
    }
  }
  const std::vector<int64_t>& tokens(int to) const { return tokens_[to]; }
  const std::vector<int32_t>& records(int to) const { return records_[to]; }
  const std::vector<int32_t>& routes(int to) const { return routes_[to]; }

 private:
  std::vector<std::vector<int64_t>> tokens_;
  std::vector<std::vector<int32_t>> records_;
  std::vector<std::vector<int32_t>> routes_;
};

// The lists of rows_of_token from rows in order (destination, token).
void AddRow(int64_t token, int32_t row, int32_t destination, RowLists* lists) {
  int32_t* rows = &lists->rows[token * lists->width];
  int64_t at = 0;
  while (rows[at] >= 0) ++at;
  rows[at] = row;
  lists->keys[token * lists->width + at] = destination;
}

RowLists EmptyLists(int64_t outputs, int64_t width) {
  RowLists lists;
  lists.width = std::max<int64_t>(1, width);
  lists.rows.assign(outputs * lists.width, -1);
  lists.keys.assign(outputs * lists.width, 0);
  return lists;
}

// One route as its destination sees it.
struct Arrived {
  int32_t expert, slot;
  int replica;
  int32_t arrival;  // row after the gather
  float weight;
  int64_t record;  // place in order of arrival
};

struct Header {
  absl::Span<const int64_t> counts;
  int lanes;
  int64_t rows(int source, int lane) const { return counts[(static_cast<int64_t>(source) * lanes + lane) * 2]; }
  int64_t records(int source, int lane) const { return counts[(static_cast<int64_t>(source) * lanes + lane) * 2 + 1]; }
};

absl::Status CheckHeader(const Header& header, int sources, absl::Span<const int32_t> records) {
  int64_t rows = 0, total = 0;
  for (int source = 0; source < sources; ++source) {
    for (int lane = 0; lane < header.lanes; ++lane) {
      const int64_t r = header.rows(source, lane), n = header.records(source, lane);
      if (r < 0 || n < r || rows + r > std::numeric_limits<int32_t>::max() ||
          total + n > std::numeric_limits<int32_t>::max()) {
        return absl::FailedPreconditionError(
            absl::StrCat("source ", source, " lane ", lane, " announces ", r, " rows with ", n, " routes"));
      }
      rows += r;
      total += n;
    }
  }
  if (total * kRecordInts == static_cast<int64_t>(records.size())) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(total, " routes are announced, ", records.size(), " numbers arrived"));
}

// Reads all records, with rows numbered as they lie at the experts.
absl::StatusOr<std::vector<Arrived>> ReadRecords(const RaggedReceiver& receiver, const Header& header,
                                                 absl::Span<const int32_t> records) {
  const int sources = static_cast<int>(receiver.source_replica.size());
  // First arrival row of each (lane, source) block.
  std::vector<int64_t> first(static_cast<size_t>(header.lanes) * sources);
  int64_t rows = 0;
  for (int lane = 0; lane < header.lanes; ++lane) {
    for (int source = 0; source < sources; ++source) {
      first[lane * sources + source] = rows;
      rows += header.rows(source, lane);
    }
  }
  std::vector<Arrived> arrived;
  for (int source = 0; source < sources; ++source) {
    for (int lane = 0; lane < header.lanes; ++lane) {
      for (int64_t i = 0; i < header.records(source, lane); ++i) {
        const int32_t* record = &records[arrived.size() * kRecordInts];
        const bool fits = record[0] >= 0 && record[0] < header.rows(source, lane) && record[1] >= 0 &&
                          record[1] < receiver.local_experts && record[2] >= 0;
        if (!fits) {
          return absl::FailedPreconditionError(absl::StrCat("source ", source, " lane ", lane, " route ", i, ": row ",
                                                            record[0], ", local expert ", record[1], ", slot ",
                                                            record[2], " cannot be"));
        }
        arrived.push_back({.expert = record[1],
                           .slot = record[2],
                           .replica = receiver.source_replica[source],
                           .arrival = static_cast<int32_t>(first[lane * sources + source] + record[0]),
                           .weight = FloatOf(record[3]),
                           .record = static_cast<int64_t>(arrived.size())});
      }
    }
  }
  return arrived;
}

// Into the order of the padded buffers: expert, source replica, slot.
absl::Status SortForExperts(std::vector<Arrived>* arrived) {
  const auto key = [](const Arrived& route) { return std::tie(route.expert, route.replica, route.slot); };
  std::sort(arrived->begin(), arrived->end(), [&](const Arrived& a, const Arrived& b) { return key(a) < key(b); });
  for (size_t i = 1; i < arrived->size(); ++i) {
    const Arrived& route = (*arrived)[i];
    if (key(route) != key((*arrived)[i - 1])) continue;
    return absl::FailedPreconditionError(absl::StrCat("two routes of replica ", route.replica, " have slot ",
                                                      route.slot, " of local expert ", route.expert));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DedupSendPlan> BuildDedupSendPlan(const RoutingDecision& decision, const RaggedSender& sender,
                                                 bool tells_all_lanes) {
  EK_RETURN_IF_ERROR(CheckSender(decision, sender));
  const int E = sender.ep_size;
  const int64_t experts_per_rank = decision.num_experts / E;
  std::vector<LaneRows> lanes;
  for (int lane = 0; lane < sender.tp_size; ++lane) {
    if (!tells_all_lanes && lane != sender.lane) continue;
    lanes.emplace_back(decision, OwnTokens(decision.num_tokens, sender.tp_size, lane), E, experts_per_rank);
  }
  const LaneRows& own = tells_all_lanes ? lanes[sender.lane] : lanes[0];

  DedupSendPlan plan;
  plan.own = OwnTokens(decision.num_tokens, sender.tp_size, sender.lane);
  plan.rows_of_token = EmptyLists(plan.own.size(), std::min<int64_t>(decision.top_k, E));
  plan.rows_of_token.end_key = E;
  for (int to = 0; to < E; ++to) {
    for (int64_t token : own.tokens(to)) {
      AddRow(token - plan.own.begin, static_cast<int32_t>(plan.num_rows()), to, &plan.rows_of_token);
      plan.token_of_row.push_back(static_cast<int32_t>(token - plan.own.begin));
    }
    plan.rows_to.push_back(static_cast<int64_t>(own.tokens(to).size()));
    const size_t before = plan.records.size();
    for (const LaneRows& lane : lanes) {
      plan.header.push_back(static_cast<int64_t>(lane.tokens(to).size()));
      plan.header.push_back(static_cast<int64_t>(lane.routes(to).size()));
      plan.records.insert(plan.records.end(), lane.records(to).begin(), lane.records(to).end());
      plan.route_of_record.insert(plan.route_of_record.end(), lane.routes(to).begin(), lane.routes(to).end());
    }
    plan.record_ints_to.push_back(static_cast<int64_t>(plan.records.size() - before));
  }
  return plan;
}

NodeSendPlan BuildNodeSendPlan(const DedupSendPlan& send, int per_node) {
  const int nodes = static_cast<int>(send.rows_to.size()) / per_node, ints = MaskInts(per_node);
  NodeSendPlan plan;
  plan.rows_of_token = EmptyLists(send.own.size(), std::min<int64_t>(send.rows_of_token.width, nodes));
  plan.rows_of_token.end_key = nodes;
  int64_t row = 0;  // of send
  for (int node = 0; node < nodes; ++node) {
    std::map<int32_t, std::vector<int32_t>> masks;  // by token
    for (int local = 0; local < per_node; ++local) {
      for (int64_t n = 0; n < send.rows_to[node * per_node + local]; ++n, ++row) {
        std::vector<int32_t>& mask = masks[send.token_of_row[row]];
        mask.resize(ints, 0);
        mask[local / 32] |= static_cast<int32_t>(uint32_t{1} << (local % 32));
      }
    }
    for (const auto& [token, mask] : masks) {
      AddRow(token, static_cast<int32_t>(plan.token_of_row.size()), node, &plan.rows_of_token);
      plan.token_of_row.push_back(token);
      plan.masks.insert(plan.masks.end(), mask.begin(), mask.end());
    }
    plan.rows_to.push_back(static_cast<int64_t>(masks.size()));
  }
  return plan;
}

absl::StatusOr<NodeMiddlePlan> BuildNodeMiddlePlan(int per_node, absl::Span<const int64_t> rows_from,
                                                   absl::Span<const int32_t> masks) {
  const int ints = MaskInts(per_node);
  int64_t arrivals = 0;
  for (size_t node = 0; node < rows_from.size(); ++node) {
    if (rows_from[node] < 0 || (arrivals += rows_from[node]) > std::numeric_limits<int32_t>::max()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the peer in node ", node, " announces ", rows_from[node], " rows"));
    }
  }
  if (arrivals * ints != static_cast<int64_t>(masks.size())) {
    return absl::FailedPreconditionError(absl::StrCat(arrivals, " rows are announced, ", masks.size(), " masks came"));
  }
  const auto is_for = [&](int64_t arrival, int local) {
    return (static_cast<uint32_t>(masks[arrival * ints + local / 32]) >> (local % 32) & 1) != 0;
  };
  NodeMiddlePlan plan;
  plan.rows_from.assign(rows_from.begin(), rows_from.end());
  plan.rows_of_arrival = EmptyLists(arrivals, per_node);
  plan.rows_of_arrival.end_key = per_node;
  int64_t first = 0;
  for (size_t node = 0; node < rows_from.size(); ++node) {
    for (int64_t arrival = first; arrival < first + rows_from[node]; ++arrival) {
      bool some = false, beyond = false;
      for (int local = 0; local < ints * 32; ++local) (local < per_node ? some : beyond) |= is_for(arrival, local);
      if (some && !beyond) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("row ", arrival - first, " of the peer in node ", node, " is for no rank here"));
    }
    for (int local = 0; local < per_node; ++local) {
      const size_t before = plan.arrival_of_row.size();
      for (int64_t arrival = first; arrival < first + rows_from[node]; ++arrival) {
        if (!is_for(arrival, local)) continue;
        AddRow(arrival, static_cast<int32_t>(plan.arrival_of_row.size()), local, &plan.rows_of_arrival);
        plan.arrival_of_row.push_back(static_cast<int32_t>(arrival));
      }
      plan.passed_on.push_back(static_cast<int64_t>(plan.arrival_of_row.size() - before));
    }
    first += rows_from[node];
  }
  return plan;
}

absl::StatusOr<DedupReceivePlan> BuildDedupReceivePlan(const RaggedReceiver& receiver, int lane,
                                                       absl::Span<const int64_t> counts,
                                                       absl::Span<const int32_t> records) {
  const int sources = static_cast<int>(receiver.source_replica.size());
  const Header header = {counts, receiver.gathers_over_tp ? receiver.tp_size : 1};
  const int own_lane = receiver.gathers_over_tp ? lane : 0;
  if (sources < 1 || receiver.local_experts < 1 || own_lane < 0 || own_lane >= header.lanes ||
      static_cast<int64_t>(counts.size()) != int64_t{2} * sources * header.lanes) {
    return absl::InvalidArgumentError(absl::StrCat("no plan for ", sources, " sources, ", header.lanes, " lanes, ",
                                                   receiver.local_experts, " local experts, ", counts.size(),
                                                   " counts"));
  }
  EK_RETURN_IF_ERROR(CheckHeader(header, sources, records));
  EK_ASSIGN_OR_RETURN(std::vector<Arrived> arrived, ReadRecords(receiver, header, records));

  DedupReceivePlan plan;
  plan.rows_of_lane.assign(header.lanes, 0);
  for (int source = 0; source < sources; ++source) {
    plan.rows_from.push_back(header.rows(source, own_lane));
    plan.records_from.push_back(0);
    for (int l = 0; l < header.lanes; ++l) {
      plan.rows_of_lane[l] += header.rows(source, l);
      plan.records_from[source] += header.records(source, l);
    }
  }
  EK_RETURN_IF_ERROR(SortForExperts(&arrived));
  const int64_t arrivals = std::accumulate(plan.rows_of_lane.begin(), plan.rows_of_lane.end(), int64_t{0});
  std::vector<int64_t> routes_of_arrival(arrivals, 0);
  for (const Arrived& route : arrived) ++routes_of_arrival[route.arrival];
  const int64_t width = arrivals == 0 ? 1 : *std::max_element(routes_of_arrival.begin(), routes_of_arrival.end());
  RowLists& lists = plan.expert_rows_of_arrival = EmptyLists(arrivals, width);
  lists.weights.assign(lists.rows.size(), 0);
  lists.end_key = receiver.local_experts;
  plan.rows_of_expert.assign(receiver.local_experts, 0);
  plan.entry_of_record.resize(arrived.size());
  std::vector<int64_t> filled(arrivals, 0);
  for (const Arrived& route : arrived) {
    const int64_t entry = route.arrival * lists.width + filled[route.arrival]++;
    if (entry % lists.width > 0 && lists.keys[entry - 1] == route.expert) {
      return absl::FailedPreconditionError(
          absl::StrCat("row ", route.arrival, " names local expert ", route.expert, " twice"));
    }
    lists.rows[entry] = static_cast<int32_t>(plan.num_expert_rows());
    lists.keys[entry] = route.expert;
    lists.weights[entry] = route.weight;
    plan.entry_of_record[route.record] = static_cast<int32_t>(entry);
    plan.arrival_of_expert_row.push_back(route.arrival);
    const int64_t dense = plan.rows_of_expert[route.expert]++;
    const int64_t stride = receiver.positions_per_replica();
    plan.canonical_position.push_back(stride > 0 ? route.replica * stride + route.slot : dense);
  }
  plan.expert_rows_unweighted = lists;
  plan.expert_rows_unweighted.weights.clear();
  return plan;
}

}  // namespace evenkeel::moe
