// Judges a run of any layout by the double reference, step by step and inside a derived bound.
//
// Each step starts from the run's own parameters, gathered from all ranks, so errors do not add up over steps and a
// wrong step cannot hide behind a long drift. On rank 0 the reference then computes the step in double with the run's
// routes, and compares loss, activations and their gradients at the block boundaries, every averaged parameter
// gradient, the global norm, and with plain SGD every parameter behind the step. A comparison allows what
// reference_math.h derives.
//
// Routing is judged apart, because choosing experts is a step function: a route that the reference would choose
// otherwise is a difference unless the scores are closer than their own bounds; then it is counted. Which routes are
// dropped is recomputed from the run's choices.
//
// Replicas are judged too: every rank sends digests of its slices, and ranks that must hold equal values are compared.
//
//   EK_ASSIGN_OR_RETURN(auto judge, DenseJudge::Create(config, &backend, world));
//   EK_ASSIGN_OR_RETURN(StepReport report, run->Step(step, [&](const Tap& tap) { judge->See(tap); }));
//   EK_RETURN_IF_ERROR(judge->Judge(step, report));
//   ...
//   run->ReadParameters([&](const Tap& tap) { judge->See(tap); });
//   EK_RETURN_IF_ERROR(judge->Finish());
#ifndef EVENKEEL_TESTING_DENSE_JUDGE_H_
#define EVENKEEL_TESTING_DENSE_JUDGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/language_model.h"
#include "evenkeel/testing/reference_model.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/testing/training_run.h"

namespace evenkeel::testutil {

// Not thread-safe. All ranks of the world make the same calls in the same order.
class DenseJudge {
 public:
  // `world` holds all ranks, in order, and outlives the judge, as does `corpus`. `config` is the run's.
  static absl::StatusOr<std::unique_ptr<DenseJudge>> Create(const TrainingConfig& config, const Corpus* corpus,
                                                            comm::Communicator* world);
  virtual ~DenseJudge() = default;

  // What this rank's run shows during a step.
  virtual void See(const Tap& tap) = 0;
  // Behind a step, on all ranks. Collective.
  virtual absl::Status Judge(int64_t step, const StepReport& report) = 0;
  // Behind the last step and after every parameter was shown once more. Collective.
  virtual absl::Status Finish() = 0;

  // What was found; complete on rank 0, empty elsewhere.
  virtual const Finding& finding() const = 0;
  // The double reference's loss of each step, on rank 0.
  virtual const std::vector<double>& losses() const = 0;
  // Every parameter in full as the last Judge saw it, on rank 0.
  virtual const ReferenceTensors& parameters() const = 0;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_DENSE_JUDGE_H_
