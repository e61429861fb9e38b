// One training configuration as a value: the model, the layout of ranks, the order, the fetch policy, the optimizer.
//
//   TrainingConfig config;                               // the default model on one rank
//   config.mesh = {.tp = 2, .ep = 4, .dp = 8, .etp = 2};
//   EK_ASSIGN_OR_RETURN(config.order, moe::FindOrder("fused"));
//   EK_RETURN_IF_ERROR(ValidateTrainingConfig(config));
#ifndef EVENKEEL_TESTING_TRAINING_CONFIG_H_
#define EVENKEEL_TESTING_TRAINING_CONFIG_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/dense_branch.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/testing/reference_parameters.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::testutil {

// Sizes of the byte-level language model. Small enough that 16 ranks share two processors, large enough that its loss
// falls on real text.
struct LanguageModelConfig {
  int64_t vocabulary = 256;
  int64_t sequence = 32;  // tokens per sequence
  int64_t sequences = 1;  // per data-parallel replica and step
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t layers = 2;
  int64_t ffn = 128;  // of one expert
  int experts = 8;
  int top_k = 2;
  moe::Rational capacity_factor = *moe::Rational::Create(5, 4);  // 0: nothing is dropped
  int64_t min_capacity = 4;
  moe::DropPolicy drop = moe::DropPolicy::kByTopK;
  moe::ScoreFunction score = moe::ScoreFunction::kSoftmax;
  double route_scale = 1;
  int groups = 1;  // group-limited selection, as moe::RouterConfig
  int groups_kept = 1;
  moe::GroupScore group_score = moe::GroupScore::kMax;
  moe::ExpertActivation activation = moe::ExpertActivation::kGelu;
  bool expert_bias = false;
  // A dense MLP that every token passes beside its experts (moe/dense_branch.h): shared experts, each as wide as a
  // routed one, perhaps behind a sigmoid gate; or one MLP in a learnt mixture with the experts, residual MoE.
  int shared_experts = 0;
  bool shared_gate = false;
  bool residual_moe = false;
  float balance_coefficient = 0.01f;
  float z_coefficient = 0;
  double norm_epsilon = 1e-5;
  DType dtype = DType::kF32;  // f32, f64, or bf16 and f16 (f32 masters, router and accumulation)
  bool recompute = false;     // drop activations inside blocks and compute them again in the backward
  // kCanonical: losses, gradients and parameters have the same bits in every layout; see ValidateTrainingConfig for
  // which.
  moe::ExpertNumerics numerics = moe::ExpertNumerics::kFast;

  bool canonical() const { return numerics == moe::ExpertNumerics::kCanonical; }
  // Of partial sums, weight gradients and the router.
  DType wide_dtype() const { return WideDType(dtype); }
  int64_t tokens() const { return sequence * sequences; }
  bool has_branch() const { return shared_experts > 0 || residual_moe; }
  // What moe::DenseBranch is made with; only with has_branch().
  moe::DenseBranchConfig branch() const;
};

// A rate at which the loss of the default model visibly falls within 50 steps.
double DefaultLearningRate(zero3::OptimizerOptions::Kind optimizer);

// A value.
struct TrainingConfig {
  TrainingConfig() { zero3.optimizer.learning_rate = DefaultLearningRate(zero3.optimizer.kind); }

  LanguageModelConfig model;
  comm::MeshShape mesh;  // etp is set from the order by MeshForOrder
  moe::Order order;
  zero3::PartitionedModelOptions zero3;  // policy, optimizer, clipping
  uint64_t seed = 1;
  // Batches of a step over all replicas, each of model.sequences sequences, routed and capped on its own: the replicas
  // take them in turn (pass p of replica r computes batch p * dp + r) and the update follows their mean. 0: one for
  // each replica. The global batch and its batches do not depend on the layout.
  int64_t batches = 0;

  int64_t num_batches() const { return batches > 0 ? batches : mesh.dp; }
  // Forward and backward passes of each replica in a step.
  int64_t passes() const { return num_batches() / mesh.dp; }

  // Compute and communication on worker threads of their own instead of inside the calls; the same bits.
  bool worker_streams = false;
  // With worker streams: how long a stream sleeps before its n-th operation. For race tests.
  std::function<absl::Duration(absl::string_view stream, int64_t n)> delay;
};

// InvalidArgument, one line with the numbers: tp that divides neither heads nor ffn, ep that does not divide dp (or the
// world, for whole experts), experts that ep does not divide, top_k above experts, sizes below 1 or above 2^20, more
// than 4e9 parameters, a bad optimizer, coefficients that are negative or not finite, a gate without shared experts,
// residual MoE beside them, batches that are not dp times a power of two up to 2^16. Canonical
// numerics also want batches, dp, ep, heads and experts to be powers of two, tp to divide moe::kCanonicalBlocks and
// those ffn.
absl::Status ValidateTrainingConfig(const TrainingConfig& config);

// `mesh` with the expert TP that `order` asks for: whole experts have etp 1, sliced ones etp = tp; an order that takes
// both keeps what `mesh` says.
comm::MeshShape MeshForOrder(const comm::MeshShape& mesh, const moe::Order& order);

// "tp 2 ep 4 dp 8 etp 2".
std::string MeshText(const comm::MeshShape& mesh);

// The order called `name_or_path`: a registered one, or the textproto in that file. NotFound naming both when it is
// neither, InvalidArgument with file and line when the file does not parse, as ReadUserFile when it cannot be read.
absl::StatusOr<moe::Order> LoadOrder(absl::string_view name_or_path);

// The same model for the double reference. The capacity is shared by the replicas of one EP group of `mesh`.
ReferenceConfig ReferenceConfigOf(const LanguageModelConfig& model, const comm::MeshShape& mesh);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_TRAINING_CONFIG_H_
