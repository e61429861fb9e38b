// 16-bit parameters: masters, f32 accumulation, no scale in bf16, a dynamic loss scale in f16.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/loss_scale.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kElements = 20;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

OnRanksConfig OneLeaf(DType dtype) {
  OnRanksConfig config;
  config.description = ChainModel(1, kElements, dtype);
  return config;
}

absl::StatusOr<std::vector<float>> Read(RankContext& rank, TensorKind kind) {
  std::vector<float> values(kElements);
  EK_RETURN_IF_ERROR(rank.model->ReadTensor(0, kind, "", TensorView(values.data(), DType::kF32, Shape({kElements}))));
  return values;
}

// Adds `value` to every gradient of the leaf and flushes.
absl::Status Backward(RankContext& rank, float value) {
  EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({0}));
  for (int64_t i = 0; i < kElements; ++i) gradients[0].data<float>()[i] += value;
  return rank.model->FlushGradients({0});
}

// No scale in bf16, and a step leaves zero gradients. Upstream used the scaler of f16: gradients of 1 / 65536, never
// zeroed.
TEST(MixedPrecisionTest, Trail89_BF16HasNoLossScaleAndZeroesItsGradients) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    OnRanksConfig config = OneLeaf(dtype);
    config.options.optimizer.learning_rate = 0.5;
    EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
      for (int step = 0; step < 3; ++step) {
        EK_RETURN_IF_ERROR(Check(rank.model->loss_scale() == 1, "no scale"));
        EK_RETURN_IF_ERROR(Backward(rank, 3));
        EK_ASSIGN_OR_RETURN(const std::vector<float> gradient, Read(rank, TensorKind::kGradient));
        for (float g : gradient) EK_RETURN_IF_ERROR(Check(g == 3, absl::StrCat("gradient ", g)));
        EK_ASSIGN_OR_RETURN(const std::vector<float> before, Read(rank, TensorKind::kMaster));
        EK_ASSIGN_OR_RETURN(const StepResult result, rank.model->Step());
        EK_RETURN_IF_ERROR(Check(result.loss_scale == 1 && result.gradient_norm == 3 * std::sqrt(20.0), "norm"));
        EK_ASSIGN_OR_RETURN(const std::vector<float> after, Read(rank, TensorKind::kMaster));
        EK_RETURN_IF_ERROR(Check(after[0] == before[0] - 1.5f, "the whole gradient moved the master"));
        EK_ASSIGN_OR_RETURN(const std::vector<float> left, Read(rank, TensorKind::kGradient));
        for (float g : left) EK_RETURN_IF_ERROR(Check(g == 0, absl::StrCat("left ", g)));
      }
      return absl::OkStatus();
    })) << DTypeName(dtype);
  }
}

// One infinite gradient on one rank of a bf16 run: nobody steps, masters and weights stay finite, the next step is
// fine.
TEST(MixedPrecisionTest, Trail93_NonFiniteGradientDoesNotPoisonABF16Run) {
  for (float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
    OnRanksConfig config = OneLeaf(DType::kBF16);
    config.world_size = 3;
    config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
    EXPECT_OK(OnRanks(config, [bad](RankContext& rank) -> absl::Status {
      EK_RETURN_IF_ERROR(Backward(rank, 1));
      EK_RETURN_IF_ERROR(rank.model->Step().status());
      EK_ASSIGN_OR_RETURN(const std::vector<float> before, Read(rank, TensorKind::kMaster));
      EK_RETURN_IF_ERROR(Backward(rank, rank.rank == 1 ? bad : 1));
      EK_ASSIGN_OR_RETURN(const StepResult skipped, rank.model->Step());
      EK_RETURN_IF_ERROR(Check(!skipped.stepped && skipped.step == 1 && skipped.skipped_total == 1, "nobody steps"));
      EK_ASSIGN_OR_RETURN(const std::vector<float> after, Read(rank, TensorKind::kMaster));
      EK_RETURN_IF_ERROR(Check(before == after, "masters are as before"));
      EK_RETURN_IF_ERROR(Backward(rank, 1));
      EK_ASSIGN_OR_RETURN(const StepResult next, rank.model->Step());
      EK_RETURN_IF_ERROR(Check(next.stepped && next.gradient_norm == std::sqrt(20.0), "the next step is normal"));
      EK_ASSIGN_OR_RETURN(const std::vector<float> weights, Read(rank, TensorKind::kWeight));
      for (float w : weights) EK_RETURN_IF_ERROR(Check(std::isfinite(w), "weights are finite"));
      return absl::OkStatus();
    })) << bad;
  }
}

// 512 micro-batches of 1/64 after one of 8: bf16 accumulation stands still at 8, f32 is exact.
TEST(MixedPrecisionTest, Trail102_GradientsOf16BitParametersAccumulateInF32) {
  BF16 narrow(8.0f);
  for (int micro = 0; micro < 512; ++micro) narrow = BF16(static_cast<float>(narrow) + 1.0f / 64);
  ASSERT_EQ(static_cast<float>(narrow), 8.0f);  // what this test is about
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    for (bool one_flush : {false, true}) {
      OnRanksConfig config = OneLeaf(dtype);
      config.options.loss_scale.initial = 1;
      EXPECT_OK(OnRanks(config, [one_flush](RankContext& rank) -> absl::Status {
        EK_RETURN_IF_ERROR(Backward(rank, 8));
        for (int micro = 0; micro < 512; ++micro) {
          if (!one_flush) {
            EK_RETURN_IF_ERROR(Backward(rank, 1.0f / 64));
            continue;
          }
          EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({0}));
          for (int64_t i = 0; i < kElements; ++i) gradients[0].data<float>()[i] += 1.0f / 64;
        }
        if (one_flush) EK_RETURN_IF_ERROR(rank.model->FlushGradients({0}));
        EK_ASSIGN_OR_RETURN(const std::vector<float> gradient, Read(rank, TensorKind::kGradient));
        for (float g : gradient) EK_RETURN_IF_ERROR(Check(g == 16, absl::StrCat("gradient ", g)));
        return absl::OkStatus();
      })) << DTypeName(dtype);
    }
  }
}

// What an f16 backward pass gives: the product in f16, of a loss multiplied by `scale`.
float HalfGradient(double gradient, double scale) {
  return static_cast<float>(F16(static_cast<float>(gradient * scale)));
}

// A gradient below f16's smallest number: without the scale it vanishes and nothing is learned, with it the master
// moves by exactly the right amount.
TEST(MixedPrecisionTest, F16GradientsVanishWithoutTheScale) {
  const double tiny = std::ldexp(1.0, -27);
  ASSERT_EQ(HalfGradient(tiny, 1), 0.0f);
  for (bool scaled : {false, true}) {
    OnRanksConfig config = OneLeaf(DType::kF16);
    config.description.parameters[0].initializer = Initializer::Zeros();
    config.options.optimizer.learning_rate = 1;
    config.options.loss_scale.initial = scaled ? 65536 : 1;
    EXPECT_OK(OnRanks(config, [scaled, tiny](RankContext& rank) -> absl::Status {
      for (int step = 0; step < 4; ++step) {
        EK_RETURN_IF_ERROR(Backward(rank, HalfGradient(tiny, rank.model->loss_scale())));
        EK_ASSIGN_OR_RETURN(const StepResult result, rank.model->Step());
        EK_RETURN_IF_ERROR(Check(result.gradient_norm == (scaled ? tiny * std::sqrt(20.0) : 0.0), "norm"));
      }
      EK_ASSIGN_OR_RETURN(const std::vector<float> master, Read(rank, TensorKind::kMaster));
      return Check(master[0] == (scaled ? static_cast<float>(-4 * tiny) : 0.0f), "master");
    })) << scaled;
  }
}

// Every scale gives the same bits where nothing overflows, for every policy; AdamW, clipping and accumulation included.
TEST(MixedPrecisionTest, TheScaleChangesNoBit) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 2, .dp = 4, .etp = 1};
  config.dtype = DType::kF16;
  config.micro_batches = 2;
  config.steps = 5;
  config.options.max_gradient_norm = 1;
  config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  config.options.optimizer.learning_rate = 1e-3;
  config.options.loss_scale.initial = 1;
  config.options.loss_scale.dynamic = false;
  config.options.policy = "replicated";
  ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(config));
  for (const char* policy : {"flat", "coalesced", "per_parameter", "replicated"}) {
    for (double scale : {1.0, 1024.0, 65536.0, 16777216.0}) {
      config.options.policy = policy;
      config.options.loss_scale.initial = scale;
      config.options.loss_scale.dynamic = scale == 1024;  // grows on the way
      config.options.loss_scale.growth_interval = 2;
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      for (size_t r = 0; r < run.ranks.size(); ++r) {
        for (size_t s = 0; s < run.ranks[r].steps.size(); ++s) {
          const ToyStep& a = expected.ranks[r].steps[s];
          const ToyStep& b = run.ranks[r].steps[s];
          ASSERT_EQ(b.activation, a.activation) << policy << " " << scale << " step " << s;
          ASSERT_EQ(b.gradients_digest, a.gradients_digest) << policy << " " << scale << " step " << s;
          ASSERT_EQ(b.weights_digest, a.weights_digest) << policy << " " << scale << " step " << s;
          ASSERT_EQ(b.result.gradient_norm, a.result.gradient_norm) << policy << " " << scale << " step " << s;
          ASSERT_EQ(b.result.loss_scale, scale == 1024 ? std::ldexp(scale, static_cast<int>(s / 2)) : scale);
        }
      }
    }
  }
}

// 2^10 * 100 is beyond f16: one rank overflows, all skip and halve; two good steps later all double.
TEST(MixedPrecisionTest, TheScaleFallsAndGrowsOnAllRanksAlike) {
  OnRanksConfig config = OneLeaf(DType::kF16);
  config.world_size = 3;
  config.options.loss_scale.initial = 4096;
  config.options.loss_scale.growth_interval = 2;
  config.options.loss_scale.maximum = 4096;
  EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
    const auto step = [&rank](double gradient) -> absl::StatusOr<StepResult> {
      const double mine = rank.rank == 1 ? gradient : 1;
      EK_RETURN_IF_ERROR(Backward(rank, HalfGradient(mine, rank.model->loss_scale())));
      return rank.model->Step();
    };
    const struct {
      double gradient, scale_before, scale_after;
      bool stepped;
    } kSteps[] = {{100, 4096, 2048, false}, {100, 2048, 1024, false}, {100, 1024, 512, false}, {100, 512, 512, true},
                  {1, 512, 1024, true},     {100, 1024, 512, false},  {1, 512, 512, true},     {1, 512, 1024, true},
                  {1, 1024, 1024, true},    {1, 1024, 2048, true},    {1, 2048, 2048, true},   {1, 2048, 4096, true},
                  {1, 4096, 4096, true},    {1, 4096, 4096, true}};
    int skipped = 0;
    for (const auto& expected : kSteps) {
      EK_RETURN_IF_ERROR(Check(rank.model->loss_scale() == expected.scale_before, "before"));
      EK_ASSIGN_OR_RETURN(const StepResult result, step(expected.gradient));
      skipped += expected.stepped ? 0 : 1;
      EK_RETURN_IF_ERROR(Check(result.stepped == expected.stepped && result.loss_scale == expected.scale_before &&
                                   result.skipped_total == skipped,
                               absl::StrCat("step at scale ", expected.scale_before)));
      EK_RETURN_IF_ERROR(
          Check(rank.model->loss_scale() == expected.scale_after, absl::StrCat("after: ", rank.model->loss_scale())));
    }
    return absl::OkStatus();
  }));
}

TEST(MixedPrecisionTest, AScaleThatCannotFallIsAnErrorOnAllRanks) {
  OnRanksConfig config = OneLeaf(DType::kF16);
  config.world_size = 3;
  config.options.loss_scale.initial = 4;
  for (const absl::Status& status : OnRanksStatuses(config, [](RankContext& rank) -> absl::Status {
         for (int step = 0;; ++step) {
           EK_RETURN_IF_ERROR(Backward(rank, rank.rank == 2 ? kInfinity : 1));
           EK_ASSIGN_OR_RETURN(const StepResult result, rank.model->Step());
           EK_RETURN_IF_ERROR(Check(!result.stepped && step < 2, "skipped at 4 and 2, not more often"));
         }
       })) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, HasSubstr("loss scale is at its minimum, 1")));
  }
}

TEST(MixedPrecisionTest, RanksThatScaleDifferentlyAreNamed) {
  OnRanksConfig config = OneLeaf(DType::kF16);
  config.world_size = 3;
  config.adjust = [](int rank, PartitionedModelOptions& options) { options.loss_scale.initial = rank == 1 ? 8 : 16; };
  for (const absl::Status& status : OnRanksStatuses(config, [](RankContext& rank) -> absl::Status {
         EK_RETURN_IF_ERROR(Backward(rank, 1));
         return rank.model->Step().status();
       })) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 1 scales by 8")));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 2 scales by 16")));
  }
}

TEST(MixedPrecisionTest, BadScaleOptionsAreRefusedWithTheNumber) {
  const auto status = [](void (*change)(LossScaleOptions&)) {
    LossScaleOptions options;
    change(options);
    return ValidateLossScaleOptions(options);
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_OK(status([](LossScaleOptions&) {}));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.initial = 1000; }),
              StatusIs(kInvalid, HasSubstr("1000 is not a power")));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.minimum = 0; }), StatusIs(kInvalid, HasSubstr("0 is not a power")));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.growth = std::nan(""); }), StatusIs(kInvalid, HasSubstr("nan")));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.backoff = 2; }), StatusIs(kInvalid, HasSubstr("backoff 2")));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.maximum = 2; }), StatusIs(kInvalid, HasSubstr("not in [1, 2]")));
  EXPECT_THAT(status([](LossScaleOptions& o) { o.growth_interval = 0; }), StatusIs(kInvalid, HasSubstr("0 < 1")));
  OnRanksConfig config = OneLeaf(DType::kF16);
  config.options.loss_scale.initial = 3;
  EXPECT_THAT(OnRanks(config, [](RankContext&) { return absl::OkStatus(); }),
              StatusIs(kInvalid, HasSubstr("3 is not a power of two")));
}

}  // namespace
}  // namespace evenkeel::zero3
