// What a collective between threads costs, beside the copies that it cannot do without.
//
//   bazel run //tools/bench:comm -- --benchmark_filter='ranks:2'
//
// With --benchmark_repetitions=5 there is a "min" row, for machines that have other work too.
//
// Bytes are those of one rank's block. "copy" rows do only the copies of the same operation, each rank for itself, with
// nobody to wait for: bytes_per_second of a collective divided by that of its copy row is its share of the limit.
// "gloo" rows are Gloo's calls between the same threads. Raw Open MPI, which needs processes, is
// //tools/bench:comm_mpi.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "gloo/allgather.h"
#include "gloo/allreduce.h"
#include "gloo/alltoall.h"
#include "gloo/math.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/hash_store.h"
#include "gloo/transport/tcp/device.h"

namespace evenkeel::comm {
namespace {

enum class Op { kAllGather, kAllToAll, kReduceScatter, kAllReduce, kBarrier };

constexpr const char* kNames[] = {"all_gather", "all_to_all", "reduce_scatter", "all_reduce", "barrier"};

// The world of the running row: made before its threads start.
std::unique_ptr<InProcessWorld> g_world;
std::vector<Tensor> g_send, g_recv;
std::unique_ptr<HostDevice> g_device;

int64_t BlockBytes(const benchmark::State& state) { return state.range(1); }

void SetUp(const benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  g_device = HostDevice::Create();
  auto world = InProcessWorld::Create({.world_size = ranks});
  EK_CHECK_OK(world);
  g_world = *std::move(world);
  g_send.clear();
  g_recv.clear();
  for (int r = 0; r < ranks; ++r) {
    for (auto* buffers : {&g_send, &g_recv}) {
      auto tensor = Tensor::Zeros(g_device.get(), DType::kF32, Shape({BlockBytes(state) / 4 * ranks}));
      EK_CHECK_OK(tensor);
      buffers->push_back(*std::move(tensor));
    }
  }
}

void TearDown() {
  g_send.clear();
  g_recv.clear();
  g_world.reset();
}

absl::Status Call(Op op, Communicator& group, int64_t n, Stream& stream) {
  const TensorView send = g_send[group.rank()].view();
  const TensorView recv = g_recv[group.rank()].view();
  switch (op) {
    case Op::kAllGather:
      return group.AllGather(send.Rows(0, n), recv, stream);
    case Op::kAllToAll:
      return group.AllToAll(send, recv, stream);
    case Op::kReduceScatter:
      return group.ReduceScatter(send, recv.Rows(0, n), ReduceOp::kSum, stream);
    case Op::kAllReduce:
      return group.AllReduce(send.Rows(0, n), recv.Rows(0, n), ReduceOp::kSum, stream);
    case Op::kBarrier:
      return group.Barrier(stream);
  }
  return absl::OkStatus();
}

// Bytes that one rank takes from the others in one call.
int64_t MovedBytes(Op op, int ranks, int64_t block) {
  switch (op) {
    case Op::kAllReduce:
      return 2 * block * (ranks - 1) / ranks;
    case Op::kBarrier:
      return 0;
    default:
      return block * (ranks - 1);
  }
}

// Runs `call(rank)` as often as `state` wants on every rank at once; the calling thread is rank 0 and is timed. The CPU
// column is that of all ranks together.
template <typename MakeCall>
void RunOnRanks(benchmark::State& state, const MakeCall& make_call) {
  const int ranks = static_cast<int>(state.range(0));
  const auto run = [&state, &make_call](int rank) {
    auto call = make_call(rank);
    call();  // first use of memory, and the ranks start together
    if (rank == 0) {
      for (auto unused : state) call();
    } else {
      for (benchmark::IterationCount i = 0; i < state.max_iterations; ++i) call();
    }
  };
  std::vector<std::thread> others;
  for (int rank = 1; rank < ranks; ++rank) others.emplace_back(run, rank);
  run(0);
  for (std::thread& other : others) other.join();
}

void BM_InProcess(benchmark::State& state, Op op) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t n = BlockBytes(state) / 4;
  SetUp(state);
  RunOnRanks(state, [ranks, n, op](int rank) {
    auto stream = g_device->CreateStream("comm");
    EK_CHECK_OK(stream);
    auto group = g_world->backend(rank).CreateGroup(WorldGroup(ranks));
    EK_CHECK_OK(group);
    return
        [op, n, stream = *std::move(stream), group = *std::move(group)] { EK_CHECK_OK(Call(op, *group, n, *stream)); };
  });
  state.SetBytesProcessed(state.iterations() * MovedBytes(op, ranks, BlockBytes(state)));
  TearDown();
}

void BM_Copy(benchmark::State& state, Op op) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t block = BlockBytes(state);
  SetUp(state);
  RunOnRanks(state, [ranks, block, op](int rank) {
    return [ranks, block, op, rank] {
      auto* const to = static_cast<std::byte*>(g_recv[rank].view().raw());
      for (int step = 0; step < ranks; ++step) {  // the own block too: the collective copies it as well
        const int from = (rank + step) % ranks;
        const auto* const source = static_cast<const std::byte*>(g_send[from].view().raw());
        std::memcpy(to + from * block, source + (op == Op::kAllToAll ? rank * block : 0), block);
      }
      benchmark::ClobberMemory();
    };
  });
  state.SetBytesProcessed(state.iterations() * MovedBytes(op, ranks, block));
  TearDown();
}

// Gloo between the same threads: its own transport, over the loopback interface.
void BM_Gloo(benchmark::State& state, Op op) {
  const int ranks = static_cast<int>(state.range(0));
  const size_t n = static_cast<size_t>(BlockBytes(state) / 4);
  SetUp(state);
  gloo::rendezvous::HashStore store;
  RunOnRanks(state, [ranks, n, op, &store](int rank) {
    gloo::transport::tcp::attr address;
    address.hostname = "localhost";
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(address);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context->connectFullMesh(store, device);
    return [n, op, rank, ranks, context] {
      float* const send = g_send[rank].data<float>();
      float* const recv = g_recv[rank].data<float>();
      if (op == Op::kAllGather) {
        gloo::AllgatherOptions options(context);
        options.setInput(send, n);
        options.setOutput(recv, n * ranks);
        gloo::allgather(options);
      } else if (op == Op::kAllToAll) {
        gloo::AlltoallOptions options(context);
        options.setInput(send, n * ranks);
        options.setOutput(recv, n * ranks);
        gloo::alltoall(options);
      } else {
        gloo::AllreduceOptions options(context);
        options.setInput(send, n);
        options.setOutput(recv, n);
        options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
        gloo::allreduce(options);
      }
    };
  });
  state.SetBytesProcessed(state.iterations() * MovedBytes(op, ranks, BlockBytes(state)));
  TearDown();
}

void BM_ReduceCanonical(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t n = state.range(1) / 4;
  std::vector<std::vector<float>> sources(ranks, std::vector<float>(n, 1.0f));
  std::vector<float> out(n);
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  for (auto unused : state) {
    ReduceCanonical(DType::kF32, ReduceOp::kSum, pointers, out.data(), n);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * ranks * n * 4);
}

void BM_FingerprintAgreement(benchmark::State& state) {
  Fingerprint f;
  f.operation = static_cast<uint8_t>(Operation::kAllReduce);
  const std::vector<Fingerprint> all(state.range(0), SealFingerprint(f));
  for (auto unused : state) benchmark::DoNotOptimize(FindDisagreement(all));
}

void Register() {
  for (const Op op : {Op::kAllGather, Op::kAllToAll, Op::kReduceScatter, Op::kAllReduce, Op::kBarrier}) {
    for (const int ranks : {2, 4, 16, 64}) {
      for (int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) {
        if ((op == Op::kBarrier || ranks > 4) && bytes > (1 << 10)) continue;
        if (ranks == 4 && bytes > 16 << 20) continue;
        const auto shape = [ranks, bytes](benchmark::internal::Benchmark* row) {
          row->ArgNames({"ranks", "bytes"})->Args({ranks, bytes})->MeasureProcessCPUTime()->UseRealTime();
          row->ComputeStatistics(
              "min", [](const std::vector<double>& times) { return *std::min_element(times.begin(), times.end()); });
        };
        const std::string name = kNames[static_cast<int>(op)];
        shape(benchmark::RegisterBenchmark(absl::StrCat("in_process/", name).c_str(),
                                           [op](benchmark::State& state) { BM_InProcess(state, op); }));
        if (ranks <= 4 && op != Op::kReduceScatter && op != Op::kBarrier) {
          shape(benchmark::RegisterBenchmark(absl::StrCat("gloo/", name).c_str(),
                                             [op](benchmark::State& state) { BM_Gloo(state, op); }));
        }
        if (op != Op::kAllGather && op != Op::kAllToAll) continue;
        shape(benchmark::RegisterBenchmark(absl::StrCat("copy/", name).c_str(),
                                           [op](benchmark::State& state) { BM_Copy(state, op); }));
      }
    }
  }
  for (const int ranks : {2, 4, 8, 16}) {
    benchmark::RegisterBenchmark("reduce_canonical/f32", BM_ReduceCanonical)
        ->ArgNames({"ranks", "bytes"})
        ->Args({ranks, 1 << 20});
    benchmark::RegisterBenchmark("fingerprints_agree", BM_FingerprintAgreement)->ArgName("ranks")->Arg(ranks);
  }
}

}  // namespace
}  // namespace evenkeel::comm

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  evenkeel::comm::Register();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
