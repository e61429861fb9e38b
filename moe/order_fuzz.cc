// Order textprotos and step programs from arbitrary bytes: nothing crashes, and what is accepted has a well-typed
// backward, a cost, and schedules that account for every buffer. Also the records of a deduplicated dispatch.
#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_text.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

Order AnyOrder(FuzzInput& input) {
  Order order;
  order.name = "fuzz";
  order.expert_layout = static_cast<ExpertLayout>(input.Between(0, 2));
  const AxisType sliced = {Placement::kVarying, Dim::kTokens};
  if (input.Bool()) order.input = sliced;
  if (input.Bool()) order.output = sliced;
  order.chunks = static_cast<int>(input.Between(1, 2));
  const int64_t steps = input.Between(0, 16);
  for (int64_t i = 0; i < steps; ++i) {
    Step step;
    step.kind = static_cast<StepKind>(input.Between(0, static_cast<int>(StepKind::kFold)));
    step.axis = input.Byte() < 200 ? comm::Axis::kTp : comm::Axis::kEp;
    if (step.kind == StepKind::kAllToAll || step.kind == StepKind::kAllToAllV) step.axis = comm::Axis::kEp;
    step.dim = static_cast<Dim>(input.Between(0, static_cast<int>(Dim::kExperts)));
    step.to = static_cast<Placement>(input.Between(0, static_cast<int>(Placement::kPartial)));
    step.when = static_cast<When>(input.Between(0, 2));
    if (IsExchange(step.kind)) step.level = static_cast<Level>(input.Between(0, 2));
    order.steps.push_back(step);
  }
  return order;
}

void CheckBuffers(const Schedule& schedule) {
  std::vector<int> live(schedule.buffers.size(), 0);
  for (const Action& action : schedule.actions) {
    for (int buffer : action.allocate) EK_CHECK(++live[buffer] == 1);
    for (int buffer : action.release) EK_CHECK(--live[buffer] <= 0);
    EK_CHECK(action.in.first_row + action.in.rows <= schedule.buffers[action.in.buffer].rows);
    EK_CHECK(action.out.first_row + action.out.rows <= schedule.buffers[action.out.buffer].rows);
  }
}

void CheckAccepted(const Order& order, ExpertLayout layout) {
  const absl::StatusOr<TypedOrder> typed = CheckOrder(order, layout);
  if (!typed.ok()) return;
  for (const TypedStep& step : typed->backward) {
    if (step.step.transposed) continue;
    const absl::StatusOr<ValueType> after = TypeAfter(step.step, step.before, typed->layout);
    EK_CHECK_OK(after);
    EK_CHECK(*after == step.after);
  }
  for (int tp : {1, 2}) {
    OrderSizes sizes = {
        .tokens = 6, .hidden = 4, .experts = 12, .top_k = 2, .capacity = 4, .ffn = 8, .tp = tp, .ep = 4};
    sizes.ep_per_node = order.name.size() % 2 == 0 ? 2 : 0;
    if (order.chunks > 3) return;  // more than a rank's experts: refused
    EK_CHECK_OK(DescribeOrder(*typed, sizes));
    const Schedules schedules = BuildSchedules(*typed, sizes);
    CheckBuffers(schedules.forward);
    CheckBuffers(schedules.backward);
    EK_CHECK(schedules.forward.peak_bytes >= schedules.tape.bytes);
  }
}

void CheckText(absl::string_view text) {
  const absl::StatusOr<Order> order = ParseOrder(text, "fuzz");
  if (!order.ok()) return;
  EK_CHECK_OK(ParseOrder(FormatOrder(*order), "again"));
  for (ExpertLayout layout : {ExpertLayout::kTensorParallel, ExpertLayout::kWhole}) CheckAccepted(*order, layout);
}

void CheckRecords(FuzzInput& input) {
  RaggedReceiver receiver;
  receiver.tp_size = static_cast<int>(input.Between(1, 2));
  receiver.gathers_over_tp = receiver.tp_size > 1;
  receiver.local_experts = static_cast<int>(input.Between(1, 3));
  receiver.capacity = input.Between(0, 4);
  const int64_t sources = input.Between(1, 3);
  for (int64_t i = 0; i < sources; ++i) {
    receiver.source_lane.push_back(0);
    receiver.source_replica.push_back(static_cast<int>(i));
  }
  std::vector<int64_t> header;
  for (int64_t i = 0; i < sources * receiver.tp_size * 2; ++i) header.push_back(input.Between(-1, 4));
  std::vector<int32_t> records;
  while (input.remaining() > 0) records.push_back(static_cast<int32_t>(input.Between(-1, 3)));
  std::vector<int64_t> rows_from;
  for (int64_t i = 0; i < sources; ++i) rows_from.push_back(header[i]);
  const absl::StatusOr<NodeMiddlePlan> middle = BuildNodeMiddlePlan(receiver.local_experts, rows_from, records);
  if (middle.ok()) EK_CHECK(middle->rows_of_arrival.outputs() == static_cast<int64_t>(records.size()));
  const absl::StatusOr<DedupReceivePlan> plan = BuildDedupReceivePlan(receiver, 0, header, records);
  if (plan.ok()) EK_CHECK(plan->num_expert_rows() * kRecordInts == static_cast<int64_t>(records.size()));
}

}  // namespace
}  // namespace evenkeel::moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace evenkeel::moe;  // NOLINT: entry point outside any namespace
  evenkeel::FuzzInput input(data, size);
  switch (input.Between(0, 2)) {
    case 0:
      CheckText(input.Rest());
      break;
    case 1: {
      const Order order = AnyOrder(input);
      CheckText(FormatOrder(order));
      CheckAccepted(order, ExpertLayout::kAny);
      break;
    }
    default:
      CheckRecords(input);
  }
  return 0;
}
