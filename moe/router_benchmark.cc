// Routing and planning on one rank, one thread: how cost grows with tokens, experts and routes.
//
//   bazel run //moe:router_benchmark
#include <cstdint>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kHidden = 512;

// x, gate and a router for the sizes of one row.
struct Setup {
  explicit Setup(const benchmark::State& state)
      : tokens(state.range(0)), experts(static_cast<int>(state.range(1))), top_k(static_cast<int>(state.range(2))) {
    config.layer = "bench";
    config.hidden = kHidden;
    config.experts = experts;
    config.top_k = top_k;
    config.capacity.factor = *Rational::Parse("1.25");
    auto created = CreateRouter(config, {}, device.get());
    EK_CHECK_OK(created);
    router = std::move(*created);
    const PhiloxStream numbers(PhiloxKey(1));
    x.resize(tokens * kHidden);
    gate.resize(experts * kHidden);
    for (size_t i = 0; i < x.size(); ++i) x[i] = numbers.Uniform(i) - 0.5f;
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = numbers.Uniform(x.size() + i) - 0.5f;
    input.x = ConstTensorView(x.data(), DType::kF32, {tokens, kHidden});
    input.gate = ConstTensorView(gate.data(), DType::kF32, {experts, kHidden});
  }

  int64_t tokens;
  int experts;
  int top_k;
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("compute");
  RouterConfig config;
  std::unique_ptr<Router> router;
  std::vector<float> x, gate;
  RouterInput input;
};

void BM_Route(benchmark::State& state) {
  Setup setup(state);
  for (auto unused : state) {
    auto decision = setup.router->Route(setup.input, {}, *setup.stream);
    EK_CHECK_OK(decision);
    benchmark::DoNotOptimize(decision->weight.data());
  }
}

void BM_RouterBackward(benchmark::State& state) {
  Setup setup(state);
  auto decision = setup.router->Route(setup.input, {}, *setup.stream);
  EK_CHECK_OK(decision);
  std::vector<float> dweight(decision->num_routes(), 0.5f);
  std::vector<float> dx(setup.x.size()), dgate(setup.gate.size());
  for (auto unused : state) {
    EK_CHECK_OK(setup.router->Backward(
        setup.input, {}, *decision, ConstTensorView(dweight.data(), DType::kF32, {setup.tokens, setup.top_k}),
        {.balance = 0.01f, .z = 0.001f}, TensorView(dx.data(), DType::kF32, {setup.tokens, kHidden}),
        TensorView(dgate.data(), DType::kF32, {setup.experts, kHidden}), *setup.stream));
  }
}

void BM_DispatchPlan(benchmark::State& state) {
  Setup setup(state);
  auto decision = setup.router->Route(setup.input, {}, *setup.stream);
  EK_CHECK_OK(decision);
  for (auto unused : state) {
    auto plan = BuildDispatchPlan(*decision);
    EK_CHECK_OK(plan);
    benchmark::DoNotOptimize(plan->token_of_row.data());
  }
}

// What every forward pays to be sure that nothing is lost or doubled.
void BM_Checks(benchmark::State& state) {
  Setup setup(state);
  auto decision = setup.router->Route(setup.input, {}, *setup.stream);
  EK_CHECK_OK(decision);
  auto plan = BuildDispatchPlan(*decision);
  EK_CHECK_OK(plan);
  for (auto unused : state) {
    EK_CHECK_OK(decision->Validate());
    EK_CHECK_OK(CheckConservation(*plan, *decision));
    benchmark::DoNotOptimize(decision->Digest());
  }
}

void BM_RaggedSendPlan(benchmark::State& state) {
  Setup setup(state);
  auto decision = setup.router->Route(setup.input, {}, *setup.stream);
  EK_CHECK_OK(decision);
  for (auto unused : state) {
    auto plan = BuildRaggedSendPlan(*decision, {.ep_size = 4, .tp_size = 2, .lane = 0});
    EK_CHECK_OK(plan);
    benchmark::DoNotOptimize(plan->token_of_row.data());
  }
}

void Sizes(benchmark::internal::Benchmark* b) {
  b->ArgNames({"s", "e", "k"})->Unit(benchmark::kMillisecond);
  for (const int64_t s : {512, 1024, 2048, 4096, 8192, 16384}) b->Args({s, 64, 8});
  for (const int64_t k : {1, 2, 4}) b->Args({2048, 64, k});
  b->Args({2048, 8, 2});
}
BENCHMARK(BM_Route)->Apply(Sizes);
BENCHMARK(BM_RouterBackward)->Apply(Sizes);
BENCHMARK(BM_DispatchPlan)->Apply(Sizes);
BENCHMARK(BM_Checks)->Apply(Sizes);
BENCHMARK(BM_RaggedSendPlan)->Apply(Sizes);

}  // namespace
}  // namespace evenkeel::moe

BENCHMARK_MAIN();
