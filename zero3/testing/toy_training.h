// A training run without arithmetic worth the name, for tests of sharding: every parameter of a small
// mixture-of-experts model is fetched, read, given position-unique gradients and stepped, on every rank of a layout.
//
// Gradients are a pure function of (step, micro-batch, data replica, TP lane's share, parameter, global index) plus a
// part that depends on the fetched weight, so that a stale, poisoned or mixed-up weight shows. In integer mode they are
// small integers whose sums are exact, so that layouts can be compared bit by bit.
//
//   ToyConfig config;
//   config.mesh = {.tp = 1, .ep = 2, .dp = 4, .etp = 1};
//   ASSERT_OK_AND_ASSIGN(ToyRun run, RunToy(config));
//   run.ranks[0].steps[2].weights_digest;
#ifndef EVENKEEL_ZERO3_TESTING_TOY_TRAINING_H_
#define EVENKEEL_ZERO3_TESTING_TOY_TRAINING_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/device/work_counters.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::zero3 {

struct ToyConfig {
  comm::MeshShape mesh;
  PartitionedModelOptions options;
  int layers = 3;
  int experts = 4;
  int64_t hidden = 7;
  int64_t ffn = 12;               // divisible by tp
  DType dtype = DType::kF32;      // of matrices; norms stay f32
  bool separate_experts = false;  // one parameter per expert instead of one stacked
  int steps = 4;
  int micro_batches = 1;
  // Gradients are keyed by micro-batch * W + replica instead of by both: the same batches whatever W is.
  bool number_batches_globally = false;
  bool integer_gradients = false;
  bool recompute = false;     // the backward of a layer fetches it once more before
  bool tied_head = true;      // the head uses the embedding
  bool eval_between = false;  // an evaluation pass after every step, with a trace of its own
  HostDevice::Options device;
  std::string offload_folder;  // where masters and states live in a file; empty: on the device
  LeafOptions leaves;          // default: type MoeBlock
  // Whether `expert` (global id) gets gradients from data replica `replica` in `step`. Default: always.
  std::function<bool(int step, int replica, int expert)> expert_used;
  // Called on each rank before its Step; may spoil things.
  std::function<absl::Status(int step, int rank, PartitionedModel& model)> before_step;
  // Name of the recorded order that a step belongs to. Default: one for all.
  std::function<std::string(int step)> trace;
  // Order of leaves in the forward pass of a step. Default: as selected.
  std::function<std::vector<int>(int step, int num_leaves)> order;
};

struct ToyStep {
  StepResult result;
  TraceState trace_state = TraceState::kRecording;  // before the step's first fetch
  uint64_t activation = 0;                          // digest of what the forward passes read
  uint64_t gradients_digest = 0;                    // of all averaged gradients, before Step
  uint64_t weights_digest = 0;                      // of all weights, after Step
};

struct ToyRank {
  std::vector<ParameterSpec> specs;
  std::vector<ToyStep> steps;
  std::vector<std::vector<double>> gradients;  // of the last step, averaged, without the loss scale, by parameter
  std::vector<std::vector<double>> weights;    // after the last step, by parameter
  ModelCounts counts;
  TraceState trace_state = TraceState::kRecording;
  WorkCounts work;  // of the whole run
  comm::LedgerCounts traffic;
  int64_t state_bytes = 0;  // live bytes of the device right after Create
  std::string table;
  std::string plan;
};

struct ToyRun {
  std::vector<ToyRank> ranks;
  // Weights or gradients of the whole model, put together from the ranks' slices; Internal when two ranks differ.
  absl::StatusOr<std::map<std::string, std::vector<double>>> Global(bool gradients) const;
};

// The model of one rank.
ModelDescription ToyDescription(const ToyConfig& config, const comm::Mesh& mesh, int rank);

// What data replica `replica` and lane share `lane` add to element `global_index` of parameter `spec`, without the part
// that depends on the weight.
double ToyGradientShare(const ToyConfig& config, const std::string& name, int step, int micro_batch, int replica,
                        int lane, int64_t global_index);

// Runs all ranks as threads; the first error of any rank.
absl::StatusOr<ToyRun> RunToy(const ToyConfig& config);
// The same, with every rank's own status.
std::vector<absl::Status> RunToyStatuses(const ToyConfig& config, ToyRun* run,
                                         absl::Duration deadline = absl::Seconds(30));

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_TESTING_TOY_TRAINING_H_
