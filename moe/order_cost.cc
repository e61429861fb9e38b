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

// The two kinds of real rows at one routing.
struct Flows {
  RaggedRows rows;
  RaggedRows destinations;
};

Flows FlowsOf(const TypedOrder& order, const OrderSizes& sizes) {
  return {RowsOrExpected(order, sizes), DestinationsOrExpected(order, sizes)};
}

RowCount CountRows(const ValueType& type, const OrderSizes& sizes, const Flows& flows) {
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
  const RaggedRows& ragged = type.form == Dim::kRows ? flows.rows : flows.destinations;
  if (!AtExperts(type)) return {ragged.sent, ragged.sent_remote};
  if (type.tp.dim != Dim::kUnset && !IsVarying(type.tp)) return {ragged.gathered, 0};
  return {ragged.arrived, ragged.arrived_remote};
}

// Rows that the busiest half of an all_reduce sends: the shard of this rank is sent around, the others' are sent off.
int64_t AllReduceElements(int64_t elements, int size, int rank) {
  const int64_t shard = elements / size + (rank < elements % size ? 1 : 0);
  return (elements - shard) + shard * (size - 1);
}

AxisTraffic StepTraffic(const TypedStep& typed, const OrderSizes& sizes, const Flows& flows, bool backward) {
  const RowCount before = CountRows(typed.before, sizes, flows);
  const RowCount after = CountRows(typed.after, sizes, flows);
  const int64_t element_bytes = SizeOf(ElementType(typed.before.form, sizes.dtype, backward));
  const int64_t row_bytes = sizes.hidden * element_bytes;
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
      axis.bytes += AllReduceElements(before.rows * sizes.hidden, size, sizes.lane) * element_bytes;
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

// What travels beside the payload; see RaggedSendPlan::segments, DedupSendPlan and MoeLayer.
void AddControl(const TypedOrder& order, const OrderSizes& sizes, const Flows& flows, bool backward,
                OrderTraffic* traffic) {
  const bool own = DispatchesOwnTokens(order);
  if (order.is_ragged() && sizes.ep > 1) {
    if (order.is_deduplicated()) {
      // Records: four i32 per route that goes to another rank; their weights' gradients come back as one f32.
      const bool all_lanes = own && order.layout == ExpertLayout::kTensorParallel;
      const RaggedRows& records = flows.rows;
      traffic->control_ep.bytes += backward
                                       ? records.arrived_remote * 4
                                       : (sizes.ep - 1) * (all_lanes ? sizes.tp : 1) * 16 + records.sent_remote * 16;
      traffic->control_ep.collectives += backward ? 1 : 2;
    } else if (!backward) {
      traffic->control_ep.bytes +=
          sizes.experts / sizes.ep * (sizes.ep - 1) * sizes.slot_classes * (own ? sizes.tp : 1) * 8;
      ++traffic->control_ep.collectives;
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

// Terms of a closed form. Each is count * factor / (T when divided) * unit.
// kSums and kGatheredSums count the wide rows of partial sums.
enum Unit { kV, kArrivedRows, kTokenRows, kRoutedRows, kDestinationRows, kSums, kGathered, kGatheredSums };
constexpr int kNumUnits = 8;
struct Terms {
  // [unit][divided by T]
  std::array<std::array<int, 2>, kNumUnits> count = {};
};

Unit UnitOf(const ValueType& type, bool backward) {
  if (type.form == Dim::kSlots) return kV;
  if (type.form == Dim::kTokens) return kTokenRows;
  if (type.form != Dim::kRows) {
    const bool sums = (type.form == Dim::kSums) != backward;
    if (AtExperts(type) && !IsVarying(type.tp)) return sums ? kGatheredSums : kGathered;
    return sums ? kSums : kDestinationRows;
  }
  return AtExperts(type) && !IsVarying(type.tp) ? kArrivedRows : kRoutedRows;
}

void AddTerms(const TypedStep& typed, bool sliced_rows, bool backward, Terms* tp, Terms* ep) {
  switch (typed.step.kind) {
    case StepKind::kAllGather:
      ++tp->count[UnitOf(typed.after, backward)][0];
      break;
    case StepKind::kReduceScatter:
      ++tp->count[UnitOf(typed.before, backward)][0];
      break;
    case StepKind::kAllReduce:
      tp->count[UnitOf(typed.before, backward)][0] += 2;
      break;
    case StepKind::kAllToAll:
      ++ep->count[kV][IsVarying(typed.before.tp) ? 1 : 0];
      break;
    case StepKind::kAllToAllV: {
      const Unit unit = UnitOf(typed.before, backward);
      const bool by_destination = unit != kRoutedRows && unit != kArrivedRows;
      const bool sums = unit == kSums || unit == kGatheredSums;
      ++ep->count[by_destination ? (sums ? kSums : kDestinationRows) : kRoutedRows][sliced_rows ? 1 : 0];
      break;
    }
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
    const auto whole = [&](Unit unit, absl::string_view text) {
      const int count = terms.count[unit][divided];
      if (count > 0) parts.push_back(absl::StrCat(Coefficient(count), count > 1 ? " " : "", text));
    };
    const auto fractional = [&](Unit unit, absl::string_view text) {
      const int count = terms.count[unit][divided];
      if (count > 0) parts.push_back(absl::StrCat(Coefficient(count), fraction, " ", text));
    };
    whole(kDestinationRows, "D h b");
    whole(kSums, "D h w");
    fractional(kGathered, "G h b");
    fractional(kGatheredSums, "G h w");
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
  if (sizes.experts / sizes.ep % order.order.chunks != 0) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.order.name, "' wants ", order.order.chunks,
                                                   " chunks of equally many local experts; there are ",
                                                   sizes.experts / sizes.ep));
  }
  if (!order.is_ragged() && sizes.capacity % sizes.tp != 0) {
    return absl::InvalidArgumentError(absl::StrCat("capacity ", sizes.capacity, " is not a multiple of tp ", sizes.tp));
  }
  // The largest product anywhere below: rows * width * element, a few times over.
  EK_ASSIGN_OR_RETURN(int64_t padded, CheckedMul(sizes.experts, sizes.capacity));
  EK_ASSIGN_OR_RETURN(int64_t routed, CheckedMul(sizes.tokens, std::max<int64_t>(1, sizes.top_k)));
  int64_t rows = std::max(padded, routed);
  for (const std::optional<RaggedRows>* flow : {&sizes.rows, &sizes.destinations}) {
    if (flow->has_value()) rows = std::max({rows, (*flow)->gathered, (*flow)->arrived, (*flow)->sent});
  }
  EK_ASSIGN_OR_RETURN(int64_t elements, CheckedMul(rows, std::max(sizes.hidden, sizes.ffn)));
  EK_ASSIGN_OR_RETURN(int64_t group, CheckedMul(elements, int64_t{sizes.tp} * sizes.ep));
  return CheckedMul(group, 64 * 8).status();
}

RaggedRows RowsOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.rows.has_value()) return *sizes.rows;
  const bool own = DispatchesOwnTokens(order);
  // Where tokens are deduplicated these are records, and each lane tells of all lanes' tokens.
  const bool all = !own || (order.is_deduplicated() && order.layout == ExpertLayout::kTensorParallel);
  const int64_t tokens = all ? sizes.tokens : OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size();
  RaggedRows rows;
  rows.sent = tokens * sizes.top_k;
  rows.sent_remote = rows.sent / sizes.ep * (sizes.ep - 1);
  rows.arrived = rows.sent;
  rows.arrived_remote = rows.sent_remote;
  rows.gathered = own && order.layout == ExpertLayout::kTensorParallel ? sizes.tokens * sizes.top_k : rows.arrived;
  rows.gathered_before = OwnTokens(sizes.tokens, sizes.tp, sizes.lane).begin * sizes.top_k;
  return rows;
}

RaggedRows DestinationsOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.destinations.has_value()) return *sizes.destinations;
  const bool own = DispatchesOwnTokens(order);
  // The chance that none of k distinct random experts is on a given rank.
  const int64_t elsewhere = sizes.experts - sizes.experts / sizes.ep;
  double none = 1;
  for (int64_t j = 0; j < sizes.top_k && j < sizes.experts; ++j) {
    none *= static_cast<double>(std::max<int64_t>(0, elsewhere - j)) / static_cast<double>(sizes.experts - j);
  }
  const auto rows_of = [&](int64_t tokens) {
    return static_cast<int64_t>(static_cast<double>(tokens) * sizes.ep * (1 - none) + 0.5);
  };
  const TokenRange tokens = OwnTokens(sizes.tokens, sizes.tp, sizes.lane);
  RaggedRows rows;
  rows.sent = rows_of(own ? tokens.size() : sizes.tokens);
  rows.sent_remote = rows.sent / sizes.ep * (sizes.ep - 1);
  rows.arrived = rows.sent;
  rows.arrived_remote = rows.sent_remote;
  const bool gathers = own && order.layout == ExpertLayout::kTensorParallel;
  rows.gathered = gathers ? rows_of(sizes.tokens) : rows.arrived;
  rows.gathered_before = gathers ? rows_of(tokens.begin) : 0;
  return rows;
}

DType ElementType(Dim form, DType dtype, bool backward) {
  const bool sums = form == (backward ? Dim::kDestinations : Dim::kSums);
  return sums && dtype == DType::kBF16 ? DType::kF32 : dtype;
}

OrderTraffic ComputeTraffic(const TypedOrder& order, const OrderSizes& sizes, bool backward) {
  const Flows flows = FlowsOf(order, sizes);
  OrderTraffic traffic;
  const std::vector<TypedStep>& program = backward ? order.backward : order.forward;
  const ChunkedSteps chunked = ChunkedStepsOf(program);
  for (size_t i = 0; i < program.size(); ++i) {
    AxisTraffic& axis = program[i].step.axis == comm::Axis::kEp ? traffic.ep : traffic.tp;
    const AxisTraffic step = StepTraffic(program[i], sizes, flows, backward);
    axis.bytes += step.bytes;
    axis.collectives += step.collectives * (chunked.holds(static_cast<int>(i)) ? order.order.chunks : 1);
  }
  AddControl(order, sizes, flows, backward, &traffic);
  return traffic;
}

AxisTraffic ComputeStepTraffic(const TypedOrder& order, const OrderSizes& sizes, const TypedStep& step, bool backward) {
  return StepTraffic(step, sizes, FlowsOf(order, sizes), backward);
}

AxisFormula ClosedForms(const TypedOrder& order, bool backward) {
  const bool sliced_rows = DispatchesOwnTokens(order);
  Terms tp, ep;
  for (const TypedStep& typed : backward ? order.backward : order.forward) {
    AddTerms(typed, sliced_rows, backward, &tp, &ep);
  }
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
