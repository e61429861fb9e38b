// What a partitioned model is asked for and what a step answers: plain values.
//
//   PartitionedModelOptions options;
//   options.policy = "flat";
//   options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
//   options.max_gradient_norm = 1.0;
#ifndef EVENKEEL_ZERO3_MODEL_TYPES_H_
#define EVENKEEL_ZERO3_MODEL_TYPES_H_

#include <cstdint>
#include <limits>
#include <string>

#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/zero3/loss_scale.h"

namespace evenkeel::zero3 {

struct OptimizerOptions {
  enum class Kind : uint8_t { kSgd, kAdamW };
  Kind kind = Kind::kSgd;
  double learning_rate = 0.1;
  double momentum = 0;  // SGD; 0 keeps no state
  double beta1 = 0.9;   // AdamW
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0;  // applies to parameters with ParameterSpec::weight_decay
};

struct PartitionedModelOptions {
  // A registered fetch policy: "flat", "coalesced", "per_parameter", or "replicated" (no sharding, same bits).
  std::string policy = "flat";
  OptimizerOptions optimizer;
  double max_gradient_norm = 0;  // clip to this global norm; 0: no clipping
  uint64_t seed = 1;             // of the initial values

  // Parameters with at most this many elements stay gathered between uses (0: none) ...
  int64_t persistent_elements = 0;
  // ... as long as all of them together take at most this many bytes; earlier parameters first.
  int64_t max_persistent_bytes = std::numeric_limits<int64_t>::max();
  // Leaves that follow in the recorded order are gathered early while they fit in this many bytes (0: no prefetch).
  int64_t prefetch_bytes = 0;
  // A released leaf stays gathered when it is needed again before this many bytes of other leaves (-1: never).
  int64_t reuse_distance_bytes = -1;
  // Limit of gathered bytes at any time. A leaf that cannot fit is an error of Create, naming it.
  int64_t max_live_bytes = std::numeric_limits<int64_t>::max();
  // Flushes of every leaf in a step. Above 1 (a power of two): the step's sums are added by the canonical tree instead
  // of one after the other, the average divides by DP * micro_batches, and Step refuses another number of flushes.
  // Where W is a power of two too, gradients then depend only on W * micro_batches, the micro-batches of all replicas:
  // the same bits at (W, micro_batches) = (8, 1), (4, 2), (2, 4), (1, 8), with the batches numbered micro-batch * W +
  // replica. Costs log2(micro_batches) gradient shards of memory (ModelCounts::pending_gradient_bytes).
  int micro_batches = 1;
  // Full gradients that one collective reduces: larger units are cut, smaller ones of a group share a bucket (0: every
  // unit by itself, at once). Changes no bit.
  int64_t reduce_bucket_bytes = 0;
  // For models with trainable f16 parameters; without such, the scale is 1. See PartitionedModel::loss_scale.
  LossScaleOptions loss_scale;
  // Step() fails after this many steps in a row were skipped because of non-finite gradients.
  int max_skipped_in_a_row = 10;
  // Keep a digest of every weight shard after the step and verify it before the shard's next gather and before the next
  // step: DataLoss instead of that step, on all ranks, when it changed.
  bool verify_shards = false;
  // Every so many steps, compare digests of gathered leaves, replicated weights and TP-replicated shards between ranks:
  // DataLoss instead of a step when they differ (0: never).
  int replica_check_interval = 0;
  // Where f32 masters and optimizer states live, and, with offload_weights, the weight shards: memory beside the
  // device's, such as a MappedFileDevice. Outlives the model. Null: the device itself. Changes no bit.
  Device* offload_device = nullptr;
  bool offload_weights = false;
  // Fill released memory of the plan with NaN, so that a use after release shows. Costs one fill per release.
  bool poison_released = false;
};

// The groups of this rank. All outlive the model. dp and edp are used on the comm stream, tp and ep on the compute
// stream and only inside Step. Null: a group of one.
struct ModelGroups {
  comm::Communicator* dp = nullptr;
  comm::Communicator* edp = nullptr;
  comm::Communicator* ep = nullptr;
  comm::Communicator* tp = nullptr;
  // Whether experts are sliced over the TP lanes (etp == tp). False: the ep group spans the lanes (etp == 1).
  bool experts_over_tp = true;
};

struct StepResult {
  bool stepped = false;  // false: some rank saw a non-finite gradient, nobody stepped
  // Global, before clipping and without the loss scale; the same bits on all ranks and layouts; NaN when not stepped.
  double gradient_norm = 0;
  double clip_scale = 1;  // what gradients were multiplied by, beside 1 / loss_scale
  double loss_scale = 1;  // what this step's gradients had been multiplied by
  int64_t step = 0;       // optimizer steps taken so far
  int64_t skipped_total = 0;
  int skipped_in_a_row = 0;
};

// What a resumed run continues from, beside tensors.
struct StepProgress {
  int64_t step = 0;
  int64_t skipped_total = 0;
  int skipped_in_a_row = 0;
  double loss_scale = 1;
  int good_steps = 0;  // since the loss scale changed
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_MODEL_TYPES_H_
