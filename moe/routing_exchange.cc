#include "evenkeel/moe/routing_exchange.h"

#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {
namespace {

// Where this rank stands among the blocks of counts.
struct Here {
  int ep_rank, per_node, lane;
};

// Rows by destination, by source, half way, and by lane, as the cost counts them. `middle` may be empty.
RaggedRows FlowOf(absl::Span<const int64_t> to, absl::Span<const int64_t> from, absl::Span<const int64_t> middle,
                  absl::Span<const int64_t> of_lane, const Here& here) {
  const int node = here.ep_rank / here.per_node, local = here.ep_rank % here.per_node;
  const auto is_far = [&](int rank) { return rank / here.per_node != node; };
  RaggedRows rows;
  for (int rank = 0; rank < static_cast<int>(to.size()); ++rank) {
    rows.sent += to[rank];
    rows.arrived += from[rank];
    if (rank != here.ep_rank) rows.sent_remote += to[rank];
    if (rank != here.ep_rank) rows.arrived_remote += from[rank];
    if (is_far(rank)) rows.sent_far += to[rank];
    if (is_far(rank)) rows.arrived_far += from[rank];
    if (rank % here.per_node != local) rows.arrived_across += from[rank];
  }
  for (int i = 0; i < static_cast<int>(middle.size()); ++i) {  // [node of the source, local index of the destination]
    rows.middle += middle[i];
    if (is_far(i)) rows.middle_far += middle[i];
    if (i % here.per_node != local) rows.middle_across += middle[i];
  }
  for (int lane = 0; lane < static_cast<int>(of_lane.size()); ++lane) {
    rows.gathered += of_lane[lane];
    if (lane < here.lane) rows.gathered_before += of_lane[lane];
  }
  return rows;
}

RaggedRows Sum(const std::vector<RaggedRows>& parts) {
  RaggedRows sum;
  for (const RaggedRows& part : parts) sum += part;
  return sum;
}

}  // namespace

RoutingExchange::RoutingExchange(const TypedOrder& order, const ExchangeSeat& seat)
    : order_(order), seat_(seat), own_tokens_(DispatchesOwnTokens(order)) {}

absl::Status RoutingExchange::Plan(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const {
  maps->ragged = order_.is_ragged();
  maps->deduplicated = order_.is_deduplicated();
  if (maps->deduplicated) return PlanDeduplicated(decision, maps, stream);
  if (maps->ragged) return PlanRagged(decision, maps, stream);
  EK_ASSIGN_OR_RETURN(maps->padded, BuildDispatchPlan(decision));
  return CheckConservation(maps->padded, decision);
}

// Exchanges the row counts, then plans with them.
absl::Status RoutingExchange::PlanRagged(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const {
  const RaggedSender sender = Sender();
  EK_ASSIGN_OR_RETURN(maps->send, BuildRaggedSendPlan(decision, sender));
  EK_RETURN_IF_ERROR(CheckConservation(maps->send, decision, sender));
  std::vector<int64_t> received = maps->send.segments;
  if (ep_size() > 1) {
    const Shape shape({static_cast<int64_t>(received.size())});
    EK_RETURN_IF_ERROR(seat_.control_ep->AllToAll(ConstTensorView(maps->send.segments.data(), DType::kI64, shape),
                                                  TensorView(received.data(), DType::kI64, shape), stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
  }
  EK_RETURN_IF_ERROR(ExchangeMiddle(maps->send.rows_to, maps, stream));
  const RaggedReceiver all = Receiver(decision, sender);
  const Here here = {ep_rank(), maps->sizes.per_node(), sender.lane};
  for (int chunk = 0; chunk < sender.chunks; ++chunk) {
    const ExpertRange range = ChunkOfExperts(all.local_experts, sender.chunks, chunk);
    RaggedReceiver part = all;
    part.local_experts = static_cast<int>(range.size);
    EK_ASSIGN_OR_RETURN(RaggedReceivePlan plan,
                        BuildRaggedReceivePlan(part, sender.lane, SegmentsOfChunk(all, received, range)));
    const auto of_chunk = [&](const std::vector<int64_t>& counts) {
      return counts.empty() ? absl::Span<const int64_t>()
                            : absl::MakeConstSpan(counts).subspan(int64_t{chunk} * ep_size(), ep_size());
    };
    maps->sizes.chunk_rows.push_back(
        FlowOf(of_chunk(maps->send.rows_to), plan.rows_from, of_chunk(maps->middle), plan.rows_of_lane, here));
    maps->receive.push_back(std::move(plan));
  }
  maps->sizes.rows = Sum(maps->sizes.chunk_rows);
  return absl::OkStatus();
}

absl::Status RoutingExchange::ExchangeMiddle(const std::vector<int64_t>& rows_to, RowMaps* maps, Stream& stream) const {
  if (!order_.has_levels()) return absl::OkStatus();
  const int E = ep_size(), L = maps->sizes.per_node(), chunks = static_cast<int>(rows_to.size()) / E;
  maps->middle = rows_to;  // of a single node
  if (maps->sizes.num_nodes() == 1) return absl::OkStatus();
  // To the peer in each node, for each of its node's ranks, by chunk.
  const auto at = [&](int node, int chunk, int local) { return (node * chunks + chunk) * L + local; };
  std::vector<int64_t> told(rows_to.size()), heard(rows_to.size()), counts(E, 0);
  for (int i = 0; i < static_cast<int>(rows_to.size()); ++i) told[at(i % E / L, i / E, i % L)] = rows_to[i];
  for (int node = 0; node < E / L; ++node) counts[node * L + ep_rank() % L] = int64_t{chunks} * L;
  const Shape shape({static_cast<int64_t>(told.size())});
  EK_RETURN_IF_ERROR(seat_.control_ep->AllToAllV(ConstTensorView(told.data(), DType::kI64, shape), counts,
                                                 TensorView(heard.data(), DType::kI64, shape), counts, stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  for (int i = 0; i < static_cast<int>(rows_to.size()); ++i) {
    maps->middle[i] = heard[at(i % E / L, i / E, i % L)];
    if (maps->middle[i] < 0 || maps->middle[i] > std::numeric_limits<int32_t>::max()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the peer in node ", i % E / L, " announces ", maps->middle[i], " rows to be passed on"));
    }
  }
  return absl::OkStatus();
}

absl::Status RoutingExchange::PlanNodes(RowMaps* maps, Stream& stream) const {
  const int E = ep_size(), L = maps->sizes.per_node(), N = maps->sizes.num_nodes(), me = ep_rank();
  maps->node_send = BuildNodeSendPlan(maps->dedup_send, L);
  const NodeSendPlan& send = maps->node_send;
  std::vector<int64_t> rows_from = send.rows_to;  // of a single node
  std::vector<int32_t> masks = send.masks;
  if (N > 1) {
    // The peer in each node is rank node * L + me % L of the EP group; others are told nothing.
    std::vector<int64_t> one(E, 0), to(E, 0), from(E, 0);
    for (int node = 0; node < N; ++node) one[node * L + me % L] = 1;
    const Shape nodes({N});
    EK_RETURN_IF_ERROR(seat_.control_ep->AllToAllV(ConstTensorView(send.rows_to.data(), DType::kI64, nodes), one,
                                                   TensorView(rows_from.data(), DType::kI64, nodes), one, stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
    int64_t ints = 0;
    for (int node = 0; node < N; ++node) {
      // Not more than there can be rows: the middle counts were agreed before.
      if (rows_from[node] < 0 || rows_from[node] > std::numeric_limits<int32_t>::max() / MaskInts(L)) {
        return absl::FailedPreconditionError(
            absl::StrCat("the peer in node ", node, " announces ", rows_from[node], " rows"));
      }
      to[node * L + me % L] = send.rows_to[node] * MaskInts(L);
      from[node * L + me % L] = rows_from[node] * MaskInts(L);
      ints += rows_from[node] * MaskInts(L);
    }
    masks.assign(ints, 0);
    EK_RETURN_IF_ERROR(seat_.control_ep->AllToAllV(
        ConstTensorView(send.masks.data(), DType::kI32, Shape({static_cast<int64_t>(send.masks.size())})), to,
        TensorView(masks.data(), DType::kI32, Shape({ints})), from, stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
  }
  EK_ASSIGN_OR_RETURN(maps->node_middle, BuildNodeMiddlePlan(L, rows_from, masks));
  if (maps->node_middle.passed_on != maps->middle) {
    return absl::FailedPreconditionError("peers announce other rows to be passed on than their masks say");
  }
  RaggedRows nodes;
  for (int node = 0; node < N; ++node) {
    nodes.sent += send.rows_to[node];
    nodes.middle += rows_from[node];
    if (node != me / L) nodes.sent_far += send.rows_to[node];
    if (node != me / L) nodes.middle_far += rows_from[node];
  }
  maps->sizes.nodes = nodes;
  return absl::OkStatus();
}

RaggedSender RoutingExchange::Sender() const {
  return {.ep_size = ep_size(),
          .tp_size = own_tokens_ ? seat_.tp_size : 1,
          .lane = own_tokens_ ? seat_.lane : 0,
          .chunks = order_.order.chunks};
}

// Exchanges headers and records of a deduplicated dispatch, then plans with them.
absl::Status RoutingExchange::PlanDeduplicated(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const {
  const RaggedSender sender = Sender();
  const RaggedReceiver receiver = Receiver(decision, sender);
  EK_ASSIGN_OR_RETURN(maps->dedup_send, BuildDedupSendPlan(decision, sender, receiver.gathers_over_tp));
  const DedupSendPlan& send = maps->dedup_send;
  std::vector<int64_t> header = send.header;
  std::vector<int32_t> records = send.records;
  if (ep_size() > 1) EK_RETURN_IF_ERROR(ExchangeRecords(send, &header, &records, stream));
  EK_ASSIGN_OR_RETURN(maps->dedup_receive, BuildDedupReceivePlan(receiver, sender.lane, header, records));
  const DedupReceivePlan& receive = maps->dedup_receive;
  EK_RETURN_IF_ERROR(ExchangeMiddle(send.rows_to, maps, stream));
  maps->once_per_node = order_.sends_once_per_node();
  if (maps->once_per_node) EK_RETURN_IF_ERROR(PlanNodes(maps, stream));
  Here here = {ep_rank(), maps->sizes.per_node(), sender.lane};
  maps->sizes.destinations = FlowOf(send.rows_to, receive.rows_from, maps->middle, receive.rows_of_lane, here);
  std::vector<int64_t> records_to = send.record_ints_to;
  for (int64_t& count : records_to) count /= kRecordInts;
  here.lane = 0;
  maps->sizes.rows = FlowOf(records_to, receive.records_from, {}, {receive.num_expert_rows()}, here);
  return absl::OkStatus();
}

absl::Status RoutingExchange::ExchangeRecords(const DedupSendPlan& send, std::vector<int64_t>* header,
                                              std::vector<int32_t>* records, Stream& stream) const {
  const Shape shape({static_cast<int64_t>(header->size())});
  EK_RETURN_IF_ERROR(seat_.control_ep->AllToAll(ConstTensorView(send.header.data(), DType::kI64, shape),
                                                TensorView(header->data(), DType::kI64, shape), stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<int64_t> from(ep_size(), 0);
  int64_t total = 0;
  const size_t per_source = header->size() / ep_size();
  for (size_t i = 1; i < header->size(); i += 2) {
    // A count that makes no sense is refused by the plan; here it only must not become a size.
    EK_ASSIGN_OR_RETURN(const int64_t ints, CheckedMul((*header)[i], kRecordInts));
    if (ints < 0) return absl::FailedPreconditionError(absl::StrCat("a source announces ", (*header)[i], " routes"));
    from[i / per_source] += ints;
    EK_ASSIGN_OR_RETURN(total, CheckedAdd(total, ints));
  }
  if (total > std::numeric_limits<int32_t>::max()) {
    return absl::FailedPreconditionError(absl::StrCat("sources announce ", total / kRecordInts, " routes"));
  }
  records->assign(total, 0);
  const Shape sent({static_cast<int64_t>(send.records.size())});
  EK_RETURN_IF_ERROR(
      seat_.control_ep->AllToAllV(ConstTensorView(send.records.data(), DType::kI32, sent), send.record_ints_to,
                                  TensorView(records->data(), DType::kI32, Shape({total})), from, stream));
  return stream.Synchronize();
}

// The fold's weight gradients go back to the sources that sent the records.
absl::Status RoutingExchange::ReturnFoldGradient(const RowMaps& maps, const std::vector<float>& fold_gradient,
                                                 std::vector<float>* route_gradient, Stream& stream) const {
  EK_RETURN_IF_ERROR(stream.Synchronize());
  const DedupSendPlan& send = maps.dedup_send;
  const DedupReceivePlan& receive = maps.dedup_receive;
  std::vector<float> out, back(send.route_of_record.size());
  for (int32_t entry : receive.entry_of_record) out.push_back(fold_gradient[entry]);
  std::vector<int64_t> records_to = send.record_ints_to;
  for (int64_t& count : records_to) count /= kRecordInts;
  if (ep_size() > 1) {
    const ConstTensorView outgoing(out.data(), DType::kF32, Shape({static_cast<int64_t>(out.size())}));
    const TensorView incoming(back.data(), DType::kF32, Shape({static_cast<int64_t>(back.size())}));
    EK_RETURN_IF_ERROR(seat_.control_ep->AllToAllV(outgoing, receive.records_from, incoming, records_to, stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
  } else {
    back = out;
  }
  for (size_t i = 0; i < back.size(); ++i) (*route_gradient)[send.route_of_record[i]] = back[i];
  return absl::OkStatus();
}

RaggedReceiver RoutingExchange::Receiver(const RoutingDecision& decision, const RaggedSender& sender) const {
  RaggedReceiver receiver = {
      .tp_size = sender.tp_size,
      .local_experts = seat_.local_experts,
      .slot_classes = decision.slot_classes,
      .capacity = decision.capacity,
      .source_lane = {},
      .source_replica = {},
      .gathers_over_tp = own_tokens_ && seat_.tp_size > 1 && order_.layout == ExpertLayout::kTensorParallel,
      .dropless_positions = seat_.dropless_positions};
  for (int source = 0; source < ep_size(); ++source) {
    // With whole experts the EP group is consecutive ranks, and lanes are the fastest coordinate of a rank.
    const bool spans_lanes = order_.layout == ExpertLayout::kWhole && ep_size() > 1 && sender.tp_size > 1;
    const int rank = spans_lanes ? seat_.ep->group().ranks[source] : 0;
    const int first = spans_lanes ? seat_.ep->group().ranks[0] / sender.tp_size : 0;
    receiver.source_lane.push_back(spans_lanes ? rank % sender.tp_size : sender.lane);
    receiver.source_replica.push_back(spans_lanes ? rank / sender.tp_size - first : source);
  }
  return receiver;
}

}  // namespace evenkeel::moe
