#include "evenkeel/moe/ragged_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// Index into segments [experts, classes, T].
struct SegmentTable {
  int classes = 1;
  int lanes = 1;
  int64_t at(int64_t expert, int segment_class, int lane) const {
    return (expert * classes + segment_class) * lanes + lane;
  }
  int64_t per_expert() const { return static_cast<int64_t>(classes) * lanes; }
};

absl::Status CheckSender(const RoutingDecision& d, const RaggedSender& sender) {
  if (sender.ep_size < 1 || sender.tp_size < 1 || sender.lane < 0 || sender.lane >= sender.tp_size ||
      sender.chunks < 1) {
    return absl::InvalidArgumentError(absl::StrCat("no lane ", sender.lane, " of ", sender.tp_size, " with EP size ",
                                                   sender.ep_size, ", ", sender.chunks, " chunks"));
  }
  if (d.num_experts < 1 || d.num_experts % sender.ep_size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("EP size ", sender.ep_size, " does not divide ", d.num_experts, " experts"));
  }
  if (sender.chunks > d.num_experts / sender.ep_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(sender.chunks, " chunks of ", d.num_experts / sender.ep_size, " local experts"));
  }
  if (d.num_tokens < 0 || d.top_k < 1 || (d.slot_classes != 1 && d.slot_classes != d.top_k)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no plan for ", d.num_tokens, " tokens, k ", d.top_k, ", ", d.slot_classes, " slot classes"));
  }
  EK_ASSIGN_OR_RETURN(const int64_t routes, CheckedMul(d.num_tokens, d.top_k));
  if (routes > kMaxRows || static_cast<int64_t>(d.expert.size()) != routes ||
      static_cast<int64_t>(d.slot.size()) != routes) {
    return absl::InvalidArgumentError(absl::StrCat("the decision says ", routes, " routes (at most 2^31 - 1), holds ",
                                                   d.expert.size(), " experts and ", d.slot.size(), " slots"));
  }
  return absl::OkStatus();
}

int OwnerLane(int64_t token, int64_t num_tokens, int tp_size) {
  const int64_t small = num_tokens / tp_size;
  const int64_t longer = num_tokens % tp_size;  // the first lanes own one token more
  const int64_t in_longer = longer * (small + 1);
  if (token < in_longer) return static_cast<int>(token / (small + 1));
  return static_cast<int>(longer + (token - in_longer) / small);
}

// Counts kept routes by (expert, class, lane).
absl::StatusOr<std::vector<int64_t>> CountSegments(const RoutingDecision& d, const SegmentTable& table) {
  std::vector<int64_t> segments(d.num_experts * table.per_expert(), 0);
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    const int lane = OwnerLane(token, d.num_tokens, table.lanes);
    for (int j = 0; j < d.top_k; ++j) {
      const int64_t r = token * d.top_k + j;
      if (d.slot[r] == -1) continue;
      if (d.expert[r] < 0 || d.expert[r] >= d.num_experts) {
        return absl::InvalidArgumentError(
            absl::StrCat("token ", token, " goes to expert ", d.expert[r], " of ", d.num_experts));
      }
      ++segments[table.at(d.expert[r], d.class_of_choice(j), lane)];
    }
  }
  return segments;
}

// The slot of the next row of every (expert, class) on one lane, advanced route by route.
std::vector<int64_t> FirstSlots(const std::vector<int64_t>& segments, const SegmentTable& table, int64_t experts,
                                int lane) {
  std::vector<int64_t> first(experts * table.classes);
  for (int64_t e = 0; e < experts; ++e) {
    int64_t slot = 0;
    for (int c = 0; c < table.classes; ++c) {
      const auto row = segments.begin() + table.at(e, c, 0);
      first[e * table.classes + c] = std::accumulate(row, row + lane, slot);
      slot = std::accumulate(row, row + table.lanes, slot);
    }
  }
  return first;
}

// Calls visit(chunk, destination, expert) for every expert in the order in which rows lie.
template <typename Visit>
void ForExpertsByChunk(int64_t num_experts, const RaggedSender& sender, Visit visit) {
  const int64_t local_experts = num_experts / sender.ep_size;
  for (int chunk = 0; chunk < sender.chunks; ++chunk) {
    const ExpertRange range = ChunkOfExperts(local_experts, sender.chunks, chunk);
    for (int to = 0; to < sender.ep_size; ++to) {
      for (int64_t i = 0; i < range.size; ++i) visit(chunk, to, to * local_experts + range.begin + i);
    }
  }
}

// For one lane: where the rows of each (expert, class) begin when rows lie in order (chunk, expert, slot).
std::vector<int64_t> FirstRows(const std::vector<int64_t>& segments, const SegmentTable& table, int64_t experts,
                               const RaggedSender& sender) {
  std::vector<int64_t> first(experts * table.classes);
  int64_t row = 0;
  ForExpertsByChunk(experts, sender, [&](int, int, int64_t expert) {
    for (int64_t i = expert * table.classes; i < (expert + 1) * table.classes; ++i) {
      first[i] = row;
      row += segments[i * table.lanes + sender.lane];
    }
  });
  return first;
}

// Places the kept routes of the own tokens.
absl::Status PlaceRows(const RoutingDecision& d, const SegmentTable& table, const RaggedSender& sender,
                       RaggedSendPlan* plan) {
  std::vector<int64_t> next_slot = FirstSlots(plan->segments, table, d.num_experts, sender.lane);
  std::vector<int64_t> next_row = FirstRows(plan->segments, table, d.num_experts, sender);
  for (int64_t token = plan->own.begin; token < plan->own.end; ++token) {
    for (int j = 0; j < d.top_k; ++j) {
      const int64_t r = token * d.top_k + j;
      if (d.slot[r] == -1) continue;
      const int64_t segment = int64_t{d.expert[r]} * table.classes + d.class_of_choice(j);
      if (d.slot[r] != next_slot[segment]++) {
        return absl::InvalidArgumentError(absl::StrCat(
            "token ", token, " choice ", j, ": slot ", d.slot[r], " of expert ", d.expert[r], " should be ",
            next_slot[segment] - 1, "; slots must be 0, 1, 2, ... in order of (class, token)"));
      }
      const int64_t row = next_row[segment]++;
      const int64_t own_token = token - plan->own.begin;
      const int64_t own_route = own_token * d.top_k + j;
      plan->token_of_row[row] = static_cast<int32_t>(own_token);
      plan->route_of_row[row] = static_cast<int32_t>(own_route);
      plan->row_of_route[own_route] = static_cast<int32_t>(row);
    }
  }
  return absl::OkStatus();
}

// One consecutive piece of the arrival: the rows that lane `lane` of source `source` sends here.
struct Feed {
  int source = 0;
  int lane = 0;
};

std::vector<Feed> ArrivalOrder(const RaggedReceiver& receiver) {
  const int sources = static_cast<int>(receiver.source_lane.size());
  std::vector<Feed> order;
  if (!receiver.gathers_over_tp) {
    for (int i = 0; i < sources; ++i) order.push_back({i, receiver.source_lane[i]});
    return order;
  }
  for (int lane = 0; lane < receiver.tp_size; ++lane) {
    for (int i = 0; i < sources; ++i) order.push_back({i, lane});
  }
  return order;
}

absl::Status CheckReceiver(const RaggedReceiver& receiver, int lane, absl::Span<const int64_t> segments) {
  const size_t sources = receiver.source_lane.size();
  if (receiver.tp_size < 1 || receiver.local_experts < 1 || receiver.slot_classes < 1 || receiver.capacity < 0 ||
      lane < 0 || lane >= receiver.tp_size || sources == 0 || receiver.source_replica.size() != sources) {
    return absl::InvalidArgumentError(absl::StrCat("no receiver with T ", receiver.tp_size, ", lane ", lane, ", ",
                                                   receiver.local_experts, " local experts, ", receiver.slot_classes,
                                                   " slot classes, capacity ", receiver.capacity, ", ", sources,
                                                   " sources, ", receiver.source_replica.size(), " replicas"));
  }
  for (size_t i = 0; i < sources; ++i) {
    const int source_lane = receiver.source_lane[i];
    if (source_lane < 0 || source_lane >= receiver.tp_size || (receiver.gathers_over_tp && source_lane != lane)) {
      return absl::InvalidArgumentError(
          absl::StrCat("source ", i, " has lane ", source_lane, ", own lane is ", lane, " of ", receiver.tp_size));
    }
    if (i > 0 && std::pair(receiver.source_replica[i - 1], receiver.source_lane[i - 1]) >=
                     std::pair(receiver.source_replica[i], receiver.source_lane[i])) {
      return absl::InvalidArgumentError(
          absl::StrCat("source ", i, " must come after source ", i - 1, " in order of (replica, lane)"));
    }
  }
  const size_t expected = sources * receiver.local_experts * receiver.slot_classes * receiver.tp_size;
  if (segments.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat("expected ", expected, " segment counts, got ", segments.size()));
  }
  return absl::OkStatus();
}

// Received counts come from peers: nothing is trusted.
absl::Status CheckSegments(const RaggedReceiver& receiver, absl::Span<const int64_t> segments) {
  const int64_t per_expert = int64_t{receiver.slot_classes} * receiver.tp_size;
  const int64_t per_source = per_expert * receiver.local_experts;
  for (size_t i = 0; i < receiver.source_lane.size(); ++i) {
    const auto table = segments.subspan(i * per_source, per_source);
    for (int64_t e = 0; e < receiver.local_experts; ++e) {
      int64_t rows = 0;
      for (const int64_t count : table.subspan(e * per_expert, per_expert)) {
        if (count < 0 || count > kMaxRows || (rows += count) > kMaxRows) {
          return absl::FailedPreconditionError(
              absl::StrCat("EP source ", i, " announces ", count, " rows for local expert ", e));
        }
      }
      if (receiver.capacity > 0 && rows > receiver.capacity) {
        return absl::FailedPreconditionError(absl::StrCat(
            "EP source ", i, " announces ", rows, " rows for local expert ", e, ", capacity is ", receiver.capacity));
      }
    }
    if (i > 0 && receiver.source_replica[i] == receiver.source_replica[i - 1] &&
        table != segments.subspan((i - 1) * per_source, per_source)) {
      return absl::FailedPreconditionError(
          absl::StrCat("EP sources ", i - 1, " and ", i, " are lanes of one replica but announce different rows"));
    }
  }
  return absl::OkStatus();
}

// Counts and first rows of all (feed, expert, class) pieces: where each lies in the arrival.
struct Pieces {
  std::vector<int64_t> first;  // [feeds, local experts, classes]
  int64_t rows = 0;
};

Pieces LayOutArrival(const RaggedReceiver& receiver, const std::vector<Feed>& order,
                     absl::Span<const int64_t> segments) {
  Pieces pieces;
  const int64_t segments_per_source = int64_t{receiver.local_experts} * receiver.slot_classes;
  pieces.first.reserve(order.size() * segments_per_source);
  for (const Feed& feed : order) {
    for (int64_t segment = 0; segment < segments_per_source; ++segment) {
      pieces.first.push_back(pieces.rows);
      pieces.rows += segments[(feed.source * segments_per_source + segment) * receiver.tp_size + feed.lane];
    }
  }
  return pieces;
}

void CountRows(const RaggedReceiver& receiver, int lane, const std::vector<Feed>& order,
               absl::Span<const int64_t> segments, RaggedReceivePlan* plan) {
  const int64_t per_source = int64_t{receiver.local_experts} * receiver.slot_classes;
  plan->rows_from.assign(receiver.source_lane.size(), 0);
  plan->rows_of_lane.assign(receiver.gathers_over_tp ? receiver.tp_size : 1, 0);
  plan->rows_of_expert.assign(receiver.local_experts, 0);
  for (const Feed& feed : order) {
    for (int64_t segment = 0; segment < per_source; ++segment) {
      const int64_t count = segments[(feed.source * per_source + segment) * receiver.tp_size + feed.lane];
      if (!receiver.gathers_over_tp || feed.lane == lane) plan->rows_from[feed.source] += count;
      plan->rows_of_lane[receiver.gathers_over_tp ? feed.lane : 0] += count;
      plan->rows_of_expert[segment / receiver.slot_classes] += count;
    }
  }
}

// The feeds sorted by (replica, lane): inside a class that is the order of slots.
std::vector<int> SlotOrder(const RaggedReceiver& receiver, const std::vector<Feed>& order) {
  std::vector<int> sorted(order.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) {
    return std::pair(receiver.source_replica[order[a].source], order[a].lane) <
           std::pair(receiver.source_replica[order[b].source], order[b].lane);
  });
  return sorted;
}

// The first slot of (source, expert, class, lane): all earlier classes, then all earlier lanes of this class.
int64_t FirstSlot(const RaggedReceiver& receiver, absl::Span<const int64_t> segments, int source, int64_t expert,
                  int segment_class, int lane) {
  const int64_t begin = (int64_t{source} * receiver.local_experts + expert) * receiver.slot_classes * receiver.tp_size;
  const int64_t end = begin + int64_t{segment_class} * receiver.tp_size + lane;
  return std::accumulate(segments.begin() + begin, segments.begin() + end, int64_t{0});
}

// Appends the rows of one (feed, expert, class) piece.
void AppendPiece(int64_t first_arrival, int64_t count, int64_t first_position, RaggedReceivePlan* plan) {
  for (int64_t n = 0; n < count; ++n) {
    plan->expert_row_of_arrival[first_arrival + n] = static_cast<int32_t>(plan->num_rows());
    plan->arrival_of_expert_row.push_back(static_cast<int32_t>(first_arrival + n));
    plan->canonical_position.push_back(first_position + n);
  }
}

// Appends the rows of one local expert in canonical order: replica, class, lane.
void AppendExpert(const RaggedReceiver& receiver, int64_t expert, const std::vector<Feed>& order,
                  const std::vector<int>& slot_order, const Pieces& pieces, absl::Span<const int64_t> segments,
                  RaggedReceivePlan* plan) {
  const int64_t begin = plan->num_rows();
  const auto replica_of = [&](size_t i) { return receiver.source_replica[order[slot_order[i]].source]; };
  for (size_t first = 0, last = 0; first < slot_order.size(); first = last) {
    while (last < slot_order.size() && replica_of(last) == replica_of(first)) ++last;
    for (int c = 0; c < receiver.slot_classes; ++c) {
      for (size_t i = first; i < last; ++i) {
        const Feed& feed = order[slot_order[i]];
        const int64_t piece = (int64_t{slot_order[i]} * receiver.local_experts + expert) * receiver.slot_classes + c;
        const int64_t segment = (int64_t{feed.source} * receiver.local_experts + expert) * receiver.slot_classes + c;
        const int64_t slot = FirstSlot(receiver, segments, feed.source, expert, c, feed.lane);
        const int64_t stride = receiver.positions_per_replica();
        const int64_t position = stride > 0 ? replica_of(first) * stride + slot : plan->num_rows() - begin;
        AppendPiece(pieces.first[piece], segments[segment * receiver.tp_size + feed.lane], position, plan);
      }
    }
  }
}

}  // namespace

ExpertRange ChunkOfExperts(int64_t local_experts, int chunks, int chunk) {
  const int64_t small = local_experts / chunks, larger = local_experts % chunks;
  return {chunk * small + std::min<int64_t>(chunk, larger), small + (chunk < larger ? 1 : 0)};
}

TokenRange OwnTokens(int64_t num_tokens, int tp_size, int lane) {
  const int64_t small = num_tokens / tp_size;
  const int64_t longer = num_tokens % tp_size;
  const int64_t begin = lane * small + std::min<int64_t>(lane, longer);
  return {begin, begin + small + (lane < longer ? 1 : 0)};
}

absl::StatusOr<RaggedSendPlan> BuildRaggedSendPlan(const RoutingDecision& decision, const RaggedSender& sender) {
  EK_RETURN_IF_ERROR(CheckSender(decision, sender));
  const SegmentTable table{decision.slot_classes, sender.tp_size};
  RaggedSendPlan plan;
  plan.own = OwnTokens(decision.num_tokens, sender.tp_size, sender.lane);
  EK_ASSIGN_OR_RETURN(plan.segments, CountSegments(decision, table));
  plan.rows_to.assign(int64_t{sender.chunks} * sender.ep_size, 0);
  int64_t rows = 0;
  ForExpertsByChunk(decision.num_experts, sender, [&](int chunk, int to, int64_t expert) {
    for (int64_t i = expert * table.classes; i < (expert + 1) * table.classes; ++i) {
      const int64_t count = plan.segments[i * table.lanes + sender.lane];
      plan.rows_to[int64_t{chunk} * sender.ep_size + to] += count;
      rows += count;
    }
  });
  plan.token_of_row.resize(rows);
  plan.route_of_row.resize(rows);
  plan.row_of_route.assign(plan.own.size() * decision.top_k, -1);
  EK_RETURN_IF_ERROR(PlaceRows(decision, table, sender, &plan));
  return plan;
}

absl::StatusOr<RaggedReceivePlan> BuildRaggedReceivePlan(const RaggedReceiver& receiver, int lane,
                                                         absl::Span<const int64_t> segments) {
  EK_RETURN_IF_ERROR(CheckReceiver(receiver, lane, segments));
  EK_RETURN_IF_ERROR(CheckSegments(receiver, segments));
  const std::vector<Feed> order = ArrivalOrder(receiver);
  const Pieces pieces = LayOutArrival(receiver, order, segments);
  if (pieces.rows > kMaxRows) {
    return absl::FailedPreconditionError(
        absl::StrCat(pieces.rows, " rows would arrive at one rank; the limit is 2^31 - 1"));
  }
  RaggedReceivePlan plan;
  CountRows(receiver, lane, order, segments, &plan);
  plan.expert_row_of_arrival.resize(pieces.rows);
  plan.arrival_of_expert_row.reserve(pieces.rows);
  plan.canonical_position.reserve(pieces.rows);
  const std::vector<int> slot_order = SlotOrder(receiver, order);
  for (int64_t e = 0; e < receiver.local_experts; ++e) {
    AppendExpert(receiver, e, order, slot_order, pieces, segments, &plan);
  }
  return plan;
}

std::vector<int64_t> SegmentsOfChunk(const RaggedReceiver& receiver, absl::Span<const int64_t> segments,
                                     const ExpertRange& chunk) {
  const int64_t per_expert = int64_t{receiver.slot_classes} * receiver.tp_size;
  const int64_t per_source = per_expert * receiver.local_experts;
  std::vector<int64_t> part;
  for (size_t source = 0; source < receiver.source_lane.size(); ++source) {
    const auto table = segments.subspan(source * per_source + chunk.begin * per_expert, chunk.size * per_expert);
    part.insert(part.end(), table.begin(), table.end());
  }
  return part;
}

absl::Status CheckConservation(const RaggedSendPlan& plan, const RoutingDecision& decision,
                               const RaggedSender& sender) {
  std::vector<int64_t> block_of_expert(decision.num_experts), sent(plan.rows_to.size(), 0);
  ForExpertsByChunk(decision.num_experts, sender, [&](int chunk, int to, int64_t expert) {
    block_of_expert[expert] = int64_t{chunk} * sender.ep_size + to;
  });
  for (int64_t r = 0; r < static_cast<int64_t>(plan.row_of_route.size()); ++r) {
    const int64_t global = plan.own.begin * decision.top_k + r;
    const int32_t row = plan.row_of_route[r];
    if ((row == -1) != (decision.slot[global] == -1) ||
        (row != -1 &&
         (row >= plan.num_rows() || plan.route_of_row[row] != r || plan.token_of_row[row] != r / decision.top_k))) {
      return absl::InternalError(absl::StrCat("own route ", r, " with slot ", decision.slot[global], " has row ", row));
    }
    if (row != -1) ++sent[block_of_expert[decision.expert[global]]];
  }
  if (sent != plan.rows_to) return absl::InternalError("rows per destination do not match the decision");
  const int64_t per_expert = int64_t{decision.slot_classes} * sender.tp_size;
  for (int64_t e = 0; e < decision.num_experts; ++e) {
    const auto begin = plan.segments.begin() + e * per_expert;
    const int64_t announced = std::accumulate(begin, begin + per_expert, int64_t{0});
    if (announced != decision.kept[e]) {
      return absl::InternalError(
          absl::StrCat("expert ", e, ": ", announced, " rows announced, ", decision.kept[e], " kept"));
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::moe
