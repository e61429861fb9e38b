// What a collective between processes costs, beside the same thing by raw Open MPI calls and beside the copies alone.
//
//   bazel build //tools/bench:comm_mpi
//   mpirun --oversubscribe -n 2 bazel-bin/tools/bench/comm_mpi --benchmark_filter=all_gather
//
// All ranks run all rows, a fixed number of times each; rank 0 prints. Bytes are those of one rank's block, and
// bytes_per_second counts what a rank takes from the others. "raw_mpi" rows are the blocking calls of Open MPI, its own
// reductions included, on the same buffers; "raw_mpi_polled" rows are its non-blocking calls, tested until done.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {
namespace {

enum class Op { kAllGather, kAllToAll, kReduceScatter, kAllReduce, kBarrier };
constexpr const char* kNames[] = {"all_gather", "all_to_all", "reduce_scatter", "all_reduce", "barrier"};

// The job, and what all rows use.
struct Job {
  std::unique_ptr<MpiBackend> world;
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream;
  std::unique_ptr<Communicator> group;
  MPI_Comm raw = MPI_COMM_NULL;
  std::vector<float> send, recv;
};
Job* g_job = nullptr;

void Prepare(int64_t block_bytes) {
  const auto n = static_cast<size_t>(block_bytes / 4 * g_job->group->size());
  g_job->send.assign(n, 1.0f);
  g_job->recv.assign(n, 2.0f);
}

absl::Status Call(Op op, int64_t n) {
  Communicator& group = *g_job->group;
  const auto in = [](int64_t count) { return ConstTensorView(g_job->send.data(), DType::kF32, Shape({count})); };
  const auto out = [](int64_t count) { return TensorView(g_job->recv.data(), DType::kF32, Shape({count})); };
  switch (op) {
    case Op::kAllGather:
      return group.AllGather(in(n), out(n * group.size()), *g_job->stream);
    case Op::kAllToAll:
      return group.AllToAll(in(n * group.size()), out(n * group.size()), *g_job->stream);
    case Op::kReduceScatter:
      return group.ReduceScatter(in(n * group.size()), out(n), ReduceOp::kSum, *g_job->stream);
    case Op::kAllReduce:
      return group.AllReduce(in(n), out(n), ReduceOp::kSum, *g_job->stream);
    case Op::kBarrier:
      return group.Barrier(*g_job->stream);
  }
  return absl::OkStatus();
}

void RawCall(Op op, int64_t n64) {
  const int n = static_cast<int>(n64);
  const float* send = g_job->send.data();
  float* recv = g_job->recv.data();
  switch (op) {
    case Op::kAllGather:
      MPI_Allgather(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, g_job->raw);
      break;
    case Op::kAllToAll:
      MPI_Alltoall(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, g_job->raw);
      break;
    case Op::kReduceScatter:
      MPI_Reduce_scatter_block(send, recv, n, MPI_FLOAT, MPI_SUM, g_job->raw);
      break;
    case Op::kAllReduce:
      MPI_Allreduce(send, recv, n, MPI_FLOAT, MPI_SUM, g_job->raw);
      break;
    case Op::kBarrier:
      MPI_Barrier(g_job->raw);
      break;
  }
}

void RawPolled(Op op, int64_t n64) {
  const int n = static_cast<int>(n64);
  const float* send = g_job->send.data();
  float* recv = g_job->recv.data();
  MPI_Request request = MPI_REQUEST_NULL;
  switch (op) {
    case Op::kAllGather:
      MPI_Iallgather(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, g_job->raw, &request);
      break;
    case Op::kAllToAll:
      MPI_Ialltoall(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, g_job->raw, &request);
      break;
    case Op::kReduceScatter:
      MPI_Ireduce_scatter_block(send, recv, n, MPI_FLOAT, MPI_SUM, g_job->raw, &request);
      break;
    case Op::kAllReduce:
      MPI_Iallreduce(send, recv, n, MPI_FLOAT, MPI_SUM, g_job->raw, &request);
      break;
    case Op::kBarrier:
      MPI_Ibarrier(g_job->raw, &request);
      break;
  }
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) sched_yield();
  }
}

int64_t MovedBytes(Op op, int ranks, int64_t block) {
  if (op == Op::kBarrier) return 0;
  return op == Op::kAllReduce ? 2 * block * (ranks - 1) / ranks : block * (ranks - 1);
}

template <typename Body>
void RunRow(benchmark::State& state, Op op, Body body) {
  const int64_t block = state.range(0);
  Prepare(block);
  for (int i = 0; i < 3; ++i) body(op, block / 4);
  MPI_Barrier(g_job->raw);
  for (auto unused : state) body(op, block / 4);
  state.SetBytesProcessed(state.iterations() * MovedBytes(op, g_job->group->size(), block));
}

void CopyAlone(Op op, int64_t n) {
  const int64_t blocks = op == Op::kBarrier ? 0 : g_job->group->size();
  for (int64_t i = 0; i < blocks; ++i) {
    std::memcpy(g_job->recv.data() + i * n, g_job->send.data() + (op == Op::kAllToAll ? i * n : 0), n * 4);
  }
  benchmark::ClobberMemory();
}

void Register() {
  const auto add = [](const char* kind, Op op, int64_t bytes, auto body) {
    const std::string name = absl::StrCat(kind, "/", kNames[static_cast<int>(op)]);
    benchmark::RegisterBenchmark(name.c_str(), [op, body](benchmark::State& state) { RunRow(state, op, body); })
        ->ArgName("bytes")
        ->Arg(bytes)
        ->Iterations(std::clamp<int64_t>((int64_t{64} << 20) / bytes, 5, 2000))
        ->UseRealTime();
  };
  for (const Op op : {Op::kBarrier, Op::kAllGather, Op::kAllToAll, Op::kReduceScatter, Op::kAllReduce}) {
    for (const int64_t bytes : {int64_t{1} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{16} << 20}) {
      if (op == Op::kBarrier && bytes > (1 << 10)) continue;
      add("mpi", op, bytes, [](Op o, int64_t n) { EK_CHECK_OK(Call(o, n)); });
      add("raw_mpi", op, bytes, RawCall);
      add("raw_mpi_polled", op, bytes, RawPolled);
      if (op == Op::kAllGather || op == Op::kAllToAll) add("copy", op, bytes, CopyAlone);
    }
  }
}

// Says nothing: for all ranks but the first.
class Silent : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

int Main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  MpiOptions options;
  for (absl::string_view argument : absl::MakeSpan(argv + 1, argc - 1)) {
    if (!absl::ConsumePrefix(&argument, "--piece_bytes=") || !absl::SimpleAtoi(argument, &options.piece_bytes)) {
      std::fprintf(stderr, "usage: comm_mpi [--piece_bytes=N] [--benchmark_...]\n");
      return 2;
    }
  }
  auto world = MpiBackend::Create(options);
  EK_CHECK_OK(world);
  Job job;
  job.world = *std::move(world);
  job.stream = *job.device->CreateStream("bench");
  Group all{.axis = Axis::kWorld, .name = "world", .ranks = std::vector<int>(job.world->size())};
  std::iota(all.ranks.begin(), all.ranks.end(), 0);
  job.group = *job.world->CreateGroup(all);
  MPI_Comm_dup(MPI_COMM_WORLD, &job.raw);
  g_job = &job;
  Register();
  Silent silent;
  if (job.world->rank() == 0) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    benchmark::RunSpecifiedBenchmarks(&silent);
  }
  job.group.reset();
  job.world.reset();
  return 0;
}

}  // namespace
}  // namespace evenkeel::comm

int main(int argc, char** argv) { return evenkeel::comm::Main(argc, argv); }
