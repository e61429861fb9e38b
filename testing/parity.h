// The parity job: trains the same model on the same text under several configurations at once, step by step, and says
// whether they are equal.
//
//   ParityConfig config;
//   config.base.mesh = {.tp = 2, .ep = 4, .dp = 8, .etp = 2};
//   for (const char* name : {"reference", "fused"}) {
//     EK_ASSIGN_OR_RETURN(ParityEntry entry, NamedEntry(name, "flat"));
//     config.entries.push_back(entry);                                   // the first one is the reference
//   }
//   EK_ASSIGN_OR_RETURN(ParityResult result, RunParityOnThreads(config, corpus));
//   if (!result.AllHold()) ...
//
// Lockstep: in each step every rank steps the reference and then each candidate, so a difference is found where and
// when it arises. A candidate in the reference's layout is judged by bits: loss, activations and their gradients at
// block boundaries, every averaged gradient, every parameter behind the step. One in another layout (whole experts) or
// with another order of additions (folded rows) is judged by the double reference, inside its derived bound; so is the
// reference itself, or all could be wrong alike. See bitwise_judge.h and dense_judge.h.
#ifndef EVENKEEL_TESTING_PARITY_H_
#define EVENKEEL_TESTING_PARITY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/language_model.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

// The name under which the naive run in double takes part.
inline constexpr char kDense[] = "dense";

enum class JudgedBy : uint8_t {
  kAuto,  // bits where layout and rows are the reference's, else the double reference
  kBits,
  kDense,
};

// One configuration of the job. A value.
struct ParityEntry {
  std::string name;    // as the user wrote it
  bool dense = false;  // the run in double; `order` is not used
  moe::Order order;
  std::string zero3 = "flat";  // fetch policy; "off" replicates
  JudgedBy judged_by = JudgedBy::kAuto;
  // Last changes to what this entry runs with, for planted faults and for options that must not matter. Judges go by
  // the configuration without them. Empty: none.
  std::function<void(TrainingConfig&)> change;
};

// An entry for a registered order, an order file, or "dense". Errors as LoadOrder.
absl::StatusOr<ParityEntry> NamedEntry(absl::string_view name_or_path, absl::string_view zero3);

struct ParityConfig {
  TrainingConfig base;               // order and policy come from the entries
  std::vector<ParityEntry> entries;  // the reference first
  int64_t steps = 50;
  int ranks_per_node = 0;       // of RunParityOnThreads: consecutive ranks on each (virtual) node; 0: all on one
  bool judge_reference = true;  // by the double reference, too
  // Copied into the result, for reports.
  std::vector<std::pair<std::string, std::string>> description;
  // Called on rank 0 behind each step.
  std::function<void(int64_t done, int64_t steps)> progress;
  // Shown everything that a rank of the one entry shows, in its thread: taps of the steps, the mean loss and the global
  // norm, and, as step `steps`, the parameters that the last step left. Empty: none.
  std::function<void(int rank, int64_t step, const Tap& tap)> observe;
  // Called on every rank's thread when it has shown all of a step. Empty: none.
  std::function<void(int64_t step)> end_step;
  // Gives entry `index` another way to its peers, for planted faults; owned by the caller. Empty: none.
  std::function<comm::Backend*(size_t index, comm::Backend& real)> decorate;
};

// InvalidArgument, one line: no entry, steps below 1, two dense entries, or an entry that ValidateTrainingConfig
// refuses.
absl::Status ValidateParityConfig(const ParityConfig& config);

// One rank's part of the job, on any backend; every rank of the world calls it and gets the same result. A difference
// is a result, not an error: errors are bad configurations and faults of the groups.
absl::StatusOr<ParityResult> RunParity(const ParityConfig& config, const Corpus& corpus, comm::Backend& backend);

// The whole job with one thread per rank. `deadline` is that of every collective call.
absl::StatusOr<ParityResult> RunParityOnThreads(const ParityConfig& config, const Corpus& corpus,
                                                absl::Duration deadline = absl::Seconds(60));

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_PARITY_H_
