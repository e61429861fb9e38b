#include "evenkeel/moe/order_planner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/moe/overlap_estimate.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kSmallElements = 1;
constexpr int64_t kLargeElements = 64 * 1024;
constexpr int kRepeats = 5;

absl::Status CheckModel(const CostModel& model) {
  const LinkModel between = model.ep_between.value_or(LinkModel());
  for (double value : {model.tp.alpha_seconds, model.tp.seconds_per_byte, model.ep.alpha_seconds,
                       model.ep.seconds_per_byte, between.alpha_seconds, between.seconds_per_byte}) {
    if (std::isfinite(value) && value >= 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("a cost model has finite figures of at least 0, not ", value));
  }
  if (std::isfinite(model.expert_flops_per_second) && model.expert_flops_per_second >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("experts compute ", model.expert_flops_per_second, " operations per second, wanted at least 0"));
}

double AxisSeconds(const AxisTraffic& traffic, const LinkModel& link) {
  return traffic.collectives * link.alpha_seconds + static_cast<double>(traffic.bytes) * link.seconds_per_byte;
}

double ExchangeSeconds(const AxisTraffic& traffic, const CostModel& model) {
  if (!model.ep_between.has_value()) return AxisSeconds(traffic, model.ep);
  AxisTraffic inside = traffic;
  inside.bytes -= traffic.inter_node_bytes;
  return AxisSeconds(inside, model.ep) +
         static_cast<double>(traffic.inter_node_messages) * model.ep_between->alpha_seconds +
         static_cast<double>(traffic.inter_node_bytes) * model.ep_between->seconds_per_byte;
}

double TrafficSeconds(const OrderTraffic& traffic, const CostModel& model) {
  return AxisSeconds(traffic.tp, model.tp) + ExchangeSeconds(traffic.ep, model) +
         AxisSeconds(traffic.control_tp, model.tp) + AxisSeconds(traffic.control_ep, model.ep);
}

std::string Explain(const std::vector<OrderEstimate>& estimates, bool with_experts) {
  const OrderEstimate& best = estimates.front();
  std::string why = absl::StrFormat("%s: %.1f us of communication%s per layer", best.name, best.seconds * 1e6,
                                    with_experts ? " and experts" : "");
  if (estimates.size() == 1) return why + "; no other order runs in this layout";
  const OrderEstimate& next = estimates[1];
  const auto delta = [&](auto member) {
    const auto of = [&](const OrderTraffic& t) { return (t.*member).bytes; };
    return of(best.cost.forward) + of(best.cost.backward) - of(next.cost.forward) - of(next.cost.backward);
  };
  return why + absl::StrFormat("; %s would take %.1f us: %s sends %+d B on EP and %+d B on TP, in %+d collectives",
                               next.name, next.seconds * 1e6, best.name, delta(&OrderTraffic::ep),
                               delta(&OrderTraffic::tp),
                               best.cost.forward.ep.collectives + best.cost.forward.tp.collectives +
                                   best.cost.backward.ep.collectives + best.cost.backward.tp.collectives -
                                   next.cost.forward.ep.collectives - next.cost.forward.tp.collectives -
                                   next.cost.backward.ep.collectives - next.cost.backward.tp.collectives);
}

// The best of a few runs of an all-gather of n floats per rank.
absl::StatusOr<double> GatherSeconds(comm::Communicator* group, int64_t n, Device* device, Clock* clock,
                                     Stream& stream) {
  EK_ASSIGN_OR_RETURN(const Tensor send, Tensor::Zeros(device, DType::kF32, Shape({n})));
  EK_ASSIGN_OR_RETURN(const Tensor receive, Tensor::Zeros(device, DType::kF32, Shape({n * group->size()})));
  double best = 0;
  for (int i = 0; i < kRepeats; ++i) {
    EK_RETURN_IF_ERROR(group->Barrier(stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const absl::Duration begin = clock->Now();
    EK_RETURN_IF_ERROR(group->AllGather(send.const_view(), receive.view(), stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const double seconds = absl::ToDoubleSeconds(clock->Now() - begin);
    best = i == 0 ? seconds : std::min(best, seconds);
  }
  return best;
}

absl::StatusOr<LinkModel> MeasureLink(comm::Communicator* group, Device* device, Clock* clock, Stream& stream) {
  if (group == nullptr || group->size() == 1) return LinkModel();
  EK_ASSIGN_OR_RETURN(const double small, GatherSeconds(group, kSmallElements, device, clock, stream));
  EK_ASSIGN_OR_RETURN(const double large, GatherSeconds(group, kLargeElements, device, clock, stream));
  const double bytes = static_cast<double>((kLargeElements - kSmallElements) * 4 * (group->size() - 1));
  return LinkModel{.alpha_seconds = small, .seconds_per_byte = std::max(0.0, large - small) / bytes};
}

// Where the line of `second` goes below that of `first`; both from sizes `empty` at 0 to `sizes` at `end`.
absl::StatusOr<std::optional<double>> Crossover(const TypedOrder& first, const TypedOrder& second,
                                                const OrderSizes& empty, const OrderSizes& sizes, double end,
                                                const CostModel& model) {
  EK_RETURN_IF_ERROR(CheckModel(model));
  EK_ASSIGN_OR_RETURN(const OrderCost first_empty, ComputeOrderCost(first, empty));
  EK_ASSIGN_OR_RETURN(const OrderCost second_empty, ComputeOrderCost(second, empty));
  EK_ASSIGN_OR_RETURN(const OrderCost first_full, ComputeOrderCost(first, sizes));
  EK_ASSIGN_OR_RETURN(const OrderCost second_full, ComputeOrderCost(second, sizes));
  if (end == 0) return absl::InvalidArgumentError("a crossover needs sizes with rows");
  const double at_start = EstimateSeconds(second_empty, model) - EstimateSeconds(first_empty, model);
  const double at_end = EstimateSeconds(second_full, model) - EstimateSeconds(first_full, model);
  const double slope = (at_end - at_start) / end;
  if (at_start < 0 || (at_start == 0 && slope < 0)) return slope <= 0 ? std::optional<double>(0) : std::nullopt;
  if (slope >= 0) return std::optional<double>();
  return std::optional<double>(at_start / -slope);
}

}  // namespace

double EstimateSeconds(const OrderCost& cost, const CostModel& model) {
  return TrafficSeconds(cost.forward, model) + TrafficSeconds(cost.backward, model);
}

double EstimateSecondsWithExperts(const TypedOrder& order, const OrderSizes& sizes, const CostModel& model) {
  const auto tp = [&](const AxisTraffic& traffic) { return AxisSeconds(traffic, model.tp); };
  const auto ep = [&](const AxisTraffic& traffic) { return ExchangeSeconds(traffic, model); };
  double seconds = 0;
  for (const bool backward : {false, true}) {
    const OrderTraffic traffic = ComputeTraffic(order, sizes, backward);
    seconds += EstimatePassSeconds(order, sizes, backward, tp, ep, model.expert_flops_per_second) +
               AxisSeconds(traffic.control_tp, model.tp) + AxisSeconds(traffic.control_ep, model.ep);
  }
  return seconds;
}

std::vector<std::string> WithChunks(absl::Span<const std::string> names, const OrderSizes& sizes) {
  std::vector<std::string> all(names.begin(), names.end());
  for (const std::string& name : names) {
    for (const int chunks : {2, 4}) {
      if (sizes.experts / sizes.ep < chunks) continue;
      const std::string overlapped = absl::StrCat("overlapped(", name, chunks == 2 ? ")" : ":4)");
      if (FindOrder(overlapped).ok()) all.push_back(overlapped);
    }
  }
  return all;
}

absl::StatusOr<OrderPlan> PlanOrder(absl::Span<const std::string> names, ExpertLayout layout, const OrderSizes& sizes,
                                    const CostModel& model) {
  EK_RETURN_IF_ERROR(CheckModel(model));
  const bool with_experts = model.expert_flops_per_second > 0;
  if (with_experts && sizes.ffn < 1) {
    return absl::InvalidArgumentError(absl::StrCat("experts of width ", sizes.ffn, " take no time to plan with"));
  }
  OrderPlan plan;
  for (const std::string& name : names) {
    EK_ASSIGN_OR_RETURN(const Order order, FindOrder(name));
    const absl::StatusOr<TypedOrder> typed = CheckOrder(order, layout);
    if (!typed.ok()) continue;
    OrderEstimate estimate;
    estimate.name = name;
    EK_ASSIGN_OR_RETURN(estimate.cost, ComputeOrderCost(*typed, sizes));
    estimate.seconds =
        with_experts ? EstimateSecondsWithExperts(*typed, sizes, model) : EstimateSeconds(estimate.cost, model);
    plan.estimates.push_back(std::move(estimate));
  }
  if (plan.estimates.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("none of the orders ", absl::StrJoin(names, ", "),
                                                   " runs in expert layout ", ExpertLayoutName(layout)));
  }
  std::stable_sort(plan.estimates.begin(), plan.estimates.end(),
                   [](const OrderEstimate& a, const OrderEstimate& b) { return a.seconds < b.seconds; });
  plan.why = Explain(plan.estimates, with_experts);
  return plan;
}

absl::StatusOr<std::optional<double>> CrossoverBytes(const TypedOrder& first, const TypedOrder& second,
                                                     const OrderSizes& sizes, const CostModel& model) {
  if (first.is_ragged() || second.is_ragged()) {
    return absl::InvalidArgumentError("a crossover in V is defined for padded orders");
  }
  OrderSizes empty = sizes;
  empty.capacity = 0;
  EK_RETURN_IF_ERROR(CheckOrderSizes(first, sizes));
  const double volume =
      static_cast<double>(sizes.experts * sizes.capacity * sizes.hidden * static_cast<int64_t>(SizeOf(sizes.dtype)));
  return Crossover(first, second, empty, sizes, volume, model);
}

absl::StatusOr<std::optional<double>> CrossoverTokens(const TypedOrder& first, const TypedOrder& second,
                                                      const OrderSizes& sizes, const CostModel& model) {
  OrderSizes empty = sizes, full = sizes;
  empty.capacity = empty.tokens = 0;
  for (OrderSizes* either : {&empty, &full}) {
    either->rows = either->destinations = either->nodes = std::nullopt;
    either->chunk_rows.clear();
  }
  return Crossover(first, second, empty, full, static_cast<double>(sizes.tokens), model);
}

absl::StatusOr<CostModel> CalibrateCostModel(const LinksToMeasure& links, Device* device, Clock* clock,
                                             Stream& stream) {
  std::vector<double> figures;
  for (comm::Communicator* group : {links.tp, links.ep, links.ep_peers}) {
    EK_ASSIGN_OR_RETURN(const LinkModel link, MeasureLink(group, device, clock, stream));
    figures.insert(figures.end(), {link.alpha_seconds, link.seconds_per_byte});
  }
  const TensorView view(figures.data(), DType::kF64, Shape({static_cast<int64_t>(figures.size())}));
  for (comm::Communicator* group : {links.tp, links.ep, links.ep_peers, links.all}) {
    if (group == nullptr || group->size() == 1) continue;
    EK_RETURN_IF_ERROR(group->AllReduce(view, view, comm::ReduceOp::kMax, stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
  }
  CostModel model;
  model.tp = {.alpha_seconds = figures[0], .seconds_per_byte = figures[1]};
  model.ep = {.alpha_seconds = figures[2], .seconds_per_byte = figures[3]};
  if (links.ep_peers != nullptr && links.ep_peers->size() > 1) {
    model.ep_between =
        LinkModel{.alpha_seconds = figures[4] / (links.ep_peers->size() - 1), .seconds_per_byte = figures[5]};
  }
  return model;
}

}  // namespace evenkeel::moe
