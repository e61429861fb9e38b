// Buckets of gradients: which units share a collective, what that does not change, and what is left in one.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

ToyConfig SmallConfig(const comm::MeshShape& mesh, const char* policy) {
  ToyConfig config;
  config.mesh = mesh;
  config.options.policy = policy;
  config.options.max_gradient_norm = 1;
  config.device.poison = true;
  config.steps = 3;
  return config;
}

void ExpectSameBits(const ToyRun& a, const ToyRun& b, const std::string& what) {
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    for (size_t s = 0; s < a.ranks[r].steps.size(); ++s) {
      ASSERT_EQ(a.ranks[r].steps[s].gradients_digest, b.ranks[r].steps[s].gradients_digest) << what << " step " << s;
      ASSERT_EQ(a.ranks[r].steps[s].weights_digest, b.ranks[r].steps[s].weights_digest) << what << " step " << s;
      ASSERT_EQ(a.ranks[r].steps[s].result.gradient_norm, b.ranks[r].steps[s].result.gradient_norm) << what;
    }
  }
}

// Cut, by itself, with a few others, all in one: the same bits, for every policy, dtype and layout.
TEST(GradientBucketTest, Trail80_SharingABucketChangesNoBit) {
  const comm::MeshShape meshes[] = {{.tp = 1, .ep = 1, .dp = 3, .etp = 1}, {.tp = 1, .ep = 2, .dp = 4, .etp = 1}};
  for (const char* policy : {"flat", "coalesced", "per_parameter", "replicated"}) {
    for (const comm::MeshShape& mesh : meshes) {
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
        ToyConfig config = SmallConfig(mesh, policy);
        config.dtype = dtype;
        config.micro_batches = 2;
        config.options.micro_batches = dtype == DType::kF32 ? 2 : 1;  // by the tree, and one after the other
        ASSERT_OK_AND_ASSIGN(const ToyRun alone, RunToy(config));
        for (int64_t bucket : {100, 700, 3000, 1 << 20}) {
          config.options.reduce_bucket_bytes = bucket;
          ASSERT_OK_AND_ASSIGN(const ToyRun shared, RunToy(config));
          ExpectSameBits(alone, shared, absl::StrCat(policy, " bucket ", bucket));
        }
      }
    }
  }
}

// All units of a group and dtype fit into one bucket: one collective per step and group, instead of one per unit.
TEST(GradientBucketTest, SmallUnitsOfAGroupShareACollective) {
  for (const char* policy : {"flat", "coalesced", "replicated"}) {
    ToyConfig config = SmallConfig({.tp = 1, .ep = 2, .dp = 4, .etp = 1}, policy);
    ASSERT_OK_AND_ASSIGN(const ToyRun alone, RunToy(config));
    config.options.reduce_bucket_bytes = 1 << 20;
    ASSERT_OK_AND_ASSIGN(const ToyRun shared, RunToy(config));
    EXPECT_EQ(shared.ranks[0].counts.flushes, config.steps * 2) << policy;  // dense over dp, experts over edp
    EXPECT_GT(alone.ranks[0].counts.flushes, config.steps * 8) << policy;
    // A smaller bucket is closed when the next unit does not fit.
    config.options.reduce_bucket_bytes = 1400;
    ASSERT_OK_AND_ASSIGN(const ToyRun some, RunToy(config));
    EXPECT_GT(some.ranks[0].counts.flushes, shared.ranks[0].counts.flushes) << policy;
    EXPECT_LT(some.ranks[0].counts.flushes, alone.ranks[0].counts.flushes) << policy;
  }
}

TEST(GradientBucketTest, Trail83_RacesOnBucketsUnderDelays) {
  ToyConfig config = SmallConfig({.tp = 1, .ep = 1, .dp = 3, .etp = 1}, "flat");
  config.micro_batches = 2;
  ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(config));
  config.options.reduce_bucket_bytes = 2500;
  config.options.poison_released = true;
  config.options.prefetch_bytes = 3000;
  config.device.stream_mode = HostDevice::StreamMode::kWorker;
  for (const char* slow : {"compute", "comm"}) {
    config.device.delay = [slow](absl::string_view stream, int64_t n) {
      return stream == slow && n % 5 < 2 ? absl::Microseconds(200) : absl::ZeroDuration();
    };
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ExpectSameBits(expected, run, slow);
  }
}

// A rank that uses no expert fills its buckets like the others.
TEST(GradientBucketTest, Trail103_UnusedExpertsDoNotMoveTheBuckets) {
  for (int64_t bucket : {0, 400, 5000}) {
    ToyConfig config = SmallConfig({.tp = 1, .ep = 1, .dp = 3, .etp = 1}, "flat");
    config.separate_experts = true;
    config.integer_gradients = true;
    config.options.reduce_bucket_bytes = bucket;
    config.expert_used = [](int, int replica, int expert) { return replica != 1 && expert != 2; };
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    for (const ToyRank& rank : run.ranks) {
      EXPECT_EQ(rank.traffic.collectives, run.ranks[0].traffic.collectives);
      EXPECT_EQ(rank.counts.flushes, run.ranks[0].counts.flushes);
    }
    for (size_t p = 0; p < run.ranks[0].specs.size(); ++p) {
      if (run.ranks[0].specs[p].name != "layers.1.moe.experts.2.w_in") continue;
      for (double g : run.ranks[0].gradients[p]) ASSERT_EQ(g, 0.0);
    }
  }
}

constexpr int64_t kElements = 10;

// Adds `value` to the leaf's gradient and flushes it.
absl::Status AddAndFlush(RankContext& rank, int leaf, float value) {
  EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({leaf}));
  EK_RETURN_IF_ERROR(rank.compute->Launch([g = gradients[0], value] {
    for (int64_t i = 0; i < kElements; ++i) g.data<float>()[i] += value;
    return absl::OkStatus();
  }));
  return rank.model->FlushGradients({leaf});
}

absl::StatusOr<float> FirstGradient(RankContext& rank, int parameter) {
  std::vector<float> values(kElements);
  EK_RETURN_IF_ERROR(rank.model->ReadTensor(parameter, TensorKind::kGradient, "",
                                            TensorView(values.data(), DType::kF32, Shape({kElements}))));
  return values[0];
}

// A backward pass that runs twice (re-entrant recomputation), is given up, and begins again: nothing of it is left in a
// bucket for the next step; nor is anything after a step.
TEST(GradientBucketTest, Trail68_NothingIsLeftInABucket) {
  for (int64_t bucket : {0, 100, 10000}) {
    OnRanksConfig config;
    config.description = ChainModel(3, kElements);
    config.options.reduce_bucket_bytes = bucket;
    EXPECT_OK(OnRanks(config,
                      [](RankContext& rank) -> absl::Status {
                        for (int step = 0; step < 3; ++step) {
                          for (int leaf : {2, 1}) EK_RETURN_IF_ERROR(AddAndFlush(rank, leaf, 100));
                          EK_RETURN_IF_ERROR(rank.model->Gradients({0}).status());
                          EK_RETURN_IF_ERROR(rank.model->ZeroGradients());
                          for (int leaf : {2, 1, 0})
                            EK_RETURN_IF_ERROR(AddAndFlush(rank, leaf, static_cast<float>(leaf + 1)));
                          for (int leaf : {0, 1, 2}) {
                            EK_ASSIGN_OR_RETURN(const float gradient, FirstGradient(rank, leaf));
                            EK_RETURN_IF_ERROR(
                                Check(gradient == static_cast<float>(leaf + 1), absl::StrCat("leaf ", leaf)));
                          }
                          EK_ASSIGN_OR_RETURN(const StepResult result, rank.model->Step());
                          // 10 elements each of 1, 2 and 3.
                          EK_RETURN_IF_ERROR(Check(result.gradient_norm == std::sqrt(10.0 * (1 + 4 + 9)), "norm"));
                        }
                        // Nobody adds anything.
                        EK_ASSIGN_OR_RETURN(const StepResult empty, rank.model->Step());
                        return Check(empty.stepped && empty.gradient_norm == 0, "a step without gradients");
                      }))
        << "bucket " << bucket;
  }
}

// Reading one gradient finishes what waits in its bucket; what comes later is added.
TEST(GradientBucketTest, ReadingInBetweenFinishesTheBucket) {
  OnRanksConfig config;
  config.description = ChainModel(3, kElements);
  config.options.reduce_bucket_bytes = 10000;
  EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
    EK_RETURN_IF_ERROR(AddAndFlush(rank, 0, 5));
    EK_ASSIGN_OR_RETURN(float gradient, FirstGradient(rank, 0));
    EK_RETURN_IF_ERROR(Check(gradient == 5, "read between flushes"));
    EK_RETURN_IF_ERROR(AddAndFlush(rank, 0, 2));
    EK_ASSIGN_OR_RETURN(gradient, FirstGradient(rank, 0));
    return Check(gradient == 7 && rank.model->counts().flushes == 2, "both are there");
  }));
}

// Gradients of the next leaf are computed while those of the last one are reduced: two buffers take turns, however many
// leaves there are, and nothing is allocated later.
TEST(GradientBucketTest, Trail83_TwoBuffersTakeTurns) {
  ToyConfig config = SmallConfig({.tp = 1, .ep = 1, .dp = 2, .etp = 1}, "flat");
  config.tied_head = false;
  config.layers = 2;
  ASSERT_OK_AND_ASSIGN(const ToyRun few, RunToy(config));
  config.layers = 8;
  config.micro_batches = 3;
  ASSERT_OK_AND_ASSIGN(const ToyRun many, RunToy(config));
  EXPECT_EQ(many.ranks[0].counts.gradient_pool_bytes, few.ranks[0].counts.gradient_pool_bytes);
}

// The turn survives a clear: the buffer that may still be read by a reduction is not the next one handed out.
TEST(GradientBucketTest, Trail84_ZeroGradientsKeepsTheTurn) {
  OnRanksConfig config;
  config.description = ChainModel(4, kElements);
  EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
    const void* last = nullptr;
    for (int turn = 0; turn < 12; ++turn) {
      const int leaf = turn % 4;
      EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({leaf}));
      const void* buffer = gradients[0].raw();
      EK_RETURN_IF_ERROR(Check(buffer != last, absl::StrCat("turn ", turn, ": the buffer of the last reduction")));
      last = buffer;
      EK_RETURN_IF_ERROR(rank.model->FlushGradients({leaf}));
      if (turn % 3 == 2) EK_RETURN_IF_ERROR(rank.model->ZeroGradients());
    }
    return absl::OkStatus();
  }));
}

// The comm stream is stuck in front of a reduction; the gradients of the next leaf are computed all the same. If the
// compute stream waited for the reductions instead of for the buffer that it uses again, this would never end.
TEST(GradientBucketTest, Trail86_ComputeGoesOnWhileTheCommStreamIsStuck) {
  absl::Notification computed;
  std::atomic<bool> stuck{false};  // from here on the comm stream waits
  std::atomic<bool> waited_in_vain{false};
  OnRanksConfig config;
  config.world_size = 1;
  config.description = ChainModel(2, kElements);
  config.device.stream_mode = HostDevice::StreamMode::kWorker;
  config.device.delay = [&](absl::string_view stream, int64_t) {
    if (stream == "comm" && stuck && !computed.WaitForNotificationWithTimeout(absl::Seconds(30))) waited_in_vain = true;
    return absl::ZeroDuration();
  };
  EXPECT_OK(OnRanks(config, [&](RankContext& rank) -> absl::Status {
    EK_RETURN_IF_ERROR(rank.compute->Synchronize());
    EK_RETURN_IF_ERROR(rank.comm->Synchronize());
    stuck = true;
    EK_RETURN_IF_ERROR(AddAndFlush(rank, 0, 1));
    EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({1}));
    EK_RETURN_IF_ERROR(rank.compute->Launch([&computed, g = gradients[0]] {
      g.data<float>()[0] += 2;
      computed.Notify();
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(rank.model->FlushGradients({1}));
    EK_ASSIGN_OR_RETURN(const StepResult result, rank.model->Step());
    return Check(result.gradient_norm == std::sqrt(10.0 + 4.0), "both gradients arrived");
  }));
  EXPECT_FALSE(waited_in_vain);
}

}  // namespace
}  // namespace evenkeel::zero3
