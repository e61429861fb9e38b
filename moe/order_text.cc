#include "evenkeel/moe/order_text.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

// 125829120 -> "125,829,120".
std::string Grouped(int64_t number) {
  std::vector<std::string> groups;
  for (; number >= 1000; number /= 1000) groups.push_back(absl::StrFormat("%03d", number % 1000));
  groups.push_back(absl::StrCat(number));
  std::reverse(groups.begin(), groups.end());
  return absl::StrJoin(groups, ",");
}

std::string ProgramText(const TypedOrder& order, const OrderSizes& sizes, bool backward) {
  const std::vector<TypedStep>& program = backward ? order.backward : order.forward;
  std::string text =
      absl::StrFormat("%s\n  %4s  %-30s %-14s %-14s %-14s %16s\n", backward ? "backward (derived)" : "forward", "step",
                      "", "rows", "tp", "ep", "bytes sent");
  absl::StrAppendFormat(&text, "  %4s  %-30s %-14s %-14s %-14s\n", "", backward ? "output gradient" : "input",
                        std::string(DimName(program.front().before.form)), TypeName(program.front().before.tp),
                        TypeName(program.front().before.ep));
  for (const TypedStep& typed : program) {
    const AxisTraffic sent = ComputeStepTraffic(order, sizes, typed, backward);
    absl::StrAppendFormat(&text, "  %4d  %-30s %-14s %-14s %-14s %16s\n", typed.origin, StepName(typed.step),
                          std::string(DimName(typed.after.form)), TypeName(typed.after.tp), TypeName(typed.after.ep),
                          sent.collectives == 0 ? "-" : Grouped(sent.bytes));
  }
  return text;
}

void AppendTraffic(std::string* text, const char* name, const OrderSizes& sizes, const OrderTraffic& traffic,
                   const AxisFormula& formula) {
  absl::StrAppendFormat(text, "  %-9s EP %-28s = %16s B in %d collectives\n", name, formula.ep,
                        Grouped(traffic.ep.bytes), traffic.ep.collectives);
  if (sizes.num_nodes() > 1) {
    absl::StrAppendFormat(text, "  %-9s    %28s   %16s B between nodes, in at most %d messages\n", "", "",
                          Grouped(traffic.ep.inter_node_bytes), traffic.ep.inter_node_messages);
    absl::StrAppendFormat(text, "  %-9s    %28s   %16s B inside nodes\n", "", "",
                          Grouped(traffic.ep.bytes - traffic.ep.inter_node_bytes));
  }
  absl::StrAppendFormat(text, "  %-9s TP %-28s = %16s B in %d collectives\n", "", formula.tp, Grouped(traffic.tp.bytes),
                        traffic.tp.collectives);
  absl::StrAppendFormat(text, "  %-9s sum %27s   %16s B", "", "", Grouped(traffic.ep.bytes + traffic.tp.bytes));
  const int64_t control = traffic.control_ep.bytes + traffic.control_tp.bytes;
  if (control > 0) absl::StrAppendFormat(text, ", and %s B of control data", Grouped(control));
  text->append("\n");
}

// Where the closed forms cross: how much faster than the EP link the TP link must be for this order to beat reference.
std::string BreakEvenText(const TypedOrder& order, const OrderCost& cost, const OrderSizes& sizes) {
  const absl::StatusOr<Order> reference = FindOrder("reference");
  if (!reference.ok() || order.is_ragged() || order.layout != ExpertLayout::kTensorParallel) return "";
  const absl::StatusOr<TypedOrder> typed = CheckOrder(*reference);
  if (!typed.ok()) return "";
  const absl::StatusOr<OrderCost> other = ComputeOrderCost(*typed, sizes);
  if (!other.ok()) return "";
  const int64_t saved = other->forward.ep.bytes - cost.forward.ep.bytes;
  const int64_t added = cost.forward.tp.bytes - other->forward.tp.bytes;
  if (saved <= 0 || added <= 0) return "";
  return absl::StrFormat(
      "beside reference: %s B less on EP, %s B more on TP; faster where the TP link has more than %.3f "
      "times the EP link's bandwidth (latency aside)\n",
      Grouped(saved), Grouped(added), static_cast<double>(added) / static_cast<double>(saved));
}

}  // namespace

absl::StatusOr<std::string> DescribeOrder(const TypedOrder& order, const OrderSizes& sizes) {
  EK_ASSIGN_OR_RETURN(const OrderCost cost, ComputeOrderCost(order, sizes));
  std::string text =
      absl::StrFormat("order %s (experts: %s)\n", order.order.name, std::string(ExpertLayoutName(order.layout)));
  if (!order.order.note.empty()) absl::StrAppend(&text, "  ", order.order.note, "\n");
  absl::StrAppend(&text, "\n", ProgramText(order, sizes, false), "\n", ProgramText(order, sizes, true), "\n");
  absl::StrAppendFormat(&text, "sizes: T=%d E=%d s=%d h=%d e=%d k=%d c=%d b=%d", sizes.tp, sizes.ep, sizes.tokens,
                        sizes.hidden, sizes.experts, sizes.top_k, sizes.capacity, SizeOf(sizes.dtype));
  if (sizes.num_nodes() > 1) absl::StrAppendFormat(&text, " N=%d L=%d", sizes.num_nodes(), sizes.per_node());
  absl::StrAppendFormat(&text, "   V = e c h b = %s B\n",
                        Grouped(sizes.experts * sizes.capacity * sizes.hidden * SizeOf(sizes.dtype)));
  if (order.is_ragged() && !sizes.rows.has_value()) text += "rows: as balanced routing without drops gives them\n";
  text += "bytes sent per rank and layer\n";
  AppendTraffic(&text, "forward", sizes, cost.forward, cost.forward_formula);
  AppendTraffic(&text, "backward", sizes, cost.backward, cost.backward_formula);
  text += BreakEvenText(order, cost, sizes);
  absl::StrAppendFormat(
      &text, "memory of the layer's own buffers: forward peak %s B, kept for backward %s B, backward peak %s B\n",
      Grouped(cost.memory.forward_peak), Grouped(cost.memory.tape), Grouped(cost.memory.backward_peak));
  return text;
}

}  // namespace evenkeel::moe
