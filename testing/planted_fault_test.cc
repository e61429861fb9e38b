// Planted faults in whole runs: each must be found, in the right step, tensor and rank. Then the bug-trail entries that
// show at the level of a model.
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

// One finished collective of one rank.
struct Brought {
  comm::Operation operation;
  const comm::Group& group;
  int rank = 0;        // world rank
  int64_t number = 0;  // 0, 1, ..: calls of this operation on this group
  TensorView received;
};
using Hook = std::function<void(const Brought&)>;

// Lets a hook tamper with what one rank's collectives bring.
class Tamper final : public comm::CallObserver {
 public:
  explicit Tamper(Hook hook) : hook_(std::move(hook)) {}

  absl::Status Around(const comm::CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override {
    EK_RETURN_IF_ERROR(call());
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const comm::Group& group = *info.group;
    hook_({info.operation, group, group.ranks[info.rank], numbers_[{info.operation, group.name}]++, info.recv});
    return absl::OkStatus();
  }

 private:
  const Hook hook_;
  std::map<std::pair<comm::Operation, std::string>, int64_t> numbers_;
};

// Tampers with what entry 1's collectives bring.
class Plant {
 public:
  Plant(ParityConfig* config, Hook hook) : hook_(std::move(hook)) {
    config->decorate = [this](size_t index, comm::Backend& real) -> comm::Backend* {
      if (index != 1) return &real;
      const std::lock_guard<std::mutex> lock(mutex_);
      tampers_.push_back(std::make_unique<Tamper>(hook_));
      backends_.push_back(comm::ObserveBackend(&real, tampers_.back().get()));
      return backends_.back().get();
    };
  }

 private:
  std::mutex mutex_;
  Hook hook_;
  std::vector<std::unique_ptr<Tamper>> tampers_;
  std::vector<std::unique_ptr<comm::Backend>> backends_;
};

bool Is(const Brought& call, comm::Operation operation, absl::string_view group) {
  return call.operation == operation && call.group.name == group;
}

void Scale(const TensorView& view, double factor) {
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    if (view.dtype() == DType::kF32) {
      view.data<float>()[i] *= static_cast<float>(factor);
    } else {
      view.data<double>()[i] *= factor;
    }
  }
}

// The first two rows that hold something (empty slots are zero).
void SwapTwoRows(const TensorView& view, int64_t columns) {
  float* data = view.data<float>();
  std::vector<int64_t> full;
  for (int64_t i = 0; i < view.num_elements(); i += columns) {
    if (data[i] != 0) full.push_back(i);
  }
  if (full.size() >= 2) std::swap_ranges(data + full[0], data + full[0] + columns, data + full[1]);
}

FirstDifference FoundIn(const ParityConfig& config, size_t index) {
  absl::StatusOr<ParityResult> result = RunParityOnThreads(config, TestCorpus());
  EXPECT_OK(result);
  if (!result.ok()) return {};
  EXPECT_EQ(result->runs[index].verdict, Verdict::kMismatch) << ResultText(*result);
  EXPECT_FALSE(result->AllHold());
  EXPECT_TRUE(result->runs[index].first_difference.has_value()) << ResultText(*result);
  EXPECT_GT(result->runs[index].max_abs_diff, 0);
  return result->runs[index].first_difference.value_or(FirstDifference());
}

// In `reference`, a step calls all_to_all on the ep group 8 times: forward layer 0 (0, 1) and 1 (2, 3), backward layer
// 1 (4, 5) and 0 (6, 7).
constexpr int64_t kExchanges = 8;

TEST(PlantedFaultTest, TwoSlotsSwappedInOneExchangeOfOneRank) {
  for (const JudgedBy judge : {JudgedBy::kBits, JudgedBy::kDense}) {
    ParityConfig config = SmallConfig(2, 2, 2, {"reference", "reference"}, 3);
    config.entries[1].judged_by = judge;
    const Plant plant(&config, [](const Brought& call) {
      if (Is(call, comm::Operation::kAllToAll, "ep") && call.rank == 2 && call.number == 2 * kExchanges + 3) {
        SwapTwoRows(call.received, 16);
      }
    });
    const FirstDifference found = FoundIn(config, 1);
    EXPECT_EQ(found.step, 2);
    EXPECT_EQ(found.tensor, "activation layer.1.moe");
    EXPECT_EQ(found.rank, 2) << "lane 0 of replica 1";
    EXPECT_NE(found.reference, found.candidate);
    EXPECT_GT(found.ulps, 100);
  }
}

TEST(PlantedFaultTest, OneBitOfOneGradientShard) {
  ParityConfig config = SmallConfig(2, 2, 2, {"fused", "fused"}, 2);
  const Plant plant(&config, [](const Brought& call) {
    if (!Is(call, comm::Operation::kReduceScatter, "dp") || call.rank != 3 || call.number != 1 ||
        call.received.num_bytes() == 0)
      return;
    uint32_t bits;
    std::memcpy(&bits, call.received.raw(), sizeof(bits));
    bits ^= 1;
    std::memcpy(call.received.raw(), &bits, sizeof(bits));
  });
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_EQ(found.step, 0);
  EXPECT_TRUE(absl::StartsWith(found.tensor, "gradient ")) << found.tensor;
  EXPECT_LE(found.ulps, 1);
}

TEST(PlantedFaultTest, AnotherLearningRateShowsInTheFirstUpdateOnly) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference", "fused"}, 2);
  config.entries[1].change = [](TrainingConfig& own) { own.zero3.optimizer.learning_rate *= 1.0001; };
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_EQ(found.step, 0);
  EXPECT_EQ(found.tensor, "parameter embedding.token");
}

TEST(PlantedFaultTest, AnotherFirstWeightShowsBeforeTheFirstStep) {
  ParityConfig config = SmallConfig(1, 1, 2, {"reference", "fused"}, 1);
  config.entries[1].change = [](TrainingConfig& own) { own.seed = 2; };
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_EQ(found.step, 0);
  EXPECT_EQ(found.tensor, "initial parameter embedding.token");
}

TEST(PlantedFaultTest, TokensThatDoNotComeHome) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference", "unsharded"}, 1);
  const Plant plant(&config, [](const Brought& call) {
    if (Is(call, comm::Operation::kAllGather, "tp") && call.number == 0) Scale(call.received, 0);
  });
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_EQ(found.step, 0);
  EXPECT_EQ(found.tensor, "activation layer.0.moe");
}

TEST(PlantedFaultTest, ARouterThatDropsOtherTokens) {
  for (const JudgedBy judge : {JudgedBy::kBits, JudgedBy::kDense}) {
    ParityConfig config = SmallConfig(2, 2, 2, {"reference", "fused"}, 1);
    config.base.model.capacity_factor = *moe::Rational::Parse("0.5");
    config.base.model.min_capacity = 1;
    config.entries[1].judged_by = judge;
    config.entries[1].change = [](TrainingConfig& own) { own.model.drop = moe::DropPolicy::kProbs; };
    const FirstDifference found = FoundIn(config, 1);
    EXPECT_EQ(found.tensor, judge == JudgedBy::kBits ? "activation layer.0.moe" : "routing layer.0.moe");
  }
}

TEST(PlantedFaultTest, ABalanceLossThatIsLeftOut) {
  for (const JudgedBy judge : {JudgedBy::kBits, JudgedBy::kDense}) {
    ParityConfig config = SmallConfig(2, 2, 2, {"reference", "fused"}, 1);
    config.entries[1].judged_by = judge;
    config.entries[1].change = [](TrainingConfig& own) { own.model.balance_coefficient = 0; };
    EXPECT_EQ(FoundIn(config, 1).tensor, "loss");
  }
}

// 19, 20: the adjoint of the experts' input must sum the lanes' partial gradients. Weight gradients of the layer do not
// notice; the gradient of its input, and all that lies before it, does.
TEST(PlantedFaultTest, Trail19And20_InputGradientWithoutTheSumOverLanes) {
  for (const JudgedBy judge : {JudgedBy::kBits, JudgedBy::kDense}) {
    ParityConfig config = SmallConfig(2, 2, 2, {"reference", "reference"}, 1);
    config.entries[1].judged_by = judge;
    // all_reduce on tp: forward layers 0 and 1, then the adjoints of copy in layers 1 and 0.
    const Plant plant(&config, [](const Brought& call) {
      if (Is(call, comm::Operation::kAllReduce, "tp") && call.number == 2) Scale(call.received, 0.5);
    });
    const FirstDifference found = FoundIn(config, 1);
    EXPECT_EQ(found.tensor, "activation gradient layer.1.attention");
  }
}

// 33: SUM over EDP divided by the full DP size. A sum that is ep times too large (the division by EDP) is found, and
// in the right sum it does not matter how many expert groups there are.
TEST(PlantedFaultTest, Trail33_ExpertGradientTimesEp) {
  ParityConfig config = SmallConfig(1, 2, 4, {"reference", "reference"}, 1);
  config.entries[1].judged_by = JudgedBy::kDense;
  const Plant plant(&config, [](const Brought& call) {
    if (Is(call, comm::Operation::kReduceScatter, "edp")) Scale(call.received, 2);
  });
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_THAT(found.tensor, HasSubstr("gradient layer.0.moe.w_"));
  EXPECT_NEAR(found.candidate, 2 * found.reference, 1e-6);
}

TEST(ModelTrailTest, Trail33_TheNumberOfExpertGroupsDoesNotScaleAnUpdate) {
  std::vector<double> losses;
  for (const int ep : {1, 2, 4}) {
    for (const char* order : {"reference", "unsharded"}) {
      ParityConfig config = SmallConfig(2, ep, 4, {order}, 6);
      config.judge_reference = true;
      ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
      EXPECT_TRUE(result.AllHold()) << ResultText(result);
      losses.push_back(result.runs[0].loss.back());
    }
  }
  // f32 rounding of five updates; a factor 2 or 4 on expert gradients moves the loss by more than 1e-3.
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 2e-5);
}

// 38, 40, 41: one norm over dense and all experts, the same on all ranks. The double reference computes it from all
// gradients; a group whose experts are left out clips otherwise and would let the dense weights drift apart.
TEST(PlantedFaultTest, Trail38And41_NormWithoutTheOtherGroupsExperts) {
  ParityConfig config = SmallConfig(2, 2, 4, {"reference", "reference"}, 1);
  config.base.zero3.max_gradient_norm = 0.1;
  config.entries[1].judged_by = JudgedBy::kDense;
  const Plant plant(&config, [](const Brought& call) {
    if (Is(call, comm::Operation::kAllReduce, "ep.norm") && call.rank >= 4)
      std::memset(call.received.raw(), 0, call.received.num_bytes());
  });
  const FirstDifference found = FoundIn(config, 1);
  EXPECT_EQ(found.tensor, "gradient norm (another value than on rank 0)");
  EXPECT_EQ(found.rank, 4);
}

TEST(ModelTrailTest, Trail38And41_TheNormIsOneNumberInEveryLayout) {
  // Bounded by the double reference in every layout (ExpectHolds of parity_test.cc runs clipped); here: the clipped
  // losses of layouts agree to f32 rounding.
  std::vector<double> losses;
  for (const auto& [tp, ep] : std::vector<std::pair<int, int>>{{1, 1}, {1, 4}, {2, 2}, {4, 4}}) {
    ParityConfig config = SmallConfig(tp, ep, 4, {"fused"}, 6);
    config.judge_reference = true;
    config.base.zero3.max_gradient_norm = 0.1;
    ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
    EXPECT_TRUE(result.AllHold()) << ResultText(result);
    losses.push_back(result.runs[0].loss.back());
  }
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 2e-5);
}

// 54, 55: experts that no token of a step chose. All ranks make the same collectives all the same, and the gradient of
// such an expert is exactly zero: the double reference's bound there is zero.
TEST(ModelTrailTest, Trail54And55_ExpertsWithoutTokens) {
  ParityConfig config = SmallConfig(2, 4, 4, {"reference", "fused", "token_sliced", "unsharded"}, 4);
  config.judge_reference = true;
  config.base.model.sequence = 2;
  config.base.model.experts = 16;
  config.base.model.top_k = 1;
  for (const char* policy : {"coalesced", "per_parameter"}) config.entries.push_back(*NamedEntry("fused", policy));
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
}

// 21: lanes that route differently are an error that names the group, not a silently mixed batch.
TEST(PlantedFaultTest, Trail21_LanesThatSeeOtherTokensAreAnError) {
  ParityConfig config = SmallConfig(2, 1, 1, {"reference", "reference"}, 2);
  const Plant plant(&config, [](const Brought& call) {
    if (Is(call, comm::Operation::kAllReduce, "tp.attention") && call.rank == 1 && call.number == 0)
      Scale(call.received, -3);
  });
  const absl::StatusOr<ParityResult> result = RunParityOnThreads(config, TestCorpus());
  EXPECT_THAT(result, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("token")));
}

}  // namespace
}  // namespace evenkeel::testutil
