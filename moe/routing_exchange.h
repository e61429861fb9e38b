// Tells the ranks that are about to exchange rows how many to expect, and makes the row maps of both ends.
//
// Padded orders need nothing: every block is as large as the capacity says. Ragged ones first exchange their row counts
// (or records, where tokens are deduplicated), and with an exchange in two levels each rank tells its peers what to
// pass on inside their nodes. All over the control group, by all ranks, whatever the routing says.
//
//   RoutingExchange exchange(order, seat);
//   EK_RETURN_IF_ERROR(exchange.Plan(decision, &maps, stream));
#ifndef EVENKEEL_MOE_ROUTING_EXCHANGE_H_
#define EVENKEEL_MOE_ROUTING_EXCHANGE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/moe/row_maps.h"
#include "evenkeel/runtime/device/device.h"

namespace evenkeel::moe {

// Where a rank takes part. A value.
struct ExchangeSeat {
  comm::Communicator* ep = nullptr;          // null: group of one
  comm::Communicator* control_ep = nullptr;  // the same ranks; carries what is told here
  int tp_size = 1;
  int lane = 0;
  int local_experts = 1;
  int64_t dropless_positions = 0;  // see RaggedReceiver
};

// Not thread-safe. All ranks of the EP group make the same calls in the same order. `order` outlives it.
class RoutingExchange {
 public:
  RoutingExchange(const TypedOrder& order, const ExchangeSeat& seat);

  // Fills the plans of `maps`, and the row counts of its sizes, whose other fields are set. Waits for `stream`.
  // InvalidArgument for a decision that has no plan, FailedPrecondition when sources disagree, Internal when rows would
  // be lost or doubled; errors of the communicator.
  absl::Status Plan(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const;

  // The fold's weight gradients go back to the sources that sent the records, into [s, k] route gradients.
  absl::Status ReturnFoldGradient(const RowMaps& maps, const std::vector<float>& fold_gradient,
                                  std::vector<float>* route_gradient, Stream& stream) const;

 private:
  absl::Status PlanRagged(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const;
  absl::Status PlanDeduplicated(const RoutingDecision& decision, RowMaps* maps, Stream& stream) const;
  absl::Status ExchangeRecords(const DedupSendPlan& send, std::vector<int64_t>* header, std::vector<int32_t>* records,
                               Stream& stream) const;
  // Rows half way, from the rows to each destination. [chunks, E] both.
  absl::Status ExchangeMiddle(const std::vector<int64_t>& rows_to, RowMaps* maps, Stream& stream) const;
  // What is sent once per node, and what this rank passes on.
  absl::Status PlanNodes(RowMaps* maps, Stream& stream) const;
  RaggedSender Sender() const;
  RaggedReceiver Receiver(const RoutingDecision& decision, const RaggedSender& sender) const;
  int ep_size() const { return seat_.ep == nullptr ? 1 : seat_.ep->size(); }
  int ep_rank() const { return seat_.ep == nullptr ? 0 : seat_.ep->rank(); }

  const TypedOrder& order_;
  const ExchangeSeat seat_;
  const bool own_tokens_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTING_EXCHANGE_H_
