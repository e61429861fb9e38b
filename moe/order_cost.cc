#include "evenkeel/moe/order_cost.h"

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }
bool AtExperts(const ValueType& type) { return type.ep.dim == Dim::kExperts; }

// Rows of a value, and how many of them an exchange sends to others.
struct RowCount {
  int64_t rows = 0;
  int64_t remote = 0;
};

RowCount CountRows(const ValueType& type, const OrderSizes& sizes, const RaggedRows& ragged) {
  switch (type.form) {
    case Dim::kTokens:
      return {IsVarying(type.tp) ? OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size() : sizes.tokens, 0};
    case Dim::kSlots: {
      const int64_t rows = sizes.experts * sizes.capacity / (IsVarying(type.tp) ? sizes.tp : 1);
      return {rows, rows / sizes.ep * (sizes.ep - 1)};
    }
    default:
      break;
  }
  if (!AtExperts(type)) return {ragged.sent, ragged.sent_remote};
  if (type.tp.dim != Dim::kUnset && !IsVarying(type.tp)) return {ragged.gathered, 0};
  return {ragged.arrived, ragged.arrived_remote};
}

// Rows that the busiest half of an all_reduce sends: the shard of this rank is sent around, the others' are sent off.
int64_t AllReduceElements(int64_t elements, int size, int rank) {
  const int64_t shard = elements / size + (rank < elements % size ? 1 : 0);
  return (elements - shard) + shard * (size - 1);
}

AxisTraffic StepTraffic(const TypedStep& typed, const OrderSizes& sizes, const RaggedRows& ragged) {
  const RowCount before = CountRows(typed.before, sizes, ragged);
  const RowCount after = CountRows(typed.after, sizes, ragged);
  const int64_t row_bytes = sizes.hidden * SizeOf(sizes.dtype);
  const bool on_ep = typed.step.axis == comm::Axis::kEp;
  const int size = on_ep ? sizes.ep : sizes.tp;
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
      axis.bytes += AllReduceElements(before.rows * sizes.hidden, size, sizes.lane) * SizeOf(sizes.dtype);
      break;
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      axis.bytes += before.remote * row_bytes;
      break;
    default:
      return {};
  }
  return axis;
}

bool DispatchesOwnTokens(const TypedOrder& order) {
  for (const TypedStep& typed : order.forward) {
    if (typed.step.kind == StepKind::kDispatch) return IsVarying(typed.before.tp);
  }
  return false;
}

// What travels beside the payload; see RaggedSendPlan::segments and MoeLayer.
void AddControl(const TypedOrder& order, const OrderSizes& sizes, bool backward, OrderTraffic* traffic) {
  if (!backward && order.is_ragged() && sizes.ep > 1) {
    const int lanes = DispatchesOwnTokens(order) ? sizes.tp : 1;
    traffic->control_ep.bytes += sizes.experts / sizes.ep * (sizes.ep - 1) * sizes.slot_classes * lanes * 8;
    ++traffic->control_ep.collectives;
  }
  const AxisType combined = order.combine_input();
  if (!backward || sizes.tp == 1 || combined.placement == Placement::kInvariant) return;
  ++traffic->control_tp.collectives;
  if (IsVarying(combined) && combined.dim != Dim::kSlots) {
    const int64_t own = OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size();
    traffic->control_tp.bytes += own * sizes.top_k * 4 * (sizes.tp - 1);
  } else {
    traffic->control_tp.bytes += AllReduceElements(sizes.tokens * sizes.top_k, sizes.tp, sizes.lane) * 4;
  }
}

// Terms of a closed form. Each is count * factor / (T when divided) * unit.
enum Unit { kV, kArrivedRows, kTokenRows, kRoutedRows };
constexpr int kNumUnits = 4;
struct Terms {
  // [unit][divided by T]
  std::array<std::array<int, 2>, kNumUnits> count = {};
};

Unit UnitOf(const ValueType& type) {
  if (type.form == Dim::kSlots) return kV;
  if (type.form == Dim::kTokens) return kTokenRows;
  return AtExperts(type) && !IsVarying(type.tp) ? kArrivedRows : kRoutedRows;
}

void AddTerms(const TypedStep& typed, bool sliced_rows, Terms* tp, Terms* ep) {
  switch (typed.step.kind) {
    case StepKind::kAllGather:
      ++tp->count[UnitOf(typed.after)][0];
      break;
    case StepKind::kReduceScatter:
      ++tp->count[UnitOf(typed.before)][0];
      break;
    case StepKind::kAllReduce:
      tp->count[UnitOf(typed.before)][0] += 2;
      break;
    case StepKind::kAllToAll:
      ++ep->count[kV][IsVarying(typed.before.tp) ? 1 : 0];
      break;
    case StepKind::kAllToAllV:
      ++ep->count[kRoutedRows][sliced_rows ? 1 : 0];
      break;
    default:
      break;
  }
}

std::string Coefficient(int count) { return count == 1 ? "" : absl::StrCat(count); }

// The sum of an axis' terms, those with a common factor in one bracket.
std::string FormatTerms(const Terms& terms, char axis) {
  std::vector<std::string> parts;
  for (int divided : {0, 1}) {
    const std::string fraction = divided ? absl::StrCat("(", std::string(1, axis), "-1)/(", std::string(1, axis), "T)")
                                         : absl::StrCat("(", std::string(1, axis), "-1)/", std::string(1, axis));
    const int v = terms.count[kV][divided];
    if (v > 0) parts.push_back(absl::StrCat(Coefficient(v), fraction, " V"));
    const int routed = terms.count[kRoutedRows][divided];
    if (routed > 0) parts.push_back(absl::StrCat(Coefficient(routed), fraction, " k s h b"));
    const int arrived = terms.count[kArrivedRows][divided], tokens = terms.count[kTokenRows][divided];
    if (arrived > 0 && tokens > 0) {
      parts.push_back(absl::StrCat(fraction, " (", Coefficient(arrived), "R + ", Coefficient(tokens), "s) h b"));
    } else if (arrived > 0) {
      parts.push_back(absl::StrCat(Coefficient(arrived), fraction, " R h b"));
    } else if (tokens > 0) {
      parts.push_back(absl::StrCat(Coefficient(tokens), fraction, " s h b"));
    }
  }
  return parts.empty() ? "0" : absl::StrJoin(parts, " + ");
}

}  // namespace

absl::Status CheckOrderSizes(const TypedOrder& order, const OrderSizes& sizes) {
  const int64_t extents[] = {sizes.tokens, sizes.hidden, sizes.experts, sizes.top_k, sizes.capacity, sizes.ffn};
  if (*std::min_element(std::begin(extents), std::end(extents)) < 0 || sizes.tp < 1 || sizes.ep < 1) {
    return absl::InvalidArgumentError(absl::StrCat("order sizes must not be negative: tokens ", sizes.tokens,
                                                   ", hidden ", sizes.hidden, ", experts ", sizes.experts, ", top_k ",
                                                   sizes.top_k, ", capacity ", sizes.capacity, ", ffn ", sizes.ffn,
                                                   ", tp ", sizes.tp, ", ep ", sizes.ep));
  }
  if (sizes.lane < 0 || sizes.lane >= sizes.tp) {
    return absl::InvalidArgumentError(absl::StrCat("lane ", sizes.lane, " is not in a TP group of ", sizes.tp));
  }
  if (sizes.experts % sizes.ep != 0) {
    return absl::InvalidArgumentError(absl::StrCat(sizes.experts, " experts are not divisible by ep ", sizes.ep));
  }
  if (!order.is_ragged() && sizes.capacity % sizes.tp != 0) {
    return absl::InvalidArgumentError(absl::StrCat("capacity ", sizes.capacity, " is not a multiple of tp ", sizes.tp));
  }
  // The largest product anywhere below: rows * width * element, a few times over.
  EK_ASSIGN_OR_RETURN(int64_t padded, CheckedMul(sizes.experts, sizes.capacity));
  EK_ASSIGN_OR_RETURN(int64_t routed, CheckedMul(sizes.tokens, std::max<int64_t>(1, sizes.top_k)));
  int64_t rows = std::max(padded, routed);
  if (sizes.rows.has_value()) rows = std::max({rows, sizes.rows->gathered, sizes.rows->arrived, sizes.rows->sent});
  EK_ASSIGN_OR_RETURN(int64_t elements, CheckedMul(rows, std::max(sizes.hidden, sizes.ffn)));
  EK_ASSIGN_OR_RETURN(int64_t group, CheckedMul(elements, int64_t{sizes.tp} * sizes.ep));
  return CheckedMul(group, 64 * 8).status();
}

RaggedRows RowsOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.rows.has_value()) return *sizes.rows;
  const bool own = DispatchesOwnTokens(order);
  const int64_t tokens = own ? OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size() : sizes.tokens;
  RaggedRows rows;
  rows.sent = tokens * sizes.top_k;
  rows.sent_remote = rows.sent / sizes.ep * (sizes.ep - 1);
  rows.arrived = rows.sent;
  rows.arrived_remote = rows.sent_remote;
  rows.gathered = own && order.layout == ExpertLayout::kTensorParallel ? sizes.tokens * sizes.top_k : rows.arrived;
  rows.gathered_before = OwnTokens(sizes.tokens, sizes.tp, sizes.lane).begin * sizes.top_k;
  return rows;
}

OrderTraffic ComputeTraffic(const TypedOrder& order, const OrderSizes& sizes, bool backward) {
  const RaggedRows rows = RowsOrExpected(order, sizes);
  OrderTraffic traffic;
  for (const TypedStep& typed : backward ? order.backward : order.forward) {
    AxisTraffic& axis = typed.step.axis == comm::Axis::kEp ? traffic.ep : traffic.tp;
    const AxisTraffic step = StepTraffic(typed, sizes, rows);
    axis.bytes += step.bytes;
    axis.collectives += step.collectives;
  }
  AddControl(order, sizes, backward, &traffic);
  return traffic;
}

AxisTraffic ComputeStepTraffic(const TypedOrder& order, const OrderSizes& sizes, const TypedStep& step) {
  return StepTraffic(step, sizes, RowsOrExpected(order, sizes));
}

AxisFormula ClosedForms(const TypedOrder& order, bool backward) {
  const bool sliced_rows = DispatchesOwnTokens(order);
  Terms tp, ep;
  for (const TypedStep& typed : backward ? order.backward : order.forward) AddTerms(typed, sliced_rows, &tp, &ep);
  return {.tp = FormatTerms(tp, 'T'), .ep = FormatTerms(ep, 'E')};
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
