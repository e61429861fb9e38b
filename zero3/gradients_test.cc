// Gradients, norms and steps over layouts: one division, one global norm, all ranks step or none does.
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;
using Values = std::map<std::string, std::vector<double>>;

ToyConfig IntegerConfig(comm::MeshShape mesh) {
  ToyConfig config;
  config.mesh = mesh;
  config.integer_gradients = true;
  config.options.max_gradient_norm = 3.0;
  config.steps = 3;
  return config;
}

// The sum of all shares over the data replicas, divided by their number once; integers, so exact.
Values ExpectedGradients(const ToyConfig& config, int step) {
  ToyConfig single = config;
  single.mesh = {.tp = 1, .ep = 1, .dp = 1, .etp = 1};
  const comm::Mesh mesh = *comm::Mesh::Create(single.mesh);
  Values values;
  for (const ParameterSpec& spec : ToyDescription(single, mesh, 0).parameters) {
    std::vector<double>& of = values[spec.name];
    of.assign(static_cast<size_t>(spec.num_elements()), 0.0);
    if (!spec.trainable) continue;
    const double uses = config.tied_head && spec.name == "embed.weight" ? 2 : 1;
    const int64_t per_expert = spec.num_elements() / config.experts;
    for (int64_t i = 0; i < spec.num_elements(); ++i) {
      double sum = 0;
      for (int r = 0; r < config.mesh.dp; ++r) {
        if (spec.family == Family::kExpert && config.expert_used &&
            !config.expert_used(step, r, static_cast<int>(i / per_expert))) {
          continue;
        }
        for (int t = 0; t < config.mesh.tp; ++t) sum += uses * ToyGradientShare(config, spec.name, step, 0, r, t, i);
      }
      of[static_cast<size_t>(i)] = sum / config.mesh.dp;
    }
  }
  return values;
}

double NormOf(const Values& values) {
  long double squares = 0;
  for (const auto& [name, elements] : values) {
    for (double v : elements) squares += static_cast<long double>(v) * v;
  }
  return static_cast<double>(std::sqrt(squares));
}

const comm::MeshShape kLayouts[] = {
    {.tp = 1, .ep = 1, .dp = 4, .etp = 1}, {.tp = 1, .ep = 2, .dp = 4, .etp = 1}, {.tp = 1, .ep = 4, .dp = 4, .etp = 1},
    {.tp = 2, .ep = 1, .dp = 4, .etp = 2}, {.tp = 2, .ep = 2, .dp = 4, .etp = 2}, {.tp = 2, .ep = 4, .dp = 4, .etp = 2},
    {.tp = 2, .ep = 1, .dp = 4, .etp = 1}, {.tp = 2, .ep = 2, .dp = 4, .etp = 1}, {.tp = 2, .ep = 4, .dp = 4, .etp = 1},
};

std::vector<std::pair<comm::MeshShape, DType>> LayoutsAndDTypes() {
  std::vector<std::pair<comm::MeshShape, DType>> all;
  for (const comm::MeshShape& mesh : kLayouts) {
    for (DType dtype : {DType::kF32, DType::kBF16}) all.push_back({mesh, dtype});
  }
  return all;
}

// The gradient is the average over data replicas, once, whatever E, expert TP or bucket.
TEST(GradientsTest, Trail33_34_35_36_ExpertGradientsDoNotDependOnTheLayout) {
  for (const auto& [mesh, dtype] : LayoutsAndDTypes()) {
    ToyConfig config = IntegerConfig(mesh);
    config.dtype = dtype;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ASSERT_OK_AND_ASSIGN(const Values actual, run.Global(/*gradients=*/true));
    const Values expected = ExpectedGradients(config, config.steps - 1);
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [name, values] : expected) {
      ASSERT_EQ(actual.at(name), values) << name << " tp " << mesh.tp << " ep " << mesh.ep << " etp " << mesh.etp;
    }
  }
}

// Dense, experts over EP, TP-sharded on all lanes, TP-replicated once: the norm of the whole gradient, the same bits
// on every rank and in every layout.
TEST(GradientsTest, Trail35_37_38_40_41_42_43_OneGlobalNorm) {
  std::map<int, double> first_by_tp;
  for (const auto& [mesh, dtype] : LayoutsAndDTypes()) {
    ToyConfig config = IntegerConfig(mesh);
    config.dtype = dtype;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    for (int step = 0; step < config.steps; ++step) {
      const double expected = NormOf(ExpectedGradients(config, step));
      for (const ToyRank& rank : run.ranks) {
        const StepResult& result = rank.steps[static_cast<size_t>(step)].result;
        ASSERT_EQ(result.gradient_norm, expected) << "tp " << mesh.tp << " ep " << mesh.ep << " etp " << mesh.etp;
        ASSERT_EQ(result.clip_scale, 3.0 / expected);
      }
    }
    const double norm = run.ranks[0].steps[0].result.gradient_norm;
    ASSERT_EQ(first_by_tp.emplace(mesh.tp, norm).first->second, norm);
  }
}

// The whole model after three clipped steps, in every layout with the same number of TP shares.
TEST(GradientsTest, WeightsDoNotDependOnTheLayout) {
  std::map<int, Values> first_by_tp;
  for (const comm::MeshShape& mesh : kLayouts) {
    ToyConfig config = IntegerConfig(mesh);
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ASSERT_OK_AND_ASSIGN(const Values weights, run.Global(/*gradients=*/false));
    const Values& first = first_by_tp.emplace(mesh.tp, weights).first->second;
    for (const auto& [name, values] : first) {
      ASSERT_EQ(weights.at(name), values) << name << " tp " << mesh.tp << " ep " << mesh.ep << " etp " << mesh.etp;
    }
  }
}

// All 2^4 use patterns of one step: unused experts have exactly zero gradients, all ranks make the same collectives.
TEST(GradientsTest, C32_Trail54_55_69_UnusedExpertsKeepEveryRankInStep) {
  for (const comm::MeshShape mesh : {comm::MeshShape{1, 1, 2, 1}, comm::MeshShape{1, 2, 4, 1}}) {
    for (int pattern = 0; pattern < 16; ++pattern) {
      ToyConfig config = IntegerConfig(mesh);
      config.layers = 1;
      config.steps = 2;
      config.separate_experts = mesh.ep == 1;
      config.expert_used = [pattern, &mesh](int step, int replica, int expert) {
        // Each replica uses its own experts; with `pattern` 0 nobody uses any.
        return ((pattern >> ((expert + replica) % 4)) & 1) != 0 && (step > 0 || replica < mesh.dp / 2);
      };
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      ASSERT_OK_AND_ASSIGN(const Values actual, run.Global(/*gradients=*/true));
      if (!config.separate_experts) {
        const Values expected = ExpectedGradients(config, 1);
        for (const auto& [name, values] : expected) ASSERT_EQ(actual.at(name), values) << name << " " << pattern;
      }
      for (const ToyRank& rank : run.ranks) {
        EXPECT_EQ(rank.traffic.collectives, run.ranks[0].traffic.collectives);
        EXPECT_EQ(rank.counts.flushes, run.ranks[0].counts.flushes);
        EXPECT_EQ(rank.counts.gathers, run.ranks[0].counts.gathers);
      }
    }
  }
}

TEST(GradientsTest, Trail80_BucketSizeChangesNoBit) {
  for (const char* policy : {"flat", "coalesced", "replicated"}) {
    ToyConfig config;
    config.mesh = {.tp = 1, .ep = 2, .dp = 4, .etp = 1};
    config.options.policy = policy;
    ASSERT_OK_AND_ASSIGN(const ToyRun whole, RunToy(config));
    for (int64_t bucket : {1, 40, 1000, 1 << 20}) {
      config.options.reduce_bucket_bytes = bucket;
      ASSERT_OK_AND_ASSIGN(const ToyRun cut, RunToy(config));
      for (size_t r = 0; r < whole.ranks.size(); ++r) {
        for (size_t s = 0; s < whole.ranks[r].steps.size(); ++s) {
          ASSERT_EQ(cut.ranks[r].steps[s].gradients_digest, whole.ranks[r].steps[s].gradients_digest) << policy;
          ASSERT_EQ(cut.ranks[r].steps[s].weights_digest, whole.ranks[r].steps[s].weights_digest) << policy;
        }
      }
      if (bucket == 40) {
        EXPECT_GT(cut.ranks[0].counts.flushes, whole.ranks[0].counts.flushes);
      }
    }
  }
}

// A leaf that is left out of the second step must not see its old gradient again.
TEST(GradientsTest, Trail94_UnusedParameterHasZeroGradient) {
  ToyConfig config = IntegerConfig({.tp = 1, .ep = 1, .dp = 2, .etp = 1});
  config.options.max_gradient_norm = 0;
  config.steps = 2;
  config.tied_head = false;
  config.order = [](int step, int num_leaves) {
    std::vector<int> order;
    for (int l = 0; l < num_leaves; ++l) {
      if (step == 0 || l != 1) order.push_back(l);  // leaf 1 is the first layer's own parameters
    }
    return order;
  };
  ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
  ToyConfig one_step = config;
  one_step.steps = 1;
  ASSERT_OK_AND_ASSIGN(const ToyRun before, RunToy(one_step));
  ASSERT_OK_AND_ASSIGN(const Values gradients, run.Global(true));
  ASSERT_OK_AND_ASSIGN(const Values weights, run.Global(false));
  ASSERT_OK_AND_ASSIGN(const Values old_weights, before.Global(false));
  for (double g : gradients.at("layers.0.norm")) EXPECT_EQ(g, 0.0);
  EXPECT_EQ(weights.at("layers.0.norm"), old_weights.at("layers.0.norm"));
  EXPECT_NE(weights.at("layers.1.norm"), old_weights.at("layers.1.norm"));
}

// One NaN on one rank in one parameter: nobody steps, all know, the state is as before, the next step is normal.
TEST(GradientsTest, Trail92_NonFiniteAnywhereMeansNobodySteps) {
  for (const char* policy : {"flat", "per_parameter", "replicated"}) {
    for (int odd = 0; odd < 8; odd += 3) {
      ToyConfig config = IntegerConfig({.tp = 2, .ep = 2, .dp = 4, .etp = 2});
      config.options.policy = policy;
      config.steps = 3;
      config.before_step = [odd](int step, int rank, PartitionedModel& model) -> absl::Status {
        if (step != 1 || rank != odd) return absl::OkStatus();
        EK_ASSIGN_OR_RETURN(const auto gradients, model.Gradients({2}));
        gradients[0].data<float>()[1] = std::numeric_limits<float>::infinity();
        return absl::OkStatus();
      };
      // Every rank opens the leaf, so that all flush it at the step.
      const auto spoil = config.before_step;
      config.before_step = [spoil](int step, int rank, PartitionedModel& model) -> absl::Status {
        if (step == 1) EK_RETURN_IF_ERROR(model.Gradients({2}).status());
        return spoil(step, rank, model);
      };
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      for (const ToyRank& rank : run.ranks) {
        ASSERT_TRUE(rank.steps[0].result.stepped);
        ASSERT_FALSE(rank.steps[1].result.stepped) << policy << " odd rank " << odd;
        ASSERT_TRUE(std::isnan(rank.steps[1].result.gradient_norm));
        ASSERT_EQ(rank.steps[1].result.skipped_total, 1);
        ASSERT_EQ(rank.steps[1].weights_digest, rank.steps[0].weights_digest);
        ASSERT_TRUE(rank.steps[2].result.stepped);
        ASSERT_EQ(rank.steps[2].result.step, 2);
        ASSERT_EQ(rank.steps[2].result.skipped_in_a_row, 0);
      }
    }
  }
}

TEST(GradientsTest, TooManySkippedStepsAreAnErrorOnAllRanks) {
  ToyConfig config = IntegerConfig({.tp = 1, .ep = 1, .dp = 3, .etp = 1});
  config.options.max_skipped_in_a_row = 2;
  config.before_step = [](int, int rank, PartitionedModel& model) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto gradients, model.Gradients({1}));
    if (rank == 2) gradients[0].data<float>()[0] = std::numeric_limits<float>::quiet_NaN();
    return absl::OkStatus();
  };
  ToyRun run;
  for (const absl::Status& status : RunToyStatuses(config, &run)) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, HasSubstr("2 steps in a row had non-finite gradients")));
  }
}

// bf16 weights with f32 norms in one leaf, f32 masters, f32 gradients.
TEST(GradientsTest, Trail77_MixedDTypesKeepTheirOwn) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = 3, .etp = 1};
  config.dtype = DType::kBF16;
  config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  config.options.optimizer.learning_rate = 1e-4;  // below bf16's resolution of most weights: masters must move
  config.steps = 6;
  std::vector<uint64_t> digests;
  for (const char* policy : {"replicated", "flat", "coalesced", "per_parameter"}) {
    config.options.policy = policy;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    digests.push_back(run.ranks[0].steps.back().weights_digest);
    EXPECT_EQ(digests.back(), digests.front()) << policy;
  }
  config.options.optimizer.learning_rate = 0;
  ASSERT_OK_AND_ASSIGN(const ToyRun still, RunToy(config));
  EXPECT_NE(still.ranks[0].steps.back().weights_digest, digests.front());
}

TEST(GradientsTest, DoublePrecisionModels) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = 3, .etp = 1};
  config.dtype = DType::kF64;
  config.options.optimizer.momentum = 0.5;
  config.options.policy = "replicated";
  ASSERT_OK_AND_ASSIGN(const ToyRun whole, RunToy(config));
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    config.options.policy = policy;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    EXPECT_EQ(run.ranks[1].steps.back().weights_digest, whole.ranks[1].steps.back().weights_digest) << policy;
  }
}

// Frozen parameters are fetched, never updated, and still part of what a checkpoint enumerates.
TEST(GradientsTest, Trail96_FrozenParametersAreKeptAndEnumerated) {
  ToyConfig config = IntegerConfig({.tp = 1, .ep = 2, .dp = 4, .etp = 1});
  config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  config.before_step = [](int, int, PartitionedModel& model) -> absl::Status {
    std::map<std::string, std::vector<std::string>> states;
    for (const StateTensor& tensor : model.StateTensors()) {
      const ParameterSpec& spec = model.parameters()[static_cast<size_t>(tensor.parameter)];
      states[spec.name].push_back(tensor.state);
      for (const StateTensor::Fragment& f : tensor.fragments) {
        if (f.begin < 0 || f.begin + f.data.num_elements() > spec.num_elements()) {
          return absl::InternalError(absl::StrCat(spec.name, ": padding in a fragment"));
        }
      }
    }
    if (states.size() != model.parameters().size()) return absl::InternalError("a parameter is missing");
    if (states["embed.scale"] != std::vector<std::string>{""}) return absl::InternalError("frozen state");
    if (states["embed.weight"] != std::vector<std::string>{"", "first_moment", "second_moment"}) {
      return absl::InternalError("states of a trainable parameter");
    }
    return absl::OkStatus();
  };
  ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
  ASSERT_OK_AND_ASSIGN(const Values weights, run.Global(false));
  const ParameterSpec* frozen = nullptr;
  for (const ParameterSpec& spec : run.ranks[0].specs) {
    if (spec.name == "embed.scale") frozen = &spec;
  }
  ASSERT_NE(frozen, nullptr);
  for (size_t i = 0; i < weights.at("embed.scale").size(); ++i) {
    EXPECT_EQ(static_cast<float>(weights.at("embed.scale")[i]),
              static_cast<float>(InitialValue(*frozen, 1, static_cast<int64_t>(i))));
  }
}

TEST(GradientsTest, C37_ChangedShardStopsEveryRankBeforeTheStep) {
  ToyConfig config = IntegerConfig({.tp = 1, .ep = 1, .dp = 3, .etp = 1});
  config.options.verify_shards = true;
  ASSERT_OK(RunToy(config));
  config.before_step = [](int step, int rank, PartitionedModel& model) -> absl::Status {
    if (step != 1 || rank != 1) return absl::OkStatus();
    for (const StateTensor& tensor : model.StateTensors()) {
      if (tensor.fragments.empty() || model.parameters()[static_cast<size_t>(tensor.parameter)].name != "layers.1.w")
        continue;
      *static_cast<unsigned char*>(tensor.fragments[0].data.raw()) ^= 1;
    }
    return absl::OkStatus();
  };
  ToyRun run;
  const std::vector<absl::Status> statuses = RunToyStatuses(config, &run);
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("rank 1 has a changed shard")));
  }
  EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDataLoss, HasSubstr("layers.1")));
}

// One bit of one replica flips: all ranks stop, the parameter and the odd rank are named. Replicated weights over DP,
// TP-replicated shards over the lanes.
TEST(GradientsTest, C36_DriftedReplicasAreNamed) {
  for (const bool lanes : {false, true}) {
    ToyConfig config = IntegerConfig({.tp = lanes ? 2 : 1, .ep = 1, .dp = 3, .etp = 1});
    config.mesh.etp = config.mesh.tp;
    config.options.policy = lanes ? "flat" : "replicated";
    config.options.replica_check_interval = 2;
    config.steps = 4;
    ASSERT_OK(RunToy(config));
    config.before_step = [](int step, int rank, PartitionedModel& model) -> absl::Status {
      if (step != 1 || rank != 1) return absl::OkStatus();
      for (const StateTensor& tensor : model.StateTensors()) {
        const std::string& name = model.parameters()[static_cast<size_t>(tensor.parameter)].name;
        if (tensor.fragments.empty() || name != "layers.1.norm") continue;
        *static_cast<unsigned char*>(tensor.fragments[0].data.raw()) ^= 1;
      }
      return absl::OkStatus();
    };
    ToyRun run;
    const std::vector<absl::Status> statuses = RunToyStatuses(config, &run);
    for (const absl::Status& status : statuses) EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDataLoss, HasSubstr("copies of layers.1")));
    EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDataLoss, HasSubstr("rank 1 has digest")));
    EXPECT_LE(run.ranks[0].steps.size(), 3u);
  }
}

// ---- micro_batches: one tree over all batches of a step ----

ToyConfig EightBatches(int dp) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = dp, .etp = 1};
  config.micro_batches = config.options.micro_batches = 8 / dp;
  config.number_batches_globally = true;
  config.options.max_gradient_norm = 0.5;
  config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  return config;
}

// Eight batches a step, by one replica or by eight: f32 gradients that round in every addition, the same bits.
TEST(GradientsTest, MicroBatchesContinueTheTreeOverReplicas) {
  ASSERT_OK_AND_ASSIGN(const ToyRun base, RunToy(EightBatches(8)));
  ASSERT_OK_AND_ASSIGN(const Values gradients, base.Global(/*gradients=*/true));
  ASSERT_OK_AND_ASSIGN(const Values weights, base.Global(/*gradients=*/false));
  EXPECT_EQ(base.ranks[0].counts.pending_gradient_bytes, 0);
  EXPECT_EQ(base.ranks[0].counts.predicted_pending_gradient_bytes, 0);
  for (const char* policy : {"flat", "per_parameter", "replicated"}) {
    for (int dp : {1, 2, 4}) {
      ToyConfig config = EightBatches(dp);
      config.options.policy = policy;
      if (dp == 2) config.options.reduce_bucket_bytes = 64;
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      ASSERT_OK_AND_ASSIGN(const Values own_gradients, run.Global(/*gradients=*/true));
      ASSERT_OK_AND_ASSIGN(const Values own_weights, run.Global(/*gradients=*/false));
      EXPECT_EQ(own_gradients, gradients) << policy << " dp " << dp;
      EXPECT_EQ(own_weights, weights) << policy << " dp " << dp;
      for (const auto& rank : run.ranks) {
        EXPECT_GT(rank.counts.pending_gradient_bytes, 0);
        EXPECT_EQ(rank.counts.pending_gradient_bytes, rank.counts.predicted_pending_gradient_bytes);
      }
    }
  }
}

// One after the other they are added in another order, and that shows: the test above can fail.
TEST(GradientsTest, MicroBatchesAddedOneByOneHaveOtherBits) {
  ASSERT_OK_AND_ASSIGN(const ToyRun tree, RunToy(EightBatches(1)));
  ToyConfig config = EightBatches(1);
  config.options.micro_batches = 1;
  ASSERT_OK_AND_ASSIGN(const ToyRun chain, RunToy(config));
  ASSERT_OK_AND_ASSIGN(Values tree_gradients, tree.Global(/*gradients=*/true));
  ASSERT_OK_AND_ASSIGN(const Values chain_gradients, chain.Global(/*gradients=*/true));
  for (auto& [name, values] : tree_gradients) {
    for (double& value : values) value *= 8;  // a power of two: exact
  }
  EXPECT_NE(tree_gradients, chain_gradients);
}

TEST(GradientsTest, MicroBatchesAreCounted) {
  ToyConfig config = EightBatches(2);
  config.options.micro_batches = 3;
  EXPECT_THAT(RunToy(config).status(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 is not a power")));
  config.options.micro_batches = 8;  // the run makes four
  EXPECT_THAT(RunToy(config).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("was flushed 4 times in this step")));
}

}  // namespace
}  // namespace evenkeel::zero3
