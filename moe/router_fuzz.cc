// The router over arbitrary floats and configurations: an error, or a decision that keeps every invariant, the same
// when asked again, with a finite gradient that does not crash.
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/base/fuzz_input.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {
namespace {

RouterConfig AnyConfig(FuzzInput& input) {
  RouterConfig config;
  config.layer = "fuzz";
  config.kind = input.Byte() % 4 == 0 ? kExpertChoice : kTopK;
  config.hidden = input.Between(1, 4);
  config.experts = static_cast<int>(input.Between(1, 9));
  config.top_k = static_cast<int>(input.Between(0, 10));
  config.score = static_cast<ScoreFunction>(input.Between(0, 1));
  config.capacity.mode = static_cast<CapacityMode>(input.Between(0, 2));
  const absl::StatusOr<Rational> factor = Rational::FromDouble(std::fabs(input.AnyFloat()));
  if (factor.ok()) config.capacity.factor = *factor;
  config.capacity.min_capacity = input.Between(-1, 6);
  config.drop = static_cast<DropPolicy>(input.Between(0, 4));
  config.normalization = static_cast<WeightNormalization>(input.Between(0, 2));
  config.balance = static_cast<BalanceChoices>(input.Between(0, 2));
  config.groups = static_cast<int>(input.Between(1, 3));
  config.groups_kept = static_cast<int>(input.Between(1, 3));
  config.group_score = static_cast<GroupScore>(input.Between(0, 1));
  config.noise = static_cast<SelectionNoise>(input.Between(0, 2));
  config.jitter = input.Bool() ? input.AnyFloat() : 0.0f;
  config.route_scale = input.Bool() ? input.AnyFloat() : 1.0;
  return config;
}

std::vector<float> AnyFloats(FuzzInput& input, int64_t n) {
  const bool tame = input.Bool();
  std::vector<float> values(n);
  for (float& v : values) v = tame ? static_cast<float>(input.Byte()) / 32.0f - 4.0f : input.AnyFloat();
  return values;
}

void CheckBackward(Router& router, const RouterInput& routed, const RouterStep& step, const RoutingDecision& d,
                   Stream& stream) {
  std::vector<float> dweight(d.num_routes(), 0.5f);
  std::vector<float> dx(routed.x.num_elements(), 0.0f);
  std::vector<float> dgate(routed.gate.num_elements(), 0.0f);
  EK_CHECK_OK(router.Backward(routed, step, d, ConstTensorView(dweight.data(), DType::kF32, {d.num_tokens, d.top_k}),
                              {.balance = 0.1f, .z = 0.0f}, TensorView(dx.data(), DType::kF32, routed.x.shape()),
                              TensorView(dgate.data(), DType::kF32, routed.gate.shape()), stream));
}

void Fuzz(FuzzInput& input) {
  const RouterConfig config = AnyConfig(input);
  const int tp_size = static_cast<int>(input.Between(1, 4));
  const auto device = HostDevice::Create({.max_live_bytes = 1 << 24});
  const auto stream = *device->CreateStream("compute");
  const auto router = CreateRouter(config, {.tp = nullptr, .ep = nullptr, .tp_size = tp_size}, device.get());
  if (!router.ok()) return;
  const int64_t tokens = input.Between(0, 20);
  const std::vector<float> bias = AnyFloats(input, config.experts);
  std::vector<uint8_t> mask(tokens + 1);
  for (uint8_t& m : mask) m = input.Byte() % 4 != 0;
  const std::vector<float> gate = AnyFloats(input, config.experts * config.hidden);
  const std::vector<float> x = AnyFloats(input, tokens * config.hidden);
  RouterInput routed;
  routed.x = ConstTensorView(x.data(), DType::kF32, {tokens, config.hidden});
  routed.gate = ConstTensorView(gate.data(), DType::kF32, {config.experts, config.hidden});
  if (bias[0] > 0) routed.selection_bias = bias.data();
  if (bias.back() < 1) routed.token_mask = mask.data();
  const RouterStep step{.training = tokens % 2 == 0, .seed = 1, .step = 1, .source = 1};
  const auto decision = (*router)->Route(routed, step, *stream);
  if (!decision.ok()) return;
  EK_CHECK_OK(decision->Validate());
  EK_CHECK(decision->capacity % tp_size == 0);
  EK_CHECK(std::isfinite(decision->balance_loss) && std::isfinite(decision->z_loss));
  EK_CHECK((*router)->Route(routed, step, *stream)->Digest() == decision->Digest());
  // A capacity of 2^60 is an answer; a plan of that size is refused.
  if (!decision->dropless && decision->capacity < 1000) {
    const auto plan = BuildDispatchPlan(*decision);
    EK_CHECK_OK(plan);
    EK_CHECK_OK(CheckConservation(*plan, *decision));
  }
  CheckBackward(**router, routed, step, *decision, *stream);
}

}  // namespace
}  // namespace evenkeel::moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  evenkeel::FuzzInput input(data, size);
  evenkeel::moe::Fuzz(input);
  return 0;
}
