// What a MoE layer costs on one rank beside its experts' products, and beside the alternatives.
//
//   bazel run //tools/bench:moe
//
// layer rows: one forward (or forward and backward) of the reference order on one rank; `overhead` is everything but
// the expert step (routing, planning, dispatch, combine) over the expert step. experts rows: the expert step alone,
// beside onednn rows: bare oneDNN products of the same shapes. one_hot rows: dispatch as the einsum "sec,sh->ech" with
// a dense one-hot tensor, quadratic in s; gather rows: the same dispatch by row index.
#include <time.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/rows.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace evenkeel::moe {
namespace {

constexpr int64_t kHidden = 512, kFfn = 2048;

// Processor time of this thread: the layer runs on it alone, and other programs do not count.
double Now() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::unique_ptr<HostDevice> g_device = HostDevice::Create();

Tensor Random(const std::string& name, const Shape& shape, double scale = 1) {
  absl::StatusOr<Tensor> tensor = Tensor::Create(g_device.get(), DType::kF32, shape);
  EK_CHECK_OK(tensor);
  const PhiloxStream stream(PhiloxKey(1).Add(name));
  // One block of normal numbers, repeated: enough for timing, quick to make.
  const int64_t block = std::min<int64_t>(4093, shape.num_elements());
  float* data = tensor->data<float>();
  for (int64_t i = 0; i < block; ++i) data[i] = static_cast<float>(stream.Normal(i) * scale);
  for (int64_t i = block; i < shape.num_elements(); ++i) data[i] = data[i - block] * (i % 7 == 0 ? -1.0f : 1.0f);
  return *std::move(tensor);
}

Tensor Zeros(const Shape& shape) {
  absl::StatusOr<Tensor> tensor = Tensor::Zeros(g_device.get(), DType::kF32, shape);
  EK_CHECK_OK(tensor);
  return *std::move(tensor);
}

// A layer of one rank with its tensors.
struct Bench {
  Bench(int64_t tokens, int experts, int top_k, const char* order) {
    MoeConfig config;
    config.router.layer = "bench";
    config.router.hidden = kHidden;
    config.router.experts = experts;
    config.router.top_k = top_k;
    config.router.capacity.mode = CapacityMode::kNoDrop;
    config.ffn = kFfn;
    stream = *g_device->CreateStream("bench");
    absl::StatusOr<std::unique_ptr<MoeLayer>> made = MoeLayer::Create(config, *FindOrder(order), {}, g_device.get());
    EK_CHECK_OK(made);
    layer = *std::move(made);
    layer->SetObserver([this](const MoeTap& tap) {
      const double now = Now();
      if (tap.name == "experts" || tap.name == "experts'") expert_seconds += now - last;
      last = now;
    });
    x = Random("x", {tokens, kHidden});
    dy = Random("dy", {tokens, kHidden});
    y = Zeros({tokens, kHidden});
    dx = Zeros({tokens, kHidden});
    router = Random("router", {experts, kHidden}, 0.05);
    drouter = Zeros({experts, kHidden});
    w_in = Random("w_in", {experts, kHidden, kFfn}, 0.02);
    w_out = Random("w_out", {experts, kFfn, kHidden}, 0.02);
    g_in = Zeros({experts, kHidden, kFfn});
    g_out = Zeros({experts, kFfn, kHidden});
  }

  MoeWeights weights() const {
    MoeWeights w;
    w.router = router.const_view();
    w.experts.w_in = w_in.const_view();
    w.experts.w_out = w_out.const_view();
    return w;
  }

  void Forward() {
    last = Now();
    EK_CHECK_OK(layer->Forward(weights(), x.const_view(), y.view(), {}, &tape, *stream));
  }

  void Backward() {
    MoeGradients gradients;
    gradients.router = drouter.view();
    gradients.experts.w_in = g_in.view();
    gradients.experts.w_out = g_out.view();
    last = Now();
    EK_CHECK_OK(layer->Backward(weights(), tape, dy.const_view(), dx.view(), gradients, *stream));
  }

  std::unique_ptr<Stream> stream;
  std::unique_ptr<MoeLayer> layer;
  MoeTape tape;
  Tensor x, dy, y, dx, router, drouter, w_in, w_out, g_in, g_out;
  double last = 0;
  double expert_seconds = 0;
};

void Layer(benchmark::State& state, const char* order, bool backward) {
  Bench bench(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), order);
  bench.Forward();  // first touch
  bench.Backward();
  bench.expert_seconds = 0;
  double total = 0;
  for (auto unused : state) {
    (void)unused;
    const double begin = Now();
    bench.Forward();
    if (backward) bench.Backward();
    total += Now() - begin;
  }
  state.counters["experts_ms"] = bench.expert_seconds / static_cast<double>(state.iterations()) * 1e3;
  state.counters["overhead"] = (total - bench.expert_seconds) / bench.expert_seconds;
}

// Rows of each expert as the router of the layer row deals them.
std::vector<int64_t> RowCounts(Bench& bench, int experts) {
  bench.Forward();
  const RoutingDecision& decision = bench.tape.decision();
  return std::vector<int64_t>(decision.kept.begin(), decision.kept.begin() + experts);
}

// The expert step of token_sliced: real rows only.
void Experts(benchmark::State& state) {
  const int experts = static_cast<int>(state.range(1));
  Bench bench(state.range(0), experts, static_cast<int>(state.range(2)), "token_sliced");
  const std::vector<int64_t> counts = RowCounts(bench, experts);
  int64_t rows = 0;
  for (int64_t count : counts) rows += count;
  Tensor x = Random("rows", {rows, kHidden}), pre = Zeros({rows, kFfn}), hidden = Zeros({rows, kFfn}),
         y = Zeros({rows, kHidden});
  ExpertWork work;
  work.pre = pre.view();
  work.hidden = hidden.view();
  for (auto unused : state) {
    (void)unused;
    EK_CHECK_OK(ExpertsForward(bench.layer->expert_shape(), bench.weights().experts, x.const_view(), counts, work,
                               y.view(), *bench.stream));
  }
  state.counters["gflops"] = benchmark::Counter(4e-9 * static_cast<double>(rows * kHidden * kFfn),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

// The products alone, through the library's grouped product.
void GroupedProducts(benchmark::State& state) {
  const int experts = static_cast<int>(state.range(1));
  Bench bench(state.range(0), experts, static_cast<int>(state.range(2)), "token_sliced");
  const std::vector<int64_t> counts = RowCounts(bench, experts);
  int64_t rows = 0;
  for (int64_t count : counts) rows += count;
  Tensor x = Random("rows", {rows, kHidden}), hidden = Zeros({rows, kFfn}), y = Zeros({rows, kHidden});
  for (auto unused : state) {
    (void)unused;
    EK_CHECK_OK(
        GemmGrouped(false, 1, x.const_view(), bench.w_in.const_view(), counts, 0, hidden.view(), *bench.stream));
    EK_CHECK_OK(
        GemmGrouped(false, 1, hidden.const_view(), bench.w_out.const_view(), counts, 0, y.view(), *bench.stream));
  }
  state.counters["gflops"] = benchmark::Counter(4e-9 * static_cast<double>(rows * kHidden * kFfn),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

// The same products by oneDNN with nothing around them.
void OneDnn(benchmark::State& state) {
  const int experts = static_cast<int>(state.range(1));
  Bench bench(state.range(0), experts, static_cast<int>(state.range(2)), "token_sliced");
  const std::vector<int64_t> counts = RowCounts(bench, experts);
  int64_t rows = 0;
  for (int64_t count : counts) rows += count;
  Tensor x = Random("rows", {rows, kHidden}), hidden = Zeros({rows, kFfn}), y = Zeros({rows, kHidden});
  const auto product = [](int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c) {
    if (m > 0) EK_CHECK(dnnl_sgemm('N', 'N', m, n, k, 1, a, k, b, n, 0, c, n) == dnnl_success);
  };
  for (auto unused : state) {
    (void)unused;
    int64_t first = 0;
    for (int g = 0; g < experts; ++g) {
      const float* w_in = bench.w_in.data<float>() + g * kHidden * kFfn;
      product(counts[g], kFfn, kHidden, x.data<float>() + first * kHidden, w_in, hidden.data<float>() + first * kFfn);
      first += counts[g];
    }
    first = 0;
    for (int g = 0; g < experts; ++g) {
      const float* w_out = bench.w_out.data<float>() + g * kHidden * kFfn;
      product(counts[g], kHidden, kFfn, hidden.data<float>() + first * kFfn, w_out, y.data<float>() + first * kHidden);
      first += counts[g];
    }
  }
  state.counters["gflops"] = benchmark::Counter(4e-9 * static_cast<double>(rows * kHidden * kFfn),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

DispatchPlan PlanOf(Bench& bench) {
  bench.Forward();
  absl::StatusOr<DispatchPlan> plan = BuildDispatchPlan(bench.tape.decision());
  EK_CHECK_OK(plan);
  return *std::move(plan);
}

void GatherDispatch(benchmark::State& state) {
  Bench bench(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), "reference");
  const DispatchPlan plan = PlanOf(bench);
  Tensor slots = Zeros({plan.num_rows(), kHidden});
  const ConstTensorView tokens(plan.token_of_row.data(), DType::kI32, Shape({plan.num_rows()}));
  for (auto unused : state) {
    (void)unused;
    EK_CHECK_OK(GatherRows(bench.x.const_view(), tokens, slots.view(), *bench.stream));
  }
}

void OneHotDispatch(benchmark::State& state) {
  Bench bench(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), "reference");
  const DispatchPlan plan = PlanOf(bench);
  Tensor slots = Zeros({plan.num_rows(), kHidden});
  Tensor one_hot = Zeros({plan.num_rows(), plan.num_tokens});
  for (int64_t row = 0; row < plan.num_rows(); ++row) {
    if (plan.token_of_row[row] >= 0) one_hot.data<float>()[row * plan.num_tokens + plan.token_of_row[row]] = 1;
  }
  for (auto unused : state) {
    (void)unused;
    EK_CHECK_OK(Gemm(false, false, 1, one_hot.const_view(), bench.x.const_view(), 0, slots.view(), *bench.stream));
  }
}

void Register() {
  const auto shaped = [](benchmark::internal::Benchmark* row, int64_t tokens, int64_t experts, int64_t top_k) {
    row->ArgNames({"s", "e", "k"})->Args({tokens, experts, top_k})->Unit(benchmark::kMillisecond);
  };
  const int64_t shapes[][3] = {{2048, 8, 2}, {2048, 8, 8}, {2048, 64, 2}, {2048, 64, 8}};
  for (const auto& s : shapes) {
    shaped(benchmark::RegisterBenchmark("layer_forward", Layer, "token_sliced", false), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("layer_forward_backward", Layer, "token_sliced", true), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("layer_forward_padded", Layer, "reference", false), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("experts_forward", Experts), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("grouped_products", GroupedProducts), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("onednn_products", OneDnn), s[0], s[1], s[2]);
  }
  for (int64_t tokens : {512, 1024, 2048, 4096}) {
    shaped(benchmark::RegisterBenchmark("gather_dispatch", GatherDispatch), tokens, 8, 2);
    shaped(benchmark::RegisterBenchmark("one_hot_dispatch", OneHotDispatch), tokens, 8, 2);
  }
  for (int64_t tokens : {8192, 16384})
    shaped(benchmark::RegisterBenchmark("gather_dispatch", GatherDispatch), tokens, 8, 2);
}

}  // namespace
}  // namespace evenkeel::moe

extern "C" void omp_set_num_threads(int);

int main(int argc, char** argv) {
  omp_set_num_threads(1);  // one thread per rank, as in training
  evenkeel::moe::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
