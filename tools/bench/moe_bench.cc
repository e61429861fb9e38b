// What a MoE layer costs on one rank beside its experts' products, and beside the alternatives.
//
//   bazel run //tools/bench:moe
//
// layer rows: one forward (or forward and backward) of an order on one rank; `overhead` is everything but the expert
// step (routing, planning, checks, dispatch, combine) over the expert step. experts rows: the expert step beside bare
// oneDNN products of the same shapes, taken in turn; x_of_onednn is oneDNN's time over x's. scaling rows: the whole
// layer at growing s or k, taken in turn, and the exponent of the fitted power. checks row: what the digests and the
// check that no token is lost or doubled cost. one_hot rows: dispatch as the einsum "sec,sh->ech" with a dense one-hot
// tensor, quadratic in s; gather rows: the same dispatch by row index. Times are processor time of the thread, the
// least of a row's repetitions, because other programs run too.
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/dispatch_plan.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/ragged_plan.h"
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

// The least of what a quantity was seen to be.
class Least {
 public:
  void See(double value) { least_ = std::min(least_, value); }
  double value() const { return least_; }

 private:
  double least_ = std::numeric_limits<double>::infinity();
};

// Seconds that `work` takes.
template <typename Work>
double Seconds(Work&& work) {
  const double begin = Now();
  work();
  return Now() - begin;
}

void Layer(benchmark::State& state, const char* order, bool backward) {
  Bench bench(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), order);
  bench.Forward();  // first touch
  bench.Backward();
  Least experts, rest;
  for (auto unused : state) {
    (void)unused;
    bench.expert_seconds = 0;
    const double total = Seconds([&] {
      bench.Forward();
      if (backward) bench.Backward();
    });
    experts.See(bench.expert_seconds);
    rest.See(total - bench.expert_seconds);
  }
  state.counters["experts_ms"] = experts.value() * 1e3;
  state.counters["overhead"] = rest.value() / experts.value();
}

// Slope of log(seconds) over log(size), by least squares: 1 is linear.
double Exponent(const std::vector<double>& sizes, const std::vector<Least>& seconds) {
  double x = 0, y = 0, xx = 0, xy = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const double log_size = std::log(sizes[i]), log_time = std::log(seconds[i].value());
    x += log_size, y += log_time, xx += log_size * log_size, xy += log_size * log_time;
  }
  const double n = static_cast<double>(sizes.size());
  return (n * xy - x * y) / (n * xx - x * x);
}

struct LayerSize {
  int64_t tokens;
  int experts, top_k;
};

// The whole layer, forward and backward, at each size in turn; `name` and `growing` say which number grows.
void Scaling(benchmark::State& state, const std::vector<LayerSize>& sizes, const std::vector<double>& growing) {
  std::vector<std::unique_ptr<Bench>> benches;
  for (const LayerSize& size : sizes) {
    benches.push_back(std::make_unique<Bench>(size.tokens, size.experts, size.top_k, "token_sliced"));
    benches.back()->Forward();
    benches.back()->Backward();
  }
  std::vector<Least> whole(sizes.size()), rest(sizes.size());
  for (auto unused : state) {
    (void)unused;
    for (size_t i = 0; i < sizes.size(); ++i) {
      Bench& bench = *benches[i];
      bench.expert_seconds = 0;
      const double total = Seconds([&] {
        bench.Forward();
        bench.Backward();
      });
      whole[i].See(total);
      rest[i].See(total - bench.expert_seconds);
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    state.counters[absl::StrCat("ms_", growing[i])] = whole[i].value() * 1e3;
    state.counters[absl::StrCat("rest_ms_", growing[i])] = rest[i].value() * 1e3;
  }
  state.counters["exponent"] = Exponent(growing, whole);
  state.counters["rest_exponent"] = Exponent(growing, rest);
}

void ScalingInTokens(benchmark::State& state) {
  std::vector<LayerSize> sizes;
  std::vector<double> growing;
  for (int64_t s = 512; s <= 16384; s *= 2) {
    sizes.push_back({s, static_cast<int>(state.range(0)), static_cast<int>(state.range(1))});
    growing.push_back(static_cast<double>(s));
  }
  Scaling(state, sizes, growing);
}

void ScalingInRoutes(benchmark::State& state) {
  std::vector<LayerSize> sizes;
  std::vector<double> growing;
  for (int k : {1, 2, 4, 8}) {
    sizes.push_back({state.range(0), static_cast<int>(state.range(1)), k});
    growing.push_back(k);
  }
  Scaling(state, sizes, growing);
}

// Rows of each expert as the router of the layer row deals them.
std::vector<int64_t> RowCounts(Bench& bench, int experts) {
  bench.Forward();
  const RoutingDecision& decision = bench.tape.decision();
  return std::vector<int64_t>(decision.kept.begin(), decision.kept.begin() + experts);
}

// Row-major product by oneDNN's sgemm with nothing around it: c = op(a) op(b) + beta c.
void Sgemm(bool ta, bool tb, int64_t m, int64_t n, int64_t k, const float* a, const float* b, float beta, float* c) {
  if (m == 0 || k == 0) return;
  EK_CHECK(dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1, a, ta ? m : k, b, tb ? k : n, beta, c, n) ==
           dnnl_success);
}

// The expert step of token_sliced on real rows, in the three ways that are compared.
class ExpertStep {
 public:
  ExpertStep(int64_t tokens, int experts, int top_k)
      : bench_(tokens, experts, top_k, "token_sliced"),
        counts_(RowCounts(bench_, experts)),
        rows_(std::accumulate(counts_.begin(), counts_.end(), int64_t{0})),
        x_(Random("rows", {rows_, kHidden})),
        dy_(Random("dy rows", {rows_, kHidden})),
        pre_(Zeros({rows_, kFfn})),
        hidden_(Zeros({rows_, kFfn})),
        dpre_(Random("dpre", {rows_, kFfn})),
        y_(Zeros({rows_, kHidden})) {
    work_.pre = pre_.view();
    work_.hidden = hidden_.view();
    work_.dpre = dpre_.view();
    gradients_.w_in = bench_.g_in.view();
    gradients_.w_out = bench_.g_out.view();
  }

  int64_t rows() const { return rows_; }

  // As the layer calls them, activation included.
  void Forward() {
    EK_CHECK_OK(ExpertsForward(bench_.layer->expert_shape(), bench_.weights().experts, x_.const_view(), counts_, work_,
                               y_.view(), *bench_.stream));
  }
  void Backward() {
    EK_CHECK_OK(ExpertsBackward(bench_.layer->expert_shape(), bench_.weights().experts, x_.const_view(), counts_, {},
                                work_, dy_.const_view(), y_.view(), gradients_, *bench_.stream));
  }

  // Their products alone.
  void ForwardProducts() {
    Grouped(false, x_, bench_.w_in, hidden_);
    Grouped(false, hidden_, bench_.w_out, y_);
  }
  void BackwardProducts() {
    Gradient(hidden_, dy_, bench_.g_out);
    Grouped(true, dy_, bench_.w_out, hidden_);
    Gradient(x_, dpre_, bench_.g_in);
    Grouped(true, dpre_, bench_.w_in, y_);
  }

  // The same products by oneDNN.
  void ForwardOneDnn() {
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(false, false, count, kFfn, kHidden, At(x_, first), bench_.w_in.data<float>() + w, 0, At(hidden_, first));
    });
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(false, false, count, kHidden, kFfn, At(hidden_, first), bench_.w_out.data<float>() + w, 0, At(y_, first));
    });
  }
  void BackwardOneDnn() {
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(true, false, kFfn, kHidden, count, At(hidden_, first), At(dy_, first), 1, bench_.g_out.data<float>() + w);
    });
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(false, true, count, kFfn, kHidden, At(dy_, first), bench_.w_out.data<float>() + w, 0, At(hidden_, first));
    });
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(true, false, kHidden, kFfn, count, At(x_, first), At(dpre_, first), 1, bench_.g_in.data<float>() + w);
    });
    ForExperts([&](int64_t first, int64_t count, int64_t w) {
      Sgemm(false, true, count, kHidden, kFfn, At(dpre_, first), bench_.w_in.data<float>() + w, 0, At(y_, first));
    });
  }

 private:
  static float* At(Tensor& rows, int64_t first) { return rows.data<float>() + first * rows.shape().dim(1); }
  template <typename F>
  void ForExperts(F&& f) {
    int64_t first = 0;
    for (size_t g = 0; g < counts_.size(); ++g) {
      f(first, counts_[g], static_cast<int64_t>(g) * kHidden * kFfn);
      first += counts_[g];
    }
  }
  void Grouped(bool transpose_b, const Tensor& a, const Tensor& b, Tensor& c) {
    EK_CHECK_OK(GemmGrouped(transpose_b, 1, a.const_view(), b.const_view(), counts_, 0, c.view(), *bench_.stream));
  }
  void Gradient(const Tensor& in, const Tensor& dout, Tensor& dw) {
    EK_CHECK_OK(GemmGroupedWeightGradient(in.const_view(), dout.const_view(), counts_, {}, dw.view(), *bench_.stream));
  }

  Bench bench_;
  const std::vector<int64_t> counts_;
  const int64_t rows_;
  Tensor x_, dy_, pre_, hidden_, dpre_, y_;
  ExpertWork work_;
  ExpertGradients gradients_;
};

void Experts(benchmark::State& state, bool backward) {
  ExpertStep step(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)));
  Least experts, products, onednn;
  for (auto unused : state) {
    (void)unused;
    experts.See(Seconds([&] { backward ? step.Backward() : step.Forward(); }));
    onednn.See(Seconds([&] { backward ? step.BackwardOneDnn() : step.ForwardOneDnn(); }));
    products.See(Seconds([&] { backward ? step.BackwardProducts() : step.ForwardProducts(); }));
  }
  const double gflop = 4e-9 * static_cast<double>(step.rows() * kHidden * kFfn) * (backward ? 2 : 1);
  state.counters["experts_gflops"] = gflop / experts.value();
  state.counters["products_gflops"] = gflop / products.value();
  state.counters["onednn_gflops"] = gflop / onednn.value();
  state.counters["experts_of_onednn"] = onednn.value() / experts.value();
  state.counters["products_of_onednn"] = onednn.value() / products.value();
}

// The digest that lanes compare and the check that no route is lost or doubled, over the layer's forward.
void Checks(benchmark::State& state) {
  Bench bench(state.range(0), static_cast<int>(state.range(1)), static_cast<int>(state.range(2)), "token_sliced");
  bench.Forward();
  const RoutingDecision decision = bench.tape.decision();
  absl::StatusOr<RaggedSendPlan> plan = BuildRaggedSendPlan(decision, {});
  EK_CHECK_OK(plan);
  Least checks, forward;
  for (auto unused : state) {
    (void)unused;
    checks.See(Seconds([&] {
      benchmark::DoNotOptimize(decision.Digest());
      EK_CHECK_OK(CheckConservation(*plan, decision, {}));
    }));
    forward.See(Seconds([&] { bench.Forward(); }));
  }
  state.counters["checks_us"] = checks.value() * 1e6;
  state.counters["of_forward"] = checks.value() / forward.value();
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
    row->ArgNames({"s", "e", "k"})->Args({tokens, experts, top_k})->MinTime(1)->Unit(benchmark::kMillisecond);
  };
  const int64_t shapes[][3] = {{2048, 8, 2}, {2048, 8, 8}, {2048, 64, 2}, {2048, 64, 8}};
  for (const auto& s : shapes) {
    shaped(benchmark::RegisterBenchmark("layer_forward", Layer, "token_sliced", false), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("layer_forward_backward", Layer, "token_sliced", true), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("layer_forward_padded", Layer, "reference", false), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("experts_forward", Experts, false), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("experts_backward", Experts, true), s[0], s[1], s[2]);
    shaped(benchmark::RegisterBenchmark("checks", Checks), s[0], s[1], s[2]);
  }
  benchmark::RegisterBenchmark("scaling_in_s", ScalingInTokens)
      ->ArgNames({"e", "k"})
      ->Args({8, 2})
      ->Iterations(3)
      ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("scaling_in_k", ScalingInRoutes)
      ->ArgNames({"s", "e"})
      ->Args({2048, 8})
      ->Iterations(3)
      ->Unit(benchmark::kMillisecond);
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
  // Freed memory is kept, as a program that trains should: or else the C library gives every buffer above 32 MiB back
  // to the system, and its page faults are counted as dispatch.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  evenkeel::moe::Register();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
