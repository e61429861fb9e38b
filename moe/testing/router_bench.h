// One rank's router on its own device, with numbers to route. For tests.
//
//   RouterBench bench;
//   ASSERT_OK_AND_ASSIGN(RoutingDecision d, bench.Route(Config(8, 4, 2), Values(8 * 5, "x")));
#ifndef EVENKEEL_MOE_TESTING_ROUTER_BENCH_H_
#define EVENKEEL_MOE_TESTING_ROUTER_BENCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// `n` normal numbers that belong to a name.
inline std::vector<float> Values(int64_t n, absl::string_view name) {
  const PhiloxStream stream(PhiloxKey(21).Add(name));
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(stream.Normal(i));
  return values;
}

inline RouterConfig Config(int64_t hidden, int experts, int top_k) {
  RouterConfig config;
  config.layer = "blocks.1.moe";
  config.hidden = hidden;
  config.experts = experts;
  config.top_k = top_k;
  return config;
}

// One rank's router with its device.
struct RouterBench {
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("compute");
  std::vector<float> gate;

  RouterInput Input(const RouterConfig& config, std::vector<float>& x) {
    if (gate.empty()) gate = Values(config.experts * config.hidden, "gate");
    const int64_t tokens = static_cast<int64_t>(x.size()) / config.hidden;
    return {.x = ConstTensorView(x.data(), DType::kF32, {tokens, config.hidden}),
            .gate = ConstTensorView(gate.data(), DType::kF32, {config.experts, config.hidden})};
  }
  absl::StatusOr<RoutingDecision> Route(const RouterConfig& config, std::vector<float> x, const RouterStep& step = {},
                                        const RouterGroups& groups = {}) {
    EK_ASSIGN_OR_RETURN(const auto router, CreateRouter(config, groups, device.get()));
    return router->Route(Input(config, x), step, *stream);
  }
};

// The same without slots.
inline RouterConfig Dropless(int64_t hidden, int experts, int top_k) {
  RouterConfig config = Config(hidden, experts, top_k);
  config.capacity.mode = CapacityMode::kDropless;
  return config;
}

// The rows `order` of x [., hidden].
inline std::vector<float> Rows(const std::vector<float>& x, int64_t hidden, const std::vector<int64_t>& order) {
  std::vector<float> rows;
  for (const int64_t t : order) rows.insert(rows.end(), x.begin() + t * hidden, x.begin() + (t + 1) * hidden);
  return rows;
}

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_TESTING_ROUTER_BENCH_H_
