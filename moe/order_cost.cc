#include "evenkeel/moe/order_cost.h"

#include <algorithm>
#include <vector>

#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

// Rows that the busiest half of an all_reduce sends: the shard of this rank is sent around, the others' are sent off.
int64_t AllReduceElements(int64_t elements, int size, int rank) {
  const int64_t shard = elements / size + (rank < elements % size ? 1 : 0);
  return (elements - shard) + shard * (size - 1);
}

// Ranks that take part in a step's collective.
int GroupSize(const Step& step, const OrderSizes& sizes) {
  if (step.level == Level::kPeers) return sizes.num_nodes();
  if (step.level == Level::kNode) return sizes.per_node();
  return step.axis == comm::Axis::kEp ? sizes.ep : sizes.tp;
}

AxisTraffic ExchangeTraffic(Level level, const RowCount& rows, const OrderSizes& sizes, int64_t row_bytes) {
  if (level == Level::kNode) return {.bytes = rows.across * row_bytes, .collectives = 1};
  const int nodes = sizes.num_nodes() - 1;
  return {.bytes = (level == Level::kPeers ? rows.far : rows.remote) * row_bytes,
          .collectives = 1,
          .inter_node_bytes = rows.far * row_bytes,
          .inter_node_messages = level == Level::kPeers ? nodes : nodes * sizes.per_node()};
}

AxisTraffic StepTraffic(const TypedStep& typed, const OrderSizes& sizes, const OrderRows& rows, bool backward) {
  const RowCount before = rows.Count(typed.before);
  const RowCount after = rows.Count(typed.after);
  const int64_t element_bytes = SizeOf(ElementType(typed.before.form, sizes.dtype, backward));
  const int64_t row_bytes = sizes.hidden * element_bytes;
  const int size = GroupSize(typed.step, sizes);
  if (size == 1) return {};
  AxisTraffic axis = {.bytes = 0, .collectives = 1};
  switch (typed.step.kind) {
    case StepKind::kAllGather:
      axis.bytes += before.rows * (size - 1) * row_bytes;
      break;
    case StepKind::kReduceScatter:
      axis.bytes += (before.rows - after.rows) * row_bytes;
      break;
    case StepKind::kAllReduce:
      axis.bytes += AllReduceElements(before.rows * sizes.hidden, size, sizes.lane) * element_bytes;
      break;
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      return ExchangeTraffic(typed.step.level, before, sizes, row_bytes);
    default:
      return {};
  }
  return axis;
}

// What travels beside the payload; see RaggedSendPlan::segments, DedupSendPlan and MoeLayer.
void AddControl(const TypedOrder& order, const OrderSizes& sizes, const OrderRows& rows, bool backward,
                OrderTraffic* traffic) {
  const bool own = DispatchesOwnTokens(order);
  if (order.is_ragged() && sizes.ep > 1) {
    if (order.is_deduplicated()) {
      // Records: four i32 per route that goes to another rank; their weights' gradients come back as one f32.
      const bool all_lanes = own && order.layout == ExpertLayout::kTensorParallel;
      const RaggedRows& records = rows.Flow(Dim::kRows);
      traffic->control_ep.bytes += backward
                                       ? records.arrived_remote * 4
                                       : (sizes.ep - 1) * (all_lanes ? sizes.tp : 1) * 16 + records.sent_remote * 16;
      traffic->control_ep.collectives += backward ? 1 : 2;
    } else if (!backward) {
      traffic->control_ep.bytes +=
          sizes.experts / sizes.ep * (sizes.ep - 1) * sizes.slot_classes * (own ? sizes.tp : 1) * 8;
      ++traffic->control_ep.collectives;
    }
    if (!backward && order.has_levels() && sizes.num_nodes() > 1) {
      // Each peer is told how many rows it is to pass on to each rank of its node.
      traffic->control_ep.bytes += int64_t{8} * order.order.chunks * (sizes.ep - sizes.per_node());
      ++traffic->control_ep.collectives;
      if (order.sends_once_per_node()) {
        // How many rows, and for each the ranks of the node that it is for, as bits.
        traffic->control_ep.bytes +=
            int64_t{8} * (sizes.num_nodes() - 1) + rows.Flow(Dim::kNodes).sent_far * MaskInts(sizes.per_node()) * 4;
        traffic->control_ep.collectives += 2;
      }
    }
  }
  const AxisType weighted = order.weighted_rows();
  if (!backward || sizes.tp == 1 || weighted.placement == Placement::kInvariant) return;
  ++traffic->control_tp.collectives;
  if (IsVarying(weighted) && weighted.dim != Dim::kSlots) {
    const int64_t tokens = OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size();
    traffic->control_tp.bytes += tokens * sizes.top_k * 4 * (sizes.tp - 1);
  } else {
    traffic->control_tp.bytes += AllReduceElements(sizes.tokens * sizes.top_k, sizes.tp, sizes.lane) * 4;
  }
}

}  // namespace

OrderTraffic ComputeTraffic(const TypedOrder& order, const OrderSizes& sizes, bool backward) {
  const OrderRows rows(order, sizes);
  OrderTraffic traffic;
  const std::vector<TypedStep>& program = backward ? order.backward : order.forward;
  const ChunkedSteps chunked = ChunkedStepsOf(program);
  for (size_t i = 0; i < program.size(); ++i) {
    AxisTraffic& axis = program[i].step.axis == comm::Axis::kEp ? traffic.ep : traffic.tp;
    const AxisTraffic step = StepTraffic(program[i], sizes, rows, backward);
    const int times = chunked.holds(static_cast<int>(i)) ? order.order.chunks : 1;
    axis.bytes += step.bytes;
    axis.collectives += step.collectives * times;
    axis.inter_node_bytes += step.inter_node_bytes;
    axis.inter_node_messages += step.inter_node_messages * times;
  }
  AddControl(order, sizes, rows, backward, &traffic);
  return traffic;
}

AxisTraffic ComputeStepTraffic(const TypedOrder& order, const OrderSizes& sizes, const TypedStep& step, bool backward) {
  return StepTraffic(step, sizes, OrderRows(order, sizes), backward);
}

absl::StatusOr<OrderCost> ComputeOrderCost(const TypedOrder& order, const OrderSizes& sizes) {
  EK_RETURN_IF_ERROR(CheckOrderSizes(order, sizes));
  OrderCost cost;
  cost.forward = ComputeTraffic(order, sizes, false);
  cost.backward = ComputeTraffic(order, sizes, true);
  cost.forward_formula = ClosedForms(order, false);
  cost.backward_formula = ClosedForms(order, true);
  cost.memory = BuildSchedules(order, sizes).memory();
  return cost;
}

}  // namespace evenkeel::moe
