#include "evenkeel/testing/layout_parity.h"

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/testing/first_ranks.h"
#include "evenkeel/testing/global_record.h"
#include "evenkeel/testing/tap_exchange.h"

namespace evenkeel::testutil {
namespace {

absl::Status Bad(absl::string_view what) { return absl::InvalidArgumentError(absl::StrCat("config: ", what)); }

// The job of one run: its entry alone, in its layout.
ParityConfig JobOf(const LayoutParityConfig& config, size_t index) {
  ParityConfig job;
  job.base = config.base;
  job.base.mesh = config.runs[index].mesh;
  job.entries = {config.runs[index].entry};
  job.steps = config.steps;
  job.judge_reference = index == 0 && config.judge_baseline;
  if (config.decorate) {
    job.decorate = [&config, index](size_t, comm::Backend& real) { return config.decorate(index, real); };
  }
  if (config.progress) {
    const int64_t before = static_cast<int64_t>(index) * config.steps;
    const int64_t all = static_cast<int64_t>(config.runs.size()) * config.steps;
    job.progress = [&config, before, all](int64_t done, int64_t) { config.progress(before + done, all); };
  }
  return job;
}

std::string LayoutOfRun(const LayoutRun& run) { return MeshText(MeshForOrder(run.mesh, run.entry.order)); }

// What the comparison with the baseline makes of a run that was alone in its job.
void SetVerdict(const LayoutParityConfig& config, size_t index, const Finding& finding, ParityRun* run) {
  const std::string layout = LayoutOfRun(config.runs[index]);
  if (run->verdict == Verdict::kMismatch) {  // by the double reference, or a loss that is not finite
    run->note = absl::StrCat(run->note, " (", layout, ")");
    return;
  }
  run->max_abs_diff = std::max(run->max_abs_diff, finding.max_abs_diff);
  run->values_compared += finding.values_compared;
  if (finding.first.has_value() || (index > 0 && finding.values_compared == 0)) {
    run->verdict = Verdict::kMismatch;
    run->first_difference = finding.first;
    run->note = finding.first.has_value() ? absl::StrCat("differs in layout ", layout) : "nothing was compared";
  } else if (index > 0) {
    run->verdict = Verdict::kBitwise;
    run->note = absl::StrCat(layout, ": same bits as ", config.runs[0].entry.name, " in ", LayoutOfRun(config.runs[0]));
  }
}

// The record of one run, compared with the baseline's.
absl::StatusOr<std::unique_ptr<GlobalRecord>> RecordOf(const LayoutParityConfig& config, size_t index,
                                                       const GlobalRecord* baseline) {
  const comm::MeshShape shape = MeshForOrder(config.runs[index].mesh, config.runs[index].entry.order);
  EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(shape));
  return std::make_unique<GlobalRecord>(config.base.model, mesh, baseline);
}

void Complete(const LayoutParityConfig& config, size_t index, const GlobalRecord& record, ParityRun* run) {
  SetVerdict(config, index, record.finding(), run);
  const RecordDigests digests = record.digests();
  run->parameter_digest = absl::StrFormat("%016x", digests.parameters);
  run->gradient_digest = absl::StrFormat("%016x", digests.gradients);
  run->loss_digest = absl::StrFormat("%016x", digests.losses);
}

int RanksOf(const LayoutRun& run) { return run.mesh.tp * run.mesh.dp; }

absl::Status CheckRanks(const LayoutParityConfig& config, int size) {
  for (const LayoutRun& run : config.runs) {
    if (RanksOf(run) <= size) continue;
    return Bad(absl::StrCat(run.entry.name, " in ", LayoutOfRun(run), " needs ", RanksOf(run), " ranks, the world has ",
                            size));
  }
  return absl::OkStatus();
}

// This rank's part of one run. Ranks beyond it take part in bringing together what the others show, so that nobody
// waits longer than for a step.
absl::StatusOr<ParityRun> RunOnRanks(const LayoutParityConfig& config, size_t index, const Corpus& corpus,
                                     comm::Backend& backend, TapExchange* exchange) {
  ParityRun run;
  run.order = config.runs[index].entry.name;
  run.zero3 = config.runs[index].entry.zero3;
  if (backend.rank() < RanksOf(config.runs[index])) {
    FirstRanks ranks(&backend, RanksOf(config.runs[index]));
    ParityConfig job = JobOf(config, index);
    job.observe = [exchange](int, int64_t, const Tap& tap) { exchange->Keep(tap); };
    job.end_step = [exchange](int64_t step) { exchange->EndStep(step, /*takes_part=*/true); };
    EK_ASSIGN_OR_RETURN(ParityResult own, RunParity(job, corpus, ranks));
    run = std::move(own.runs[0]);
  } else {
    for (int64_t step = 0; step <= config.steps; ++step) exchange->EndStep(step, /*takes_part=*/false);
  }
  EK_RETURN_IF_ERROR(exchange->status());
  return run;
}

// What rank 0 has found, on all ranks.
absl::Status ShareVerdict(comm::Communicator& world, Stream& stream, ParityRun* run) {
  int64_t verdict = static_cast<int64_t>(run->verdict);
  EK_RETURN_IF_ERROR(world.Broadcast(TensorView(&verdict, DType::kI64, Shape({1})), /*root=*/0, stream));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  run->verdict = static_cast<Verdict>(verdict);
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLayoutParity(const LayoutParityConfig& config) {
  if (!config.base.model.canonical()) return Bad("layouts have the same bits in canonical numerics only");
  if (config.runs.empty()) return Bad("no runs");
  if (config.base.batches < 1) return Bad("batches must be set: a number that all layouts share");
  for (size_t i = 0; i < config.runs.size(); ++i) {
    if (config.runs[i].entry.dense) return Bad("the naive run in double has no layout");
    EK_RETURN_IF_ERROR(ValidateParityConfig(JobOf(config, i)));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParityResult> RunLayoutParity(const LayoutParityConfig& config, const Corpus& corpus) {
  EK_RETURN_IF_ERROR(ValidateLayoutParity(config));
  ParityResult result;
  result.config = config.description;
  std::unique_ptr<GlobalRecord> baseline;
  for (size_t i = 0; i < config.runs.size(); ++i) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<GlobalRecord> record, RecordOf(config, i, baseline.get()));
    ParityConfig job = JobOf(config, i);
    job.observe = [&record](int rank, int64_t step, const Tap& tap) { record->Show(rank, step, tap); };
    job.end_step = [&record](int64_t step) { record->EndStep(step); };
    EK_ASSIGN_OR_RETURN(ParityResult own, RunParityOnThreads(job, corpus, config.deadline));
    ParityRun run = std::move(own.runs[0]);
    Complete(config, i, *record, &run);
    result.runs.push_back(std::move(run));
    if (i == 0) baseline = std::move(record);
  }
  return result;
}

absl::StatusOr<ParityResult> RunLayoutParity(const LayoutParityConfig& config, const Corpus& corpus,
                                             comm::Backend& backend) {
  EK_RETURN_IF_ERROR(ValidateLayoutParity(config));
  EK_RETURN_IF_ERROR(CheckRanks(config, backend.size()));
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->CreateStream("layouts"));
  comm::Group everyone;
  everyone.axis = comm::Axis::kOther;
  everyone.name = "layouts";
  for (int rank = 0; rank < backend.size(); ++rank) everyone.ranks.push_back(rank);
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> world, backend.CreateGroup(everyone));
  ParityResult result;
  result.config = config.description;
  std::unique_ptr<GlobalRecord> baseline;  // rank 0 alone
  for (size_t i = 0; i < config.runs.size(); ++i) {
    std::unique_ptr<GlobalRecord> record;
    if (backend.rank() == 0) {
      EK_ASSIGN_OR_RETURN(record, RecordOf(config, i, baseline.get()));
    }
    TapExchange exchange(world.get(), stream.get(), record.get());
    EK_ASSIGN_OR_RETURN(ParityRun run, RunOnRanks(config, i, corpus, backend, &exchange));
    if (record != nullptr) Complete(config, i, *record, &run);
    EK_RETURN_IF_ERROR(ShareVerdict(*world, *stream, &run));
    result.runs.push_back(std::move(run));
    if (i == 0) baseline = std::move(record);
  }
  return result;
}

}  // namespace evenkeel::testutil
