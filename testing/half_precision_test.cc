// Whole runs in f16, whose gradients need a loss scale: every order has the bits of the reference, the reference stays
// inside the derived bound of the run in double, and steps that overflow are skipped by all ranks or it is a mismatch.
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/testing/dense_verdict.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/parity_test_util.h"
#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_model.h"
#include "evenkeel/testing/training_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

ParityConfig HalfConfig(const std::vector<std::string>& orders, int64_t steps, double first_scale = 65536) {
  ParityConfig config = SmallConfig(2, 2, 4, orders, steps);
  config.base.model.dtype = DType::kF16;
  config.base.zero3.loss_scale.initial = first_scale;
  config.judge_reference = true;
  return config;
}

ParityResult ResultOf(const ParityConfig& config) {
  absl::StatusOr<ParityResult> result = RunParityOnThreads(config, TestCorpus());
  EXPECT_OK(result);
  return result.ok() ? *std::move(result) : ParityResult();
}

// Bits in the reference's layout and adding order, else the bound.
void ExpectHolds(const ParityConfig& config, const ParityResult& result) {
  const std::string text = ResultText(result);
  ASSERT_EQ(result.runs.size(), config.entries.size());
  for (size_t i = 0; i < result.runs.size(); ++i) {
    const ParityRun& run = result.runs[i];
    const bool bounded = run.order == "unsharded" || run.order == "dedup";
    EXPECT_EQ(run.verdict, i == 0 ? Verdict::kReference : bounded ? Verdict::kBounded : Verdict::kBitwise) << text;
    EXPECT_EQ(run.bytes.ep.counted, run.bytes.ep.predicted) << text;
    EXPECT_EQ(run.bytes.tp.counted, run.bytes.tp.predicted) << text;
    EXPECT_EQ(run.peak_gathered_bytes.counted, run.peak_gathered_bytes.predicted) << text;
    EXPECT_LE(run.bound_used, 1) << text;
    if (i == 0 || bounded) {
      EXPECT_GT(run.bound_used, 0.001) << "a bound far above what happens proves nothing: " << text;
      continue;
    }
    EXPECT_EQ(run.loss_digest, result.runs[0].loss_digest) << text;
    EXPECT_EQ(run.parameter_digest, result.runs[0].parameter_digest) << text;
    EXPECT_EQ(run.skipped_steps, result.runs[0].skipped_steps) << text;
    EXPECT_EQ(run.loss_scale, result.runs[0].loss_scale) << text;
  }
}

TEST(HalfPrecisionTest, EveryOrderHasTheBitsOfTheReference) {
  const ParityConfig config =
      HalfConfig({"reference", "drop_gather", "fused", "token_sliced", "overlapped(fused)", "unsharded", "dedup"}, 4);
  ExpectHolds(config, ResultOf(config));
}

TEST(HalfPrecisionTest, OptionsOfTheModelHoldToo) {
  for (const bool residual : {false, true}) {
    ParityConfig config = HalfConfig({"reference", "fused", "token_sliced", "dedup"}, 2, 1024);
    LanguageModelConfig& model = config.base.model;
    model.activation = moe::ExpertActivation::kSwiGlu;
    model.expert_bias = true;
    model.z_coefficient = 0.01f;
    model.residual_moe = residual;
    model.shared_experts = residual ? 0 : 2;
    model.shared_gate = !residual;
    model.recompute = residual;
    model.score = residual ? moe::ScoreFunction::kSoftmax : moe::ScoreFunction::kSigmoid;
    ExpectHolds(config, ResultOf(config));
  }
}

// A scale that is far too large: steps are skipped, by every order alike, until it has found its place.
TEST(HalfPrecisionTest, OverflowIsSkippedByAllAlikeAndTrainingGoesOn) {
  const ParityConfig config = HalfConfig({"reference", "fused", "token_sliced", "unsharded", "dedup"}, 10, 0x1p24);
  const ParityResult result = ResultOf(config);
  ExpectHolds(config, result);
  for (const ParityRun& run : result.runs) {
    EXPECT_GT(run.skipped_steps, 1) << ResultText(result);
    EXPECT_LT(run.skipped_steps, 9) << ResultText(result);
    EXPECT_EQ(run.loss_scale, std::ldexp(0x1p24, -static_cast<int>(run.skipped_steps))) << ResultText(result);
    EXPECT_THAT(run.note, HasSubstr(absl::StrCat(run.skipped_steps, " steps overflowed and were skipped")));
  }
}

TEST(HalfPrecisionTest, ARunOfSkippedStepsIsNoProof) {
  const ParityConfig config = HalfConfig({"reference", "fused"}, 1, 0x1p24);
  const ParityResult result = ResultOf(config);
  EXPECT_FALSE(result.AllHold());
  for (const ParityRun& run : result.runs) {
    EXPECT_EQ(run.verdict, Verdict::kMismatch);
    EXPECT_THAT(run.note, HasSubstr("every step overflowed"));
  }
}

TEST(HalfPrecisionTest, SmallScalesHoldToo) {
  for (const double scale : {1.0, 256.0}) {
    ParityConfig config = HalfConfig({"reference", "fused"}, 2, scale);
    config.base.zero3.loss_scale.maximum = scale;
    const ParityResult result = ResultOf(config);
    EXPECT_TRUE(result.AllHold()) << ResultText(result);
    EXPECT_EQ(result.runs[0].loss_scale, scale);
  }
}

// Near zero f16 has no relative precision: 2^-26 is written as zero. The bound of a written value allows for that, and
// for less where gradients are written times a scale.
TEST(HalfPrecisionTest, TheBoundAllowsForWhatVanishesNearZero) {
  const double unit = UnitRoundoff(DType::kF16);
  reference::Matrix a(1, 1), b(1, 1);
  a.value[0] = b.value[0] = 0x1p-13;
  const double exact = 0x1p-26;
  ASSERT_EQ(static_cast<float>(F16(static_cast<float>(exact))), 0.0f);
  reference::Rounding rounding = RoundingsOf(DType::kF16, 1).dense;
  EXPECT_GE(Bound(MatMul(a, b, rounding), 0, unit), exact);
  EXPECT_LE(Bound(MatMul(a, b, rounding), 0, unit), 0x1p-22) << "a few of f16's smallest steps";
  rounding.floor /= 65536;
  EXPECT_LT(Bound(MatMul(a, b, rounding), 0, unit), exact);
  EXPECT_LT(Bound(MatMul(a, b, RoundingsOf(DType::kBF16, 1).dense), 0, unit), exact);
}

// ---- Planted faults ----

// Entry 1 starts with another scale than it says: its gradients at block boundaries differ by the factor.
TEST(HalfPrecisionPlantedFaultTest, AnotherScaleIsFoundByBits) {
  ParityConfig config = HalfConfig({"fused", "fused"}, 2, 1024);
  config.entries[1].change = [](TrainingConfig& own) { own.zero3.loss_scale.initial = 2048; };
  const ParityResult result = ResultOf(config);
  ASSERT_EQ(result.runs.size(), 2u);
  EXPECT_EQ(result.runs[1].verdict, Verdict::kMismatch) << ResultText(result);
  ASSERT_TRUE(result.runs[1].first_difference.has_value());
  EXPECT_THAT(result.runs[1].first_difference->tensor, HasSubstr("activation gradient"));
}

// What one rank's reductions of dense gradients bring in entry 1's first step is made infinite.
class InfiniteShard final : public comm::CallObserver {
 public:
  absl::Status Around(const comm::CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override {
    EK_RETURN_IF_ERROR(call());
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const bool here = info.operation == comm::Operation::kReduceScatter && info.group->name == "dp" &&
                      info.group->ranks[info.rank] == 3 && !done_ && info.recv.num_elements() > 0;
    if (!here) return absl::OkStatus();
    done_ = true;
    info.recv.data<float>()[0] = std::numeric_limits<float>::infinity();
    return absl::OkStatus();
  }

 private:
  bool done_ = false;
};

// All ranks skip together, as they should; but nothing in that step could have overflowed.
TEST(HalfPrecisionPlantedFaultTest, AnInfinityFromNowhereIsNoOverflow) {
  ParityConfig config = HalfConfig({"fused", "fused"}, 3, 1024);
  config.base.mesh = {.tp = 1, .ep = 2, .dp = 4, .etp = 1};  // one lane: its replicas cannot give the fault away
  config.entries[1].judged_by = JudgedBy::kDense;
  std::mutex mutex;
  std::vector<std::unique_ptr<InfiniteShard>> plants;
  std::vector<std::unique_ptr<comm::Backend>> backends;
  config.decorate = [&](size_t index, comm::Backend& real) -> comm::Backend* {
    if (index != 1) return &real;
    const std::lock_guard<std::mutex> lock(mutex);
    plants.push_back(std::make_unique<InfiniteShard>());
    backends.push_back(comm::ObserveBackend(&real, plants.back().get()));
    return backends.back().get();
  };
  const ParityResult result = ResultOf(config);
  ASSERT_EQ(result.runs.size(), 2u);
  EXPECT_EQ(result.runs[0].verdict, Verdict::kReference) << ResultText(result);
  EXPECT_EQ(result.runs[1].verdict, Verdict::kMismatch) << ResultText(result);
  EXPECT_EQ(result.runs[1].skipped_steps, 1);
  ASSERT_TRUE(result.runs[1].first_difference.has_value());
  EXPECT_EQ(result.runs[1].first_difference->step, 0);
  EXPECT_THAT(result.runs[1].first_difference->tensor, HasSubstr("no value reaches"));
}

}  // namespace
}  // namespace evenkeel::testutil
