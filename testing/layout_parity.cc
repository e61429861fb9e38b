#include "evenkeel/testing/layout_parity.h"

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/global_record.h"

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
    const comm::MeshShape shape = MeshForOrder(config.runs[i].mesh, config.runs[i].entry.order);
    EK_ASSIGN_OR_RETURN(const comm::Mesh mesh, comm::Mesh::Create(shape));
    auto record = std::make_unique<GlobalRecord>(config.base.model, mesh, baseline.get());
    ParityConfig job = JobOf(config, i);
    job.observe = [&record](int rank, int64_t step, const Tap& tap) { record->Show(rank, step, tap); };
    job.end_step = [&record](int64_t step) { record->EndStep(step); };
    EK_ASSIGN_OR_RETURN(ParityResult own, RunParityOnThreads(job, corpus, config.deadline));
    ParityRun run = std::move(own.runs[0]);
    SetVerdict(config, i, record->finding(), &run);
    const RecordDigests digests = record->digests();
    run.parameter_digest = absl::StrFormat("%016x", digests.parameters);
    run.gradient_digest = absl::StrFormat("%016x", digests.gradients);
    run.loss_digest = absl::StrFormat("%016x", digests.losses);
    result.runs.push_back(std::move(run));
    if (i == 0) baseline = std::move(record);
  }
  return result;
}

}  // namespace evenkeel::testutil
