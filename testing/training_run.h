// One rank of one training configuration, over any backend: groups, parameters in zero3, the model, and what it costs.
//
//   EK_ASSIGN_OR_RETURN(auto run, TrainingRun::Create(config, &corpus, &backend));
//   for (int64_t step = 0; step < steps; ++step) {
//     EK_ASSIGN_OR_RETURN(StepReport report, run->Step(step, tap));
//   }
#ifndef EVENKEEL_TESTING_TRAINING_RUN_H_
#define EVENKEEL_TESTING_TRAINING_RUN_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/language_model.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::testutil {

// What one step found and cost on this rank.
struct StepReport {
  double loss = 0;                // mean over the step's batches, the same bits on all ranks
  std::vector<ModelPass> passes;  // of this rank
  zero3::StepResult update;
  // Payload counted on the order's axes, without what the taps caused.
  int64_t ep_bytes = 0;
  int64_t ep_inter_node_bytes = 0;  // of them, between nodes
  int64_t tp_bytes = 0;
  // The fewest bytes that any order sends for this routing, forward and backward; counted on lane 0 only, for its whole
  // TP group (moe/exchange_bound.h).
  struct Bounds {
    int64_t ep = 0;
    int64_t ep_inter_node = 0;   // of them, between nodes
    int64_t tp = 0;              // whatever goes over EP
    int64_t tp_at_least_ep = 0;  // where EP carries no more than its bound
  };
  Bounds bounds;
  int64_t collectives = 0;  // on all axes, of groups with more than one rank
  absl::Duration time;      // of the pass and the update, without the taps
};

// Not thread-safe. All ranks of the backend's world make the same calls in the same order.
class TrainingRun {
 public:
  // `corpus` and `backend` outlive the run. Collective over the world. InvalidArgument as ValidateTrainingConfig and
  // when the world is not tp * dp.
  static absl::StatusOr<std::unique_ptr<TrainingRun>> Create(const TrainingConfig& config, const Corpus* corpus,
                                                             comm::Backend* backend);
  ~TrainingRun();

  // All passes and one update. With a tap each parameter is shown as fetched (so: as the step before left it) and each
  // gradient as averaged; all ranks tap or none does.
  absl::StatusOr<StepReport> Step(int64_t step, const TapFunction& tap);

  // Shows every parameter as it stands, this rank's slice gathered, as kParameter. Collective.
  absl::Status ReadParameters(const TapFunction& tap);

  const TrainingConfig& config() const { return config_; }
  const comm::Mesh& mesh() const { return mesh_; }
  int rank() const { return backend_.rank(); }
  int replica() const;  // data-parallel coordinate
  int lane() const;
  const zero3::PartitionedModel& parameters() const { return *parameters_; }
  // To save and load between steps.
  zero3::PartitionedModel& mutable_parameters() { return *parameters_; }
  // Host operations per fetch and release of a leaf, the mean of the last step.
  double leaf_fetch_host_operations() const;

 private:
  TrainingRun(const TrainingConfig& config, const comm::Mesh& mesh, const Corpus* corpus, comm::Backend* backend);
  absl::Status CreateGroups();
  absl::Status CreateModel();
  absl::StatusOr<comm::Communicator*> NewGroup(comm::Axis of, comm::Axis booked_as, absl::string_view name);
  // Shows one tensor of every parameter, gathered over the ranks that share it.
  absl::Status ReadAll(zero3::TensorKind kind, TapKind shown_as, const TapFunction& tap);
  absl::Status CreateLevelGroups();
  absl::Status AddBounds(const ModelPass& pass, StepReport::Bounds* bounds) const;
  // Pass `pass` of this replica.
  absl::Status RunPass(int64_t step, int64_t pass, const TapFunction& tap, StepReport* report);
  // Mean over all batches, in the canonical order: over replicas, then over passes.
  absl::StatusOr<double> MeanLoss(const std::vector<ModelPass>& passes);

  const TrainingConfig config_;
  const comm::Mesh mesh_;
  const Corpus& corpus_;
  comm::Backend& backend_;
  std::vector<std::unique_ptr<comm::Communicator>> groups_;
  comm::Communicator* loss_dp_ = nullptr;
  zero3::ModelGroups model_groups_;
  LanguageModelGroups language_groups_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Stream> comm_stream_;  // null where stream_ serves both
  std::unique_ptr<zero3::PartitionedModel> parameters_;
  std::unique_ptr<LanguageModel> model_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_TRAINING_RUN_H_
