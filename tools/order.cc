// Looks at collective orders: the built-in ones and a user's textproto.
//
//   order list
//   order describe fused --tp=2 --ep=4 --tokens=4096 --hidden=4096
//   order compare --tp_gbps=300 --ep_gbps=50                times on such links, and from which size on each order wins
//   order check mine.textproto                              exit 1 naming the ill-typed step
//
// Exit codes: 0 well-typed, 1 ill-typed, 2 bad usage (unknown order, unreadable file, a line that does not parse).
#include "evenkeel/moe/order.h"

#include <gflags/gflags.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_planner.h"
#include "evenkeel/moe/order_text.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/tools/program.h"

DEFINE_int64(tokens, 4096, "describe, compare: tokens of one TP group (s)");
DEFINE_int64(hidden, 4096, "describe, compare: hidden size (h)");
DEFINE_int64(ffn, 16384, "describe, compare: width of an expert");
DEFINE_int64(experts, 8, "describe, compare: experts of the layer (e)");
DEFINE_int64(top_k, 2, "describe, compare: routes per token (k)");
DEFINE_string(capacity_factor, "1.25", "describe, compare: capacity factor (f)");
DEFINE_string(dtype, "bf16", "describe, compare: element type on the wire");
DEFINE_int32(tp, 2, "describe, compare: tensor-parallel size (T)");
DEFINE_int32(ep, 4, "describe, compare: expert-parallel size (E)");
DEFINE_int32(ranks_per_node, 0, "describe, compare: consecutive ranks on each node; 0: all on one");
DEFINE_double(tp_gbps, 300, "compare: gigabytes per second that a rank sends over TP");
DEFINE_double(ep_gbps, 50, "compare: gigabytes per second that a rank sends over EP");
DEFINE_double(between_gbps, 25,
              "compare, with --ranks_per_node: gigabytes per second that a rank sends to other nodes");
DEFINE_double(between_microseconds, 5, "compare, with --ranks_per_node: latency of each message to another node");
DEFINE_double(tp_microseconds, 10, "compare: latency of a collective over TP");
DEFINE_double(ep_microseconds, 20, "compare: latency of a collective over EP");
DEFINE_double(expert_tflops, 0,
              "compare: speed of a rank's experts, 1e12 operations per second; times are then of communication and "
              "experts on worker streams, and overlapped orders are among the choices; 0: communication alone");
DEFINE_string(expert_layout, "", "describe, compare: tensor_parallel or whole, for orders that take both");

namespace evenkeel::tools {
namespace {

constexpr char kUsage[] =
    "order list | compare [--tp_gbps=X --ep_gbps=X --ranks_per_node=N] | describe NAME|FILE [--tp=N --ep=N --tokens=N "
    "--hidden=N ...] | "
    "check NAME|FILE";

absl::StatusOr<moe::Order> LoadOrder(const std::string& name) {
  if (moe::FindOrder(name).ok()) return moe::FindOrder(name);
  const absl::StatusOr<moe::Order> order = testutil::LoadOrder(UserPath(name));
  if (!absl::IsNotFound(order.status())) return order;
  return absl::NotFoundError(
      absl::StrCat(moe::FindOrder(name).status().message(), "; nor is there a file ", UserPath(name)));
}

absl::StatusOr<moe::ExpertLayout> ParseLayout(const std::string& name) {
  if (name.empty()) return moe::ExpertLayout::kAny;
  for (moe::ExpertLayout layout : {moe::ExpertLayout::kTensorParallel, moe::ExpertLayout::kWhole}) {
    if (moe::ExpertLayoutName(layout) == name) return layout;
  }
  return absl::InvalidArgumentError(absl::StrCat("--expert_layout is '", name, "', not tensor_parallel or whole"));
}

// L from --ranks_per_node: an EP group's ranks are T apart where experts are sliced, next to one another where whole.
absl::StatusOr<int> RanksOfEpPerNode(moe::ExpertLayout layout) {
  if (FLAGS_ranks_per_node == 0) return 0;
  const int stride = layout == moe::ExpertLayout::kWhole ? 1 : FLAGS_tp;
  if (FLAGS_ranks_per_node < 1 || FLAGS_ranks_per_node % stride != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks_per_node=", FLAGS_ranks_per_node, ": wants a multiple of tp ", stride));
  }
  return std::min(FLAGS_ep, FLAGS_ranks_per_node / stride);
}

absl::StatusOr<moe::OrderSizes> SizesFromFlags(moe::ExpertLayout layout) {
  moe::OrderSizes sizes;
  sizes.tokens = FLAGS_tokens;
  sizes.hidden = FLAGS_hidden;
  sizes.ffn = FLAGS_ffn;
  sizes.experts = FLAGS_experts;
  sizes.top_k = FLAGS_top_k;
  sizes.tp = FLAGS_tp;
  sizes.ep = FLAGS_ep;
  EK_ASSIGN_OR_RETURN(sizes.dtype, ParseDType(FLAGS_dtype));
  if (FLAGS_tokens < 1 || FLAGS_hidden < 1 || FLAGS_ffn < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens=", FLAGS_tokens, " --hidden=", FLAGS_hidden,
                                                   " --ffn=", FLAGS_ffn, ": each must be at least 1"));
  }
  if (FLAGS_tp < 1 || FLAGS_ep < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--tp=", FLAGS_tp, " --ep=", FLAGS_ep, ": both must be at least 1"));
  }
  EK_ASSIGN_OR_RETURN(sizes.ep_per_node, RanksOfEpPerNode(layout));
  moe::CapacityOptions options;
  EK_ASSIGN_OR_RETURN(options.factor, moe::Rational::Parse(FLAGS_capacity_factor));
  const moe::CapacityInput input{.tokens = sizes.tokens, .experts = sizes.experts, .top_k = sizes.top_k};
  EK_ASSIGN_OR_RETURN(sizes.capacity, moe::ComputeCapacity(options, input, sizes.tp,
                                                           [](int64_t need) { return absl::StatusOr<int64_t>(need); }));
  return sizes;
}

absl::Status List() {
  for (const std::string& name : moe::OrderNames()) {
    EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(name));
    std::printf("%-20s %s\n", name.c_str(), order.note.c_str());
  }
  return absl::OkStatus();
}

absl::Status Describe(const std::string& name) {
  EK_ASSIGN_OR_RETURN(const moe::Order order, LoadOrder(name));
  EK_ASSIGN_OR_RETURN(const moe::ExpertLayout layout, ParseLayout(FLAGS_expert_layout));
  EK_ASSIGN_OR_RETURN(const moe::TypedOrder typed, moe::CheckOrder(order, layout));
  EK_ASSIGN_OR_RETURN(const moe::OrderSizes sizes, SizesFromFlags(typed.layout));
  EK_ASSIGN_OR_RETURN(const std::string text, moe::DescribeOrder(typed, sizes));
  std::printf("%s", text.c_str());
  return absl::OkStatus();
}

absl::StatusOr<moe::CostModel> CostModelFromFlags() {
  moe::CostModel model;
  if (!(FLAGS_tp_gbps > 0) || !(FLAGS_ep_gbps > 0) || !(FLAGS_tp_microseconds >= 0) || !(FLAGS_ep_microseconds >= 0)) {
    return absl::InvalidArgumentError("--tp_gbps and --ep_gbps must be above 0, latencies at least 0");
  }
  model.tp = {FLAGS_tp_microseconds * 1e-6, 1 / (FLAGS_tp_gbps * 1e9)};
  model.ep = {FLAGS_ep_microseconds * 1e-6, 1 / (FLAGS_ep_gbps * 1e9)};
  if (!(FLAGS_expert_tflops >= 0)) return absl::InvalidArgumentError("--expert_tflops must be at least 0");
  model.expert_flops_per_second = FLAGS_expert_tflops * 1e12;
  if (FLAGS_ranks_per_node == 0) return model;
  if (!(FLAGS_between_gbps > 0) || !(FLAGS_between_microseconds >= 0)) {
    return absl::InvalidArgumentError("--between_gbps must be above 0, --between_microseconds at least 0");
  }
  model.ep_between = moe::LinkModel{FLAGS_between_microseconds * 1e-6, 1 / (FLAGS_between_gbps * 1e9)};
  return model;
}

// From how many tokens and which buffer size on `name` beats `reference`, as text.
absl::StatusOr<std::string> CrossoverText(const moe::TypedOrder& reference, const std::string& name,
                                          const moe::OrderSizes& sizes, const moe::CostModel& model) {
  // Times with experts are no lines: what is hidden depends on which of the two queues is longer.
  if (name == reference.order.name || model.expert_flops_per_second > 0) return "-";
  EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(name));
  EK_ASSIGN_OR_RETURN(const moe::TypedOrder typed, moe::CheckOrder(order, reference.layout));
  EK_ASSIGN_OR_RETURN(const std::optional<double> tokens, moe::CrossoverTokens(reference, typed, sizes, model));
  if (!tokens.has_value()) return "never";
  if (*tokens <= 0) return "always";
  const std::string from = absl::StrFormat("from s = %.3g tokens", *tokens);
  if (typed.is_ragged()) return absl::StrCat(from, ", balanced routing");
  EK_ASSIGN_OR_RETURN(const std::optional<double> bytes, moe::CrossoverBytes(reference, typed, sizes, model));
  return bytes.has_value() ? absl::StrCat(from, absl::StrFormat(", V = %.3g B", *bytes)) : from;
}

// Every order of one layout with its time on links of the given speed, fastest first.
absl::Status Compare() {
  EK_ASSIGN_OR_RETURN(moe::ExpertLayout layout, ParseLayout(FLAGS_expert_layout));
  if (layout == moe::ExpertLayout::kAny) layout = moe::ExpertLayout::kTensorParallel;
  EK_ASSIGN_OR_RETURN(const moe::OrderSizes sizes, SizesFromFlags(layout));
  EK_ASSIGN_OR_RETURN(const moe::CostModel model, CostModelFromFlags());
  std::vector<std::string> names = sizes.num_nodes() > 1 ? moe::OrderNamesOverNodes() : moe::OrderNames();
  if (model.expert_flops_per_second > 0) names = moe::WithChunks(names, sizes);
  EK_ASSIGN_OR_RETURN(const moe::OrderPlan plan, moe::PlanOrder(names, layout, sizes, model));
  const std::string baseline = layout == moe::ExpertLayout::kWhole ? "unsharded" : "reference";
  EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(baseline));
  EK_ASSIGN_OR_RETURN(const moe::TypedOrder reference, moe::CheckOrder(order, layout));
  std::printf("%-24s %14s %16s %16s %12s  faster than %s\n", "order", "ms per step", "EP bytes", "TP bytes",
              "collectives", baseline.c_str());
  for (const moe::OrderEstimate& estimate : plan.estimates) {
    EK_ASSIGN_OR_RETURN(const std::string crossover, CrossoverText(reference, estimate.name, sizes, model));
    const moe::OrderTraffic& forward = estimate.cost.forward;
    const moe::OrderTraffic& backward = estimate.cost.backward;
    std::printf("%-24s %14.4f %16lld %16lld %12d  %s\n", estimate.name.c_str(), estimate.seconds * 1e3,
                static_cast<long long>(forward.ep.bytes + backward.ep.bytes),
                static_cast<long long>(forward.tp.bytes + backward.tp.bytes),
                forward.ep.collectives + backward.ep.collectives + forward.tp.collectives + backward.tp.collectives,
                crossover.c_str());
  }
  std::printf("%s\n", plan.why.c_str());
  return absl::OkStatus();
}

// An ill-typed order is this program's finding, not bad usage: exit 1.
int Check(const std::string& name) {
  const absl::StatusOr<moe::Order> order = LoadOrder(name);
  if (!order.ok()) return Report(order.status());
  std::vector<moe::ExpertLayout> layouts = {order->expert_layout};
  if (order->expert_layout == moe::ExpertLayout::kAny) {
    layouts = {moe::ExpertLayout::kTensorParallel, moe::ExpertLayout::kWhole};
  }
  for (moe::ExpertLayout layout : layouts) {
    const absl::StatusOr<moe::TypedOrder> typed = moe::CheckOrder(*order, layout);
    if (!typed.ok()) {
      std::fprintf(stderr, "error: %s\n", std::string(typed.status().message()).c_str());
      return kExitMismatch;
    }
    std::printf("%s: well-typed for %s experts, %d steps forward and %d backward\n", order->name.c_str(),
                std::string(moe::ExpertLayoutName(layout)).c_str(), static_cast<int>(typed->forward.size()),
                static_cast<int>(typed->backward.size()));
  }
  return kExitHolds;
}

int Run(const std::vector<std::string>& words) {
  if (words.size() == 1 && words[0] == "list") return Report(List());
  if (words.size() == 1 && words[0] == "compare") return Report(Compare());
  if (words.size() == 2 && words[0] == "describe") return Report(Describe(words[1]));
  if (words.size() == 2 && words[0] == "check") return Check(words[1]);
  return Report(absl::InvalidArgumentError(absl::StrCat("usage: ", kUsage)));
}

}  // namespace
}  // namespace evenkeel::tools

int main(int argc, char** argv) {
  gflags::SetUsageMessage(evenkeel::tools::kUsage);
  return evenkeel::tools::Run(evenkeel::tools::ParseFlags(&argc, &argv));
}
