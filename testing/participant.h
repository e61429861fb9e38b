// One entry of the parity job on one rank: its run, its judges, and what it has to tell. Internal to the job.
#ifndef EVENKEEL_TESTING_PARTICIPANT_H_
#define EVENKEEL_TESTING_PARTICIPANT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/dense_judge.h"
#include "evenkeel/testing/finding.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/testing/training_run.h"

namespace evenkeel::testutil {

// The configuration that an entry of the job runs with, its last changes included.
TrainingConfig ConfigOf(const ParityConfig& config, const ParityEntry& entry);

// What ranks tell one another at the end: plain bytes, equal layout on all ranks of a job.
struct Summary {
  int64_t has_first = 0, step = 0, place = 0, rank = 0, index = 0;
  double reference = 0, candidate = 0, ulps = 0, bound = 0;
  char tensor[160] = {};
  double max_abs_diff = 0, bound_used = 0;
  int64_t values_compared = 0, routing_differences = 0;
  OrderBytes bytes;
  int64_t collectives = 0, dropped = 0, peak = 0, peak_predicted = 0;
  char worst[96] = {};  // the tensor that uses most of its bound
  double host_operations = 0, seconds = 0;
  int64_t skipped_steps = 0;  // for overflow, where there is a loss scale
  double loss_scale = 1;
  uint64_t parameter_digest = 0;
};

// Adds counted, predicted and bound.
void Add(const OrderBytes& bytes, OrderBytes* sum);

// One entry on one rank. Not thread-safe; every rank of the world makes the same calls in the same order.
class Participant {
 public:
  Participant(const ParityConfig& config, size_t index);

  absl::Status Start(const Corpus& corpus, comm::Backend& backend, comm::Communicator& world);

  // Steps; `record` takes what is shown when this is the reference, else it is what to compare with. Null: neither.
  absl::Status Step(int64_t step, bool is_reference, StepRecord* record);

  // The parameters behind the last step.
  absl::Status Finish(int64_t steps, bool is_reference, StepRecord* record);

  // This rank's side of the result.
  Summary Summarize();

  // What this rank has found so far.
  std::optional<FirstDifference> first_difference() const;

  const ParityEntry& entry() const { return entry_; }
  const TrainingConfig& config() const { return declared_; }
  bool by_dense() const { return by_dense_; }
  const DenseJudge* dense() const { return dense_.get(); }
  std::vector<double>& losses() { return losses_; }

 private:
  void StartLooking(int64_t step, bool is_reference, StepRecord* record);

  void StopLooking();

  void See(const Tap& tap);

  void NoteSkip(int64_t step, const StepReport& report);

  void Count(const StepReport& report);

  static void Merge(const Finding& other, Finding* finding);

  void PutFirst(const Finding& finding);

  // Cut to fit, with a zero behind it.
  static void PutText(const std::string& text, char* to, size_t size);

  const ParityEntry entry_;
  const TrainingConfig declared_;  // what judges go by
  const TrainingConfig own_;
  const std::function<void(int rank, int64_t step, const Tap& tap)> observe_;
  const std::function<void(int64_t step)> end_step_;
  const bool by_dense_;
  int64_t step_ = 0;
  std::unique_ptr<TrainingRun> run_;
  std::unique_ptr<DenseJudge> dense_;
  std::unique_ptr<BitwiseJudge> bits_;
  StepRecord* write_ = nullptr;
  bool compare_ = false;
  std::optional<FirstDifference> skipped_;
  std::vector<double> losses_;
  Summary summary_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_PARTICIPANT_H_
