// A naive language model in double on one process: what every distributed run is judged by.
//
// It shares no code with what it checks: no runtime/ops, no moe, no zero3, no communication; plain loops written for
// reading. Bytes in, next bytes out: token and position embedding, per layer causal attention and a mixture of
// experts, both behind RMSNorm and beside a residual stream, a last RMSNorm, an output projection, cross entropy. The
// backward is written by hand and tested by finite differences.
//
//   EK_ASSIGN_OR_RETURN(ReferenceModel model, ReferenceModel::Create(config));
//   EK_ASSIGN_OR_RETURN(ReferenceStep step, model.Run(parameters, batches, {}));
//   ReferenceSgd(0.1, step.gradients, &parameters);
//
// Beside every value stands a derived bound of what a low-precision run may differ by: see reference_math.h for the
// derivation and Bound() for reading it.
#ifndef EVENKEEL_TESTING_REFERENCE_MODEL_H_
#define EVENKEEL_TESTING_REFERENCE_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_parameters.h"
#include "evenkeel/testing/reference_routing.h"

namespace evenkeel::testutil {

// One data-parallel replica's batch: whole sequences back to back.
struct ReferenceBatch {
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

// What one replica computed. Boundary 0 is behind the embedding, 1 + 2 L behind layer L's attention, 2 + 2 L behind
// its experts. Gradients of activations are those of this replica's own loss.
struct ReferenceReplica {
  double loss = 0;  // cross entropy plus the auxiliary losses with their coefficients
  double cross_entropy = 0;
  double loss_variance = 0;
  std::vector<reference::Matrix> activations;
  std::vector<reference::Matrix> activation_gradients;
  std::vector<ReferenceRouting> routing;  // per layer
};

struct ReferenceStep {
  double loss = 0;  // mean over replicas
  double loss_variance = 0;
  std::vector<ReferenceReplica> replicas;
  ReferenceTensors gradients;  // sum over replicas / number of replicas
  double backward_reach = 0;   // the largest magnitude that the judged run's backward may write, unscaled
};

struct ReferenceRunOptions {
  reference::Rounding dense = {};   // roundings of the run that is judged
  reference::Rounding router = {};  // those of its router
  double loss_scale = 1;            // gradients of the judged run are written times this
  int64_t partials = 1;             // lanes over which the judged run splits heads and expert columns
  // Routes to use instead of the model's own, by replica and layer; empty: its own.
  std::vector<std::vector<ReferenceRoutes>> replay = {};
};

// Immutable, thread-safe.
class ReferenceModel {
 public:
  // InvalidArgument with the numbers when the sizes do not fit.
  static absl::StatusOr<ReferenceModel> Create(const ReferenceConfig& config);

  const ReferenceConfig& config() const { return config_; }
  // Zeros of every parameter's shape.
  ReferenceTensors ZeroTensors() const { return ZeroReferenceTensors(config_); }
  // Names of the boundaries: "embedding", "layer.0.attention", "layer.0.moe", ...
  std::vector<std::string> BoundaryNames() const { return ReferenceBoundaryNames(config_); }

  // One step of all replicas. InvalidArgument when a parameter is missing or of another shape, or a batch is not whole
  // sequences of known bytes.
  absl::StatusOr<ReferenceStep> Run(const ReferenceTensors& parameters, const std::vector<ReferenceBatch>& batches,
                                    const ReferenceRunOptions& options) const;

 private:
  explicit ReferenceModel(const ReferenceConfig& config) : config_(config) {}
  ReferenceConfig config_;
};

// What a value of a run with unit roundoff `unit` may differ from `a` at flat index i.
double Bound(const reference::Matrix& a, int64_t i, double unit);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_MODEL_H_
