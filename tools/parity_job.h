// One parity job on a backend that is known by name, whichever the program links (comm/backend_registry.h).
#ifndef EVENKEEL_TOOLS_PARITY_JOB_H_
#define EVENKEEL_TOOLS_PARITY_JOB_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"

namespace evenkeel::tools {

struct ParityJob {
  std::string backend;       // a linked one; "threads" is "in_process"
  comm::WorldOptions world;  // its stragglers are the job's own
  std::string corpus;        // paths
  std::string out;
  testutil::ParityConfig config;
  // Called on every rank, with its own copy of the config, before the training starts. Empty: nothing to do.
  std::function<absl::Status(comm::Backend& backend, testutil::ParityConfig* config)> prepare;
  // One rank's part of the training. Empty: testutil::RunParity.
  std::function<absl::StatusOr<testutil::ParityResult>(const testutil::ParityConfig& config,
                                                       const testutil::Corpus& corpus, comm::Backend& backend)>
      run = nullptr;
};

// OK, or in one line what is wrong: nobody has linked that backend, with what is.
absl::Status CheckBackend(absl::string_view name);

// Runs the ranks of this process. Every process of the job comes to the same verdict; `is_reporter` says which one
// tells the user, also of an error. Errors: of the world, of paths (before any step), of the ranks: a cause before its
// echoes on others.
absl::StatusOr<testutil::ParityResult> RunParityJob(const ParityJob& job, bool* is_reporter);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_PARITY_JOB_H_
