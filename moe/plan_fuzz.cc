// The planners over decisions and announcements that nobody checked before: an error, or a plan that loses nothing.
// The routing log's parser over arbitrary bytes likewise.
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/random_routing.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/moe/routing_replay.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

// A valid decision with some of its numbers overwritten.
RoutingDecision AnyDecision(FuzzInput& input) {
  const int experts = static_cast<int>(input.Between(1, 8));
  RoutingDecision d = RandomRouting({.tokens = input.Between(0, 20),
                                     .experts = experts,
                                     .top_k = static_cast<int>(input.Between(1, experts)),
                                     .capacity = input.Between(0, 6),
                                     .choice_classes = input.Bool(),
                                     .seed = input.Byte()});
  const int64_t routes = d.num_routes();
  for (int64_t changes = input.Between(0, 4); changes > 0 && routes > 0; --changes) {
    const int64_t route = input.Between(0, routes - 1);
    switch (input.Between(0, 5)) {
      case 0:
        d.expert[route] = static_cast<int32_t>(input.Between(-2, experts + 1));
        break;
      case 1:
        d.slot[route] = static_cast<int32_t>(input.Between(-2, 7));
        break;
      case 2:
        d.capacity = input.Bool() ? input.Between(INT64_MAX - 9, INT64_MAX) : input.Between(-1, 9);
        break;
      case 3:
        d.num_tokens = input.Between(-1, 30);
        break;
      case 4:
        d.kept[0] = input.Between(-1, 9);
        break;
      default:
        d.slot_classes = static_cast<int32_t>(input.Between(-1, 9));
        break;
    }
  }
  return d;
}

void FuzzSenders(FuzzInput& input) {
  const RoutingDecision d = AnyDecision(input);
  const bool valid = d.Validate().ok();
  const auto plan = BuildDispatchPlan(d);
  EK_CHECK(!valid || d.dropless || d.capacity > 9 || plan.ok());
  if (valid && plan.ok()) EK_CHECK_OK(CheckConservation(*plan, d));
  const RaggedSender sender{.ep_size = static_cast<int>(input.Between(0, 5)),
                            .tp_size = static_cast<int>(input.Between(0, 5)),
                            .lane = static_cast<int>(input.Between(-1, 5))};
  const auto send = BuildRaggedSendPlan(d, sender);
  if (valid && send.ok()) EK_CHECK_OK(CheckConservation(*send, d, sender));
}

void FuzzReceiver(FuzzInput& input) {
  RaggedReceiver receiver;
  receiver.tp_size = static_cast<int>(input.Between(0, 4));
  receiver.local_experts = static_cast<int>(input.Between(0, 4));
  receiver.slot_classes = static_cast<int>(input.Between(0, 3));
  receiver.capacity = input.Between(-1, 20);
  receiver.gathers_over_tp = input.Bool();
  const int64_t sources = input.Between(0, 4);
  for (int64_t i = 0; i < sources; ++i) {
    receiver.source_lane.push_back(receiver.gathers_over_tp ? 0 : static_cast<int>(input.Between(-1, 4)));
    receiver.source_replica.push_back(static_cast<int>(i));
  }
  std::vector<int64_t> segments(sources * receiver.local_experts * receiver.slot_classes * receiver.tp_size);
  for (int64_t& count : segments) {
    count = input.Byte() % 64 == 0 ? input.Between(INT64_MIN, INT64_MAX) : input.Between(0, 5);
  }
  // Large counts are legal without a capacity but would only fill memory here.
  for (const int64_t count : segments) {
    if (receiver.capacity == 0 && count > 1000 && count <= INT32_MAX) return;
  }
  const auto plan = BuildRaggedReceivePlan(receiver, 0, segments);
  if (!plan.ok()) return;
  std::vector<int32_t> seen(plan->num_rows(), 0);
  for (const int32_t arrival : plan->arrival_of_expert_row) ++seen[arrival];
  for (int64_t i = 0; i < plan->num_rows(); ++i) {
    EK_CHECK(seen[i] == 1);
    EK_CHECK(plan->expert_row_of_arrival[plan->arrival_of_expert_row[i]] == i);
  }
  EK_CHECK(std::accumulate(plan->rows_of_expert.begin(), plan->rows_of_expert.end(), int64_t{0}) == plan->num_rows());
  EK_CHECK(std::accumulate(plan->rows_of_lane.begin(), plan->rows_of_lane.end(), int64_t{0}) == plan->num_rows());
}

// Arbitrary content behind a right first line and checksum, so that the fuzzer gets past both.
void FuzzLog(FuzzInput& input) {
  std::string bytes = "evenkeel routing 1\n";
  const absl::string_view rest = input.Rest();
  bytes.append(rest.data(), rest.size());
  const uint64_t digest = Digest64(bytes);
  bytes.append(reinterpret_cast<const char*>(&digest), sizeof(digest));
  const auto log = RoutingLog::Parse(bytes);
  if (log.ok()) EK_CHECK_OK(RoutingLog::Parse(log->Serialize())->Compare(*log));
}

}  // namespace
}  // namespace evenkeel::moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::FuzzInput input(data, size);
  switch (input.Between(0, 2)) {
    case 0:
      evenkeel::moe::FuzzSenders(input);
      break;
    case 1:
      evenkeel::moe::FuzzReceiver(input);
      break;
    default:
      evenkeel::moe::FuzzLog(input);
      break;
  }
  return 0;
}
