// What fetching, releasing, reducing and stepping a leaf costs, for every fetch policy, beside the copies that a gather
// cannot do without.
//
//   bazel run -c opt //tools/bench:zero3
//   bazel run -c opt //tools/bench:zero3 -- --benchmark_filter='leaf' --benchmark_format=json
//
// leaf/POLICY       fetch + release of leaves of 24 MiB in `params` parameters over `ranks` ranks (threads)
// small/POLICY      the same with parameters of 16 elements: host work alone
// copy/leaf         every rank copies a leaf from the other ranks' shards, with nobody to wait for: the limit of leaf/
// flush/POLICY      gradients of a 24 MiB leaf: zero fill, reduction, accumulation
// step/OPTIMIZER    the update of a shard
// Ratios between rows are printed to stderr at the end.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::zero3 {
namespace {

constexpr int64_t kLeafElements = (24 << 20) / 4;
constexpr int kLeaves = 2;

std::unique_ptr<comm::InProcessWorld> g_world;
// Seconds per iteration by row name, for the ratios: of the clock, and of all processors together. The second does not
// mind other load on the machine.
struct Seconds {
  double wall = 0;
  double cpu = 0;
};
std::map<std::string, Seconds> g_seconds;

double ProcessSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

int Ranks(const benchmark::State& state) { return static_cast<int>(state.range(1)); }

void MakeWorld(const benchmark::State& state) {
  auto world = comm::InProcessWorld::Create({.world_size = Ranks(state)});
  EK_CHECK_OK(world);
  g_world = *std::move(world);
}

void DropWorld(const benchmark::State&) { g_world.reset(); }

ModelDescription Leaves(int64_t parameters, int64_t elements_each) {
  ModelDescription model;
  model.root.type = "Model";
  for (int l = 0; l < kLeaves; ++l) {
    ModuleNode leaf{absl::StrCat("leaf", l), "Block", {}, {}, false};
    for (int64_t i = 0; i < parameters; ++i) {
      ParameterSpec spec;
      spec.name = absl::StrCat("leaf", l, ".", i);
      spec.shape = Shape({elements_each});
      leaf.parameters.push_back(static_cast<int>(model.parameters.size()));
      model.parameters.push_back(spec);
    }
    model.root.children.push_back(std::move(leaf));
  }
  return model;
}

// One rank: its device, streams, group and model.
struct Rank {
  Rank(int rank, const std::string& policy, int64_t parameters, int64_t elements_each,
       OptimizerOptions optimizer = {}) {
    auto group = g_world->backend(rank).CreateGroup(comm::WorldGroup(g_world->size()));
    EK_CHECK_OK(group);
    dp = *std::move(group);
    device = HostDevice::Create();
    compute = *device->CreateStream("compute");
    comm = *device->CreateStream("comm");
    const ModelDescription description = Leaves(parameters, elements_each);
    const auto selection = SelectLeaves(description, {});
    EK_CHECK_OK(selection);
    PartitionedModelOptions options;
    options.policy = policy;
    options.optimizer = optimizer;
    auto made = PartitionedModel::Create(description.parameters, *selection, options, {.dp = dp.get()}, device.get(),
                                         compute.get(), comm.get());
    EK_CHECK_OK(made);
    model = *std::move(made);
  }

  void Pass() {
    for (int l = 0; l < kLeaves; ++l) {
      EK_CHECK_OK(model->Fetch({l}));
      EK_CHECK_OK(model->Release({l}));
    }
    EK_CHECK_OK(model->UseTrace("step"));
  }

  std::unique_ptr<comm::Communicator> dp;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Stream> compute, comm;
  std::unique_ptr<PartitionedModel> model;
};

// Runs the loop of one thread and notes what an iteration took.
template <typename Body>
void Measure(benchmark::State& state, const std::string& row, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  const double cpu = ProcessSeconds();
  for (auto unused : state) body();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const double iterations = static_cast<double>(state.iterations());
  if (state.thread_index() == 0) {
    g_seconds[row] = {elapsed.count() / iterations, (ProcessSeconds() - cpu) / iterations};
  }
}

std::string Row(const std::string& name, const benchmark::State& state) {
  return absl::StrCat(name, "/", state.range(0), "/", state.range(1));
}

void BM_Fetch(benchmark::State& state, const std::string& policy, bool small) {
  const int64_t parameters = state.range(0);
  Rank rank(state.thread_index(), policy, parameters, small ? 16 : kLeafElements / parameters);
  for (int i = 0; i < 3; ++i) rank.Pass();
  const ModelCounts before = rank.model->counts();
  Measure(state, Row(absl::StrCat(small ? "small/" : "leaf/", policy), state), [&] { rank.Pass(); });
  const ModelCounts after = rank.model->counts();
  const double cycles = static_cast<double>(after.fetch_cycles - before.fetch_cycles);
  state.counters["host_ops"] =
      benchmark::Counter(static_cast<double>(after.fetch_host_operations - before.fetch_host_operations) / cycles,
                         benchmark::Counter::kAvgThreads);
  state.counters["peak_MiB"] =
      benchmark::Counter(static_cast<double>(after.peak_gathered_bytes) / (1 << 20), benchmark::Counter::kAvgThreads);
  if (!small) state.SetBytesProcessed(state.iterations() * kLeaves * kLeafElements * 4);
}

void BM_CopyLeaf(benchmark::State& state) {
  static std::vector<std::vector<char>> shards;
  const size_t ranks = static_cast<size_t>(Ranks(state));
  const size_t shard = static_cast<size_t>(kLeafElements) * 4 / ranks;
  if (state.thread_index() == 0) shards.assign(ranks * kLeaves, std::vector<char>(shard, 1));
  std::vector<char> whole(static_cast<size_t>(kLeafElements) * 4, 2);
  const size_t own = static_cast<size_t>(state.thread_index());
  Measure(state, Row("copy/leaf", state), [&] {
    for (size_t l = 0; l < kLeaves; ++l) {
      for (size_t step = 0; step < ranks; ++step) {
        const size_t from = (own + step) % ranks;
        std::memcpy(whole.data() + from * shard, shards[l * ranks + from].data(), shard);
      }
      benchmark::ClobberMemory();
    }
  });
  state.SetBytesProcessed(state.iterations() * kLeaves * kLeafElements * 4);
}

void BM_Flush(benchmark::State& state, const std::string& policy) {
  const int64_t parameters = state.range(0);
  Rank rank(state.thread_index(), policy, parameters, kLeafElements / parameters);
  Measure(state, Row(absl::StrCat("flush/", policy), state), [&] {
    for (int l = 0; l < kLeaves; ++l) {
      EK_CHECK_OK(rank.model->Gradients({l}));
      EK_CHECK_OK(rank.model->FlushGradients({l}));
    }
    EK_CHECK_OK(rank.model->ZeroGradients());
  });
  state.SetBytesProcessed(state.iterations() * kLeaves * kLeafElements * 4);
}

void BM_Step(benchmark::State& state, const OptimizerOptions& optimizer) {
  const int64_t parameters = state.range(0);
  Rank rank(state.thread_index(), "flat", parameters, kLeafElements / parameters, optimizer);
  const bool adamw = optimizer.kind == OptimizerOptions::Kind::kAdamW;
  Measure(state, Row(adamw ? "step/adamw" : "step/sgd", state), [&] { EK_CHECK_OK(rank.model->Step()); });
  state.SetItemsProcessed(state.iterations() * kLeaves * kLeafElements / Ranks(state));
}

void AddRow(const std::string& name, int64_t parameters, int ranks, std::function<void(benchmark::State&)> run) {
  benchmark::RegisterBenchmark(name.c_str(), std::move(run))
      ->ArgNames({"params", "ranks"})
      ->Args({parameters, ranks})
      ->Threads(ranks)
      ->Setup(MakeWorld)
      ->Teardown(DropWorld)
      ->MeasureProcessCPUTime()
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

void Register() {
  for (int ranks : {2, 4}) {
    AddRow("copy/leaf", 0, ranks, BM_CopyLeaf);
    for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
      const std::string name = policy;
      for (int64_t parameters : {1, 3, 24, 192, 768}) {
        if (ranks == 4 && parameters != 3 && parameters != 768) continue;
        AddRow("leaf/" + name, parameters, ranks, [name](benchmark::State& s) { BM_Fetch(s, name, false); });
      }
      for (int64_t parameters : {24, 768}) {
        AddRow("small/" + name, parameters, ranks, [name](benchmark::State& s) { BM_Fetch(s, name, true); });
      }
      if (ranks == 2) AddRow("flush/" + name, 192, ranks, [name](benchmark::State& s) { BM_Flush(s, name); });
    }
  }
  OptimizerOptions adamw;
  adamw.kind = OptimizerOptions::Kind::kAdamW;
  AddRow("step/sgd", 192, 2, [](benchmark::State& s) { BM_Step(s, {}); });
  AddRow("step/adamw", 192, 2, [adamw](benchmark::State& s) { BM_Step(s, adamw); });
}

void PrintRatio(const char* what, const std::string& row, const std::string& base, const char* target) {
  const auto a = g_seconds.find(row);
  const auto b = g_seconds.find(base);
  if (a == g_seconds.end() || b == g_seconds.end()) return;
  std::fprintf(stderr, "%-60s %8.3f %8.3f   %s\n", what, a->second.wall / b->second.wall, a->second.cpu / b->second.cpu,
               target);
}

void PrintRatios() {
  std::fprintf(stderr, "%-60s %8s %8s   %s\n", "ratio", "clock", "cpu", "target");
  PrintRatio("flat: time(768 parameters) / time(3), 24 MiB, 2 ranks", "leaf/flat/768/2", "leaf/flat/3/2", "<= 1.1");
  PrintRatio("copy limit / flat, 24 MiB, 2 ranks: share of the limit", "copy/leaf/0/2", "leaf/flat/192/2", ">= 0.8");
  PrintRatio("coalesced / per_parameter, 768 small parameters, 2 ranks", "small/coalesced/768/2",
             "small/per_parameter/768/2", "<= 0.65");
  PrintRatio("coalesced / per_parameter, 768 small parameters, 4 ranks", "small/coalesced/768/4",
             "small/per_parameter/768/4", "<= 0.65");
  PrintRatio("flat / coalesced, 768 small parameters, 2 ranks", "small/flat/768/2", "small/coalesced/768/2", "");
  PrintRatio("flat / coalesced, 24 MiB in 192 parameters, 2 ranks", "leaf/flat/192/2", "leaf/coalesced/192/2", "");
}

}  // namespace
}  // namespace evenkeel::zero3

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  evenkeel::zero3::Register();
  benchmark::RunSpecifiedBenchmarks();
  evenkeel::zero3::PrintRatios();
  return 0;
}
