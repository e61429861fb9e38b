// Runs in canonical numerics, compared across layouts: the same losses, activations, gradients and parameters, bit by
// bit, whatever the order, T, E, expert TP and W.
//
//   LayoutParityConfig config;
//   config.base.model.numerics = moe::ExpertNumerics::kCanonical;
//   config.base.batches = 8;
//   config.runs.push_back({*NamedEntry("reference", "flat"), {.tp = 1, .ep = 1, .dp = 1, .etp = 1}});  // the baseline
//   config.runs.push_back({*NamedEntry("fused", "flat"), {.tp = 2, .ep = 4, .dp = 4, .etp = 2}});
//   EK_ASSIGN_OR_RETURN(ParityResult result, RunLayoutParity(config, corpus));
//
// Each run has threads of its own, one after the other; or, with a backend, the first tp * dp of its ranks. What ranks
// show is put together by name and global index, so that layouts can be compared: per step the mean loss, every batch's
// loss, activations and their gradients at block boundaries, every averaged gradient, the global norm, and the
// parameters that the step left. Ranks of one run that show the same element must show the same bits. The baseline is
// judged by the double reference too.
#ifndef EVENKEEL_TESTING_LAYOUT_PARITY_H_
#define EVENKEEL_TESTING_LAYOUT_PARITY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

struct LayoutRun {
  ParityEntry entry;  // an order; `dense` and `judged_by` are not used
  comm::MeshShape mesh;
};

struct LayoutParityConfig {
  TrainingConfig base;          // mesh, order and policy come from the runs; `batches` is the same for all
  std::vector<LayoutRun> runs;  // the baseline first
  int64_t steps = 50;
  bool judge_baseline = true;  // by the double reference, too
  // Copied into the result, for reports.
  std::vector<std::pair<std::string, std::string>> description;
  // Called when a step of a run is done, on some rank's thread; steps are counted over all runs.
  std::function<void(int64_t done, int64_t steps)> progress;
  absl::Duration deadline = absl::Seconds(60);  // of every collective call
  // Gives a rank of run `index` another way to its peers, for planted faults; owned by the caller. Empty: none.
  std::function<comm::Backend*(size_t index, comm::Backend& real)> decorate;
};

// InvalidArgument, one line: numerics that are not canonical, no runs, batches 0, or a run that ValidateTrainingConfig
// refuses.
absl::Status ValidateLayoutParity(const LayoutParityConfig& config);

// A difference is a result (verdict kMismatch, with the first differing element by global index), not an error. Equal
// runs have equal digests of losses, gradients and parameters.
absl::StatusOr<ParityResult> RunLayoutParity(const LayoutParityConfig& config, const Corpus& corpus);

// The same on the ranks of a backend; all of them call it. Rank 0's result is whole; the others' runs have the verdict,
// and what they have found themselves. `deadline` is the backend's. InvalidArgument, also, when a run needs more ranks
// than there are; errors of the communicators.
absl::StatusOr<ParityResult> RunLayoutParity(const LayoutParityConfig& config, const Corpus& corpus,
                                             comm::Backend& backend);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_LAYOUT_PARITY_H_
