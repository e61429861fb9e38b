// What a collective costs, beside its limit and its peers in the same run: the memory copies alone, Gloo between the
// same threads, and raw Open MPI and the mpi backend between processes.
//
//   bazel run //tools/bench:comm                                            some minutes
//   bazel run //tools/bench:comm -- --benchmark_filter='all_gather/ranks:2/'
//   bazel run //tools/bench:comm -- --benchmark_format=json                  all runs; the table on stderr
//
// Every row is measured many times in short windows, in an order that mixes all rows, so that whatever else the machine
// does hits all of them; what counts is the shortest window. The MPI ranks are jobs of //tools/bench:comm_mpi that this
// program starts and that sleep while others are measured. Ends with a table and a line for each target.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/tools/bench/comm_report.h"
#include "evenkeel/tools/bench/comm_rows.h"
#include "evenkeel/tools/bench/mpi_ranks.h"
#include "evenkeel/tools/bench/thread_ranks.h"

namespace evenkeel::bench {
namespace {

// The worlds of all rows, made when the first of their rows runs.
class Worlds {
 public:
  absl::StatusOr<double> Run(const Row& row, int64_t calls) {
    if (!NeedsProcesses(row.kind)) {
      std::unique_ptr<ThreadRanks>& threads = threads_[row.ranks];
      if (threads == nullptr) threads = ThreadRanks::Create(row.ranks);
      return threads->Run(row.kind, row.op, row.bytes, calls);
    }
    auto [place, is_new] = processes_.try_emplace(row.ranks);
    if (is_new) place->second = MpiRanks::Start(row.ranks);
    if (!place->second.ok()) return place->second.status();
    return (*place->second)->Run(row.kind, row.op, row.bytes, calls);
  }

 private:
  std::map<int, std::unique_ptr<ThreadRanks>> threads_;
  std::map<int, absl::StatusOr<std::unique_ptr<MpiRanks>>> processes_;
};

// The shortest of a few windows, fewer where they are long: what just does not fit the last cache varies by a third
// from window to window.
absl::StatusOr<double> ShortestWindow(const Row& row, int64_t calls, Worlds& worlds) {
  constexpr int kWindows = 10;
  constexpr int kFewWindows = 3;
  constexpr double kEnough = 0.01, kTooMuch = 0.3;  // seconds
  double shortest = std::numeric_limits<double>::infinity(), sum = 0;
  for (int i = 0; i < kWindows && sum < (i < kFewWindows ? kTooMuch : kEnough); ++i) {
    const absl::StatusOr<double> seconds = worlds.Run(row, calls);
    if (!seconds.ok()) return seconds;
    sum += *seconds;
    shortest = std::min(shortest, *seconds);
  }
  return shortest;
}

void MeasureRow(const Row& row, Worlds& worlds, CommReport& report, benchmark::State& state) {
  const int64_t calls = CallsPerWindow(row.bytes);
  while (state.KeepRunningBatch(calls)) {
    const absl::StatusOr<double> seconds = ShortestWindow(row, calls, worlds);
    if (!seconds.ok()) {
      state.SkipWithError(std::string(seconds.status().message()).c_str());
      return;
    }
    state.SetIterationTime(*seconds);
    report.Add(row, *seconds * 1e6 / static_cast<double>(calls));
  }
  state.SetBytesProcessed(state.iterations() * MovedBytes(row));
}

void RegisterRows(Worlds& worlds, CommReport& report, bool with_mpi) {
  for (const Row& row : AllRows()) {
    if (NeedsProcesses(row.kind) && !with_mpi) continue;
    benchmark::RegisterBenchmark(
        RowName(row).c_str(),
        [row, &worlds, &report](benchmark::State& state) { MeasureRow(row, worlds, report, state); })
        ->Iterations(CallsPerWindow(row.bytes))
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->ComputeStatistics(
            "min", [](const std::vector<double>& times) { return *std::min_element(times.begin(), times.end()); });
  }
}

void ReduceCanonicalRow(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int64_t n = state.range(1) / 4;
  const std::vector<std::vector<float>> sources(ranks, std::vector<float>(n, 1.0f));
  std::vector<float> out(n);
  std::vector<const void*> pointers;
  for (const auto& source : sources) pointers.push_back(source.data());
  for (auto unused : state) {
    comm::ReduceCanonical(DType::kF32, comm::ReduceOp::kSum, pointers, out.data(), n);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * ranks * n * 4);
}

void FingerprintsAgreeRow(benchmark::State& state) {
  comm::Fingerprint f;
  f.operation = static_cast<uint8_t>(comm::Operation::kAllReduce);
  const std::vector<comm::Fingerprint> all(state.range(0), comm::SealFingerprint(f));
  for (auto unused : state) benchmark::DoNotOptimize(comm::FindDisagreement(all));
}

void RegisterParts() {
  for (const int ranks : {2, 4, 8, 16}) {
    benchmark::RegisterBenchmark("reduce_canonical/f32", ReduceCanonicalRow)
        ->ArgNames({"ranks", "bytes"})
        ->Args({ranks, 1 << 20})
        ->MinTime(0.02);
    benchmark::RegisterBenchmark("fingerprints_agree", FingerprintsAgreeRow)
        ->ArgName("ranks")
        ->Arg(ranks)
        ->MinTime(0.02);
  }
}

// On a terminal the rows are in the table at the end; only what the table does not have is printed as it comes.
class PartsReporter : public benchmark::ConsoleReporter {
 public:
  PartsReporter() : benchmark::ConsoleReporter(OO_None) {}
  void ReportRuns(const std::vector<Run>& runs) override {
    std::vector<Run> shown;
    for (const Run& run : runs) {
      const bool in_table = run.run_name.function_name.find("/ranks:") != std::string::npos;
      const bool aggregate = run.run_type == Run::RT_Aggregate;
      if (run.error_occurred || (!in_table && aggregate && run.aggregate_name == "median")) shown.push_back(run);
    }
    if (!shown.empty()) benchmark::ConsoleReporter::ReportRuns(shown);
  }
};

int Main(int argc, char** argv) {
  // Defaults first, so that the user's flags win.
  std::vector<std::string> words = {argv[0], "--benchmark_enable_random_interleaving=true",
                                    "--benchmark_repetitions=9"};
  words.insert(words.end(), argv + 1, argv + argc);
  bool console = true;
  for (absl::string_view word : words) {
    if (absl::ConsumePrefix(&word, "--benchmark_format=")) console = word == "console";
    if (word == "--benchmark_list_tests" || word == "--benchmark_list_tests=true") console = false;
  }
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;

  const bool with_mpi = !FindMpirun().empty();
  Worlds worlds;
  CommReport report;
  RegisterRows(worlds, report, with_mpi);
  RegisterParts();
  PartsReporter parts;
  if (console) {
    benchmark::RunSpecifiedBenchmarks(&parts);
  } else {
    benchmark::RunSpecifiedBenchmarks();
  }
  const std::string table = report.Table();
  if (table.empty()) return 0;
  std::FILE* const out = console ? stdout : stderr;
  std::fputs(absl::StrCat(table, report.Targets()).c_str(), out);
  if (!with_mpi) std::fputs("no mpirun on this machine: the rows mpi and raw_mpi are left out\n", out);
  return 0;
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) { return evenkeel::bench::Main(argc, argv); }
