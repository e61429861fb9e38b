// Time of the operations at the sizes that training uses: tens of rows of 64 elements per call, and large experts.
// `bazel run //runtime/ops:ops_benchmark`; items are multiply-adds times two for products, elements for the rest.

#include <cstdint>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/ops/activation.h"
#include "evenkeel/runtime/ops/attention.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/norm.h"
#include "evenkeel/runtime/ops/optimizer.h"
#include "evenkeel/runtime/ops/reduce.h"
#include "evenkeel/runtime/ops/rows.h"
#include "evenkeel/runtime/ops/softmax.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel {
namespace {

// A device, a stream, and tensors filled with numbers that are neither zero nor subnormal.
class Bench {
 public:
  Tensor Make(DType dtype, const Shape& shape) {
    Tensor tensor = *Tensor::Create(device_.get(), dtype, shape);
    EK_CHECK_OK(FillElements(0.37, tensor.view(), *stream_));
    return tensor;
  }
  Tensor Indices(int64_t rows, int64_t limit) {
    Tensor tensor = *Tensor::Create(device_.get(), DType::kI32, {rows});
    for (int64_t i = 0; i < rows; ++i) tensor.data<int32_t>()[i] = static_cast<int32_t>(i * 7 % limit);
    return tensor;
  }
  Stream& stream() { return *stream_; }

 private:
  std::unique_ptr<HostDevice> device_ = HostDevice::Create();
  std::unique_ptr<Stream> stream_ = *device_->CreateStream("bench");
};

void BM_Gemm(benchmark::State& state, DType dtype, bool transpose_b) {
  const int64_t m = state.range(0), k = state.range(1), n = state.range(2);
  Bench bench;
  const Tensor a = bench.Make(dtype, {m, k}), c = bench.Make(dtype, {m, n});
  const Tensor b = bench.Make(dtype, transpose_b ? Shape{n, k} : Shape{k, n});
  for (auto _ : state) {
    EK_CHECK_OK(Gemm(false, transpose_b, 1, a.view(), b.view(), 0, c.view(), bench.stream()));
  }
  state.SetItemsProcessed(state.iterations() * 2 * m * k * n);
}
void Sizes(benchmark::internal::Benchmark* b) {
  for (int64_t m : {1, 8, 40, 128}) b->Args({m, 64, 256});
  b->Args({40, 64, 64})->Args({40, 256, 64})->Args({64, 512, 2048})->Args({512, 512, 2048})->Args({2048, 512, 2048});
}
BENCHMARK_CAPTURE(BM_Gemm, f32, DType::kF32, false)->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Gemm, f32_b_transposed, DType::kF32, true)->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Gemm, bf16, DType::kBF16, false)->Args({40, 64, 256})->Args({2048, 512, 2048});
BENCHMARK_CAPTURE(BM_Gemm, f64, DType::kF64, false)->Args({40, 64, 256})->Args({512, 512, 512});

void BM_WeightGradient(benchmark::State& state, DType dtype) {
  const int64_t rows = state.range(0), k = state.range(1), n = state.range(2);
  Bench bench;
  const Tensor x = bench.Make(dtype, {rows, k}), dy = bench.Make(dtype, {rows, n}), dw = bench.Make(dtype, {k, n});
  for (auto _ : state) {
    EK_CHECK_OK(GemmWeightGradient(x.view(), dy.view(), {}, dw.view(), bench.stream()));
  }
  state.SetItemsProcessed(state.iterations() * 2 * rows * k * n);
}
BENCHMARK_CAPTURE(BM_WeightGradient, f32, DType::kF32)
    ->Args({20, 64, 128})
    ->Args({128, 64, 256})
    ->Args({64, 512, 2048})
    ->Args({512, 512, 2048})
    ->Args({512, 2048, 512})
    ->Args({2048, 512, 2048});
BENCHMARK_CAPTURE(BM_WeightGradient, f64, DType::kF64)->Args({20, 64, 128})->Args({128, 64, 256});

void BM_Gelu(benchmark::State& state) {
  Bench bench;
  const Tensor x = bench.Make(DType::kF32, {state.range(0)}), y = bench.Make(DType::kF32, {state.range(0)});
  for (auto _ : state) EK_CHECK_OK(GeluForward(x.view(), y.view(), bench.stream()));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Gelu)->Arg(64)->Arg(16384);

void BM_GeluBackward(benchmark::State& state) {
  Bench bench;
  const Tensor x = bench.Make(DType::kF32, {state.range(0)}), y = bench.Make(DType::kF32, {state.range(0)});
  for (auto _ : state) EK_CHECK_OK(GeluBackward(x.view(), x.view(), y.view(), bench.stream()));
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_GeluBackward)->Arg(16384);

void BM_CrossEntropy(benchmark::State& state) {
  Bench bench;
  const int64_t rows = 64, n = 256;
  const Tensor x = bench.Make(DType::kF32, {rows, n}), p = bench.Make(DType::kF32, {rows, n});
  const Tensor targets = bench.Indices(rows, n), loss = bench.Make(DType::kF64, {1});
  for (auto _ : state) {
    EK_CHECK_OK(CrossEntropyForward(x.view(), targets.view(), 64, p.view(), loss.view(), bench.stream()));
  }
  state.SetItemsProcessed(state.iterations() * rows * n);
}
BENCHMARK(BM_CrossEntropy);

void BM_RmsNorm(benchmark::State& state) {
  Bench bench;
  const int64_t rows = 64, n = 64;
  const Tensor x = bench.Make(DType::kF32, {rows, n}), y = bench.Make(DType::kF32, {rows, n});
  const Tensor w = bench.Make(DType::kF32, {n}), r = bench.Make(DType::kF32, {rows});
  for (auto _ : state) EK_CHECK_OK(RmsNormForward(x.view(), w.view(), 1e-5, y.view(), r.view(), bench.stream()));
  state.SetItemsProcessed(state.iterations() * rows * n);
}
BENCHMARK(BM_RmsNorm);

void BM_Attention(benchmark::State& state, bool backward) {
  Bench bench;
  const AttentionSizes sizes{.batch = 2, .sequence = 32, .heads = 2, .head_dim = 16};
  const Shape rows = {64, 32};
  const Tensor q = bench.Make(DType::kF32, rows), out = bench.Make(DType::kF32, rows);
  const Tensor dk = bench.Make(DType::kF32, rows), dv = bench.Make(DType::kF32, rows);
  const Tensor p = bench.Make(DType::kF32, {4, 32, 32});
  for (auto _ : state) {
    EK_CHECK_OK(
        backward ? CausalAttentionBackward(sizes, q.view(), q.view(), q.view(), p.view(), q.view(), out.view(),
                                           dk.view(), dv.view(), bench.stream())
                 : CausalAttentionForward(sizes, q.view(), q.view(), q.view(), p.view(), out.view(), bench.stream()));
  }
}
BENCHMARK_CAPTURE(BM_Attention, forward, false);
BENCHMARK_CAPTURE(BM_Attention, backward, true);

void BM_GatherRows(benchmark::State& state) {
  Bench bench;
  const int64_t rows = state.range(0), n = state.range(1);
  const Tensor x = bench.Make(DType::kF32, {rows, n}), y = bench.Make(DType::kF32, {rows, n});
  const Tensor indices = bench.Indices(rows, rows);
  for (auto _ : state) EK_CHECK_OK(GatherRows(x.view(), indices.view(), y.view(), bench.stream()));
  state.SetBytesProcessed(state.iterations() * rows * n * 4);
}
BENCHMARK(BM_GatherRows)->Args({128, 64})->Args({4096, 512});

void BM_AdamW(benchmark::State& state) {
  Bench bench;
  const int64_t n = 1 << 16;
  const Tensor p = bench.Make(DType::kF32, {n}), g = bench.Make(DType::kF32, {n});
  const Tensor m = bench.Make(DType::kF32, {n}), v = bench.Make(DType::kF32, {n});
  for (auto _ : state) {
    EK_CHECK_OK(AdamWStep({.learning_rate = 1e-3}, g.view(), m.view(), v.view(), p.view(), bench.stream()));
  }
  state.SetItemsProcessed(state.iterations() * n);
}
BENCHMARK(BM_AdamW);

void BM_SumOfSquares(benchmark::State& state) {
  Bench bench;
  const Tensor x = bench.Make(DType::kF32, {1 << 16}), out = bench.Make(DType::kF64, {1});
  for (auto _ : state) EK_CHECK_OK(SumOfSquares(x.view(), out.view(), bench.stream()));
  state.SetItemsProcessed(state.iterations() * (1 << 16));
}
BENCHMARK(BM_SumOfSquares);

void BM_Allocate(benchmark::State& state) {
  const auto device = HostDevice::Create();
  for (auto _ : state) benchmark::DoNotOptimize(device->Allocate(state.range(0)));
}
BENCHMARK(BM_Allocate)->Arg(1 << 10)->Arg(1 << 16)->Arg(1 << 20);

}  // namespace
}  // namespace evenkeel
