// Whole training in canonical numerics: the same losses, activations, gradients and parameters, bit by bit, in every
// layout and order; and planted faults that break it.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/layout_parity.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_test_util.h"
#include "evenkeel/testing/tensor_difference.h"
#include "evenkeel/testing/training_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;
using Optimizer = zero3::OptimizerOptions::Kind;

constexpr comm::MeshShape kOneRank = {.tp = 1, .ep = 1, .dp = 1, .etp = 1};

// Eight batches of 12 tokens a step, two layers, 32 wide.
LayoutParityConfig Config(DType dtype, bool capacity, Optimizer optimizer) {
  LayoutParityConfig config;
  LanguageModelConfig& model = config.base.model;
  model.numerics = moe::ExpertNumerics::kCanonical;
  model.sequence = 12;
  model.hidden = 32;
  model.heads = 8;
  model.ffn = 16;
  model.top_k = 3;
  model.dtype = dtype;
  model.min_capacity = 1;
  model.capacity_factor = capacity ? *moe::Rational::Create(1, 4) : moe::Rational();
  model.expert_bias = true;
  model.activation = moe::ExpertActivation::kSwiGlu;
  model.z_coefficient = 0.001f;
  config.base.batches = 8;
  config.base.zero3.optimizer.kind = optimizer;
  config.base.zero3.optimizer.learning_rate = DefaultLearningRate(optimizer);
  config.base.zero3.max_gradient_norm = 1.0;
  config.steps = 2;
  return config;
}

void Add(LayoutParityConfig* config, const std::string& order, const comm::MeshShape& mesh,
         const std::string& policy = "flat") {
  absl::StatusOr<ParityEntry> entry = NamedEntry(order, policy);
  EK_CHECK_OK(entry);
  config->runs.push_back({*std::move(entry), mesh});
}

ParityResult Run(const LayoutParityConfig& config) {
  absl::StatusOr<ParityResult> result = RunLayoutParity(config, TestCorpus());
  EXPECT_OK(result);
  return result.ok() ? *std::move(result) : ParityResult();
}

void ExpectOneSetOfBits(const LayoutParityConfig& config) {
  const ParityResult result = Run(config);
  ASSERT_EQ(result.runs.size(), config.runs.size());
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  for (const ParityRun& run : result.runs) {
    EXPECT_EQ(run.loss, result.runs[0].loss) << run.note;
    EXPECT_EQ(run.gradient_digest, result.runs[0].gradient_digest) << run.note;
    EXPECT_EQ(run.parameter_digest, result.runs[0].parameter_digest) << run.note;
    EXPECT_EQ(run.loss_digest, result.runs[0].loss_digest) << run.note;
    EXPECT_EQ(run.bytes.ep.counted, run.bytes.ep.predicted) << run.note;
    EXPECT_EQ(run.bytes.tp.counted, run.bytes.tp.predicted) << run.note;
  }
}

// A backend whose all-reduces on one group add the ranks' values one after the other, not along the tree.
class Resummed final : public comm::CallObserver {
 public:
  Resummed(comm::Operation operation, std::string group) : operation_(operation), group_(std::move(group)) {}

  comm::Backend* Decorate(comm::Backend& real) {
    const absl::MutexLock lock(&mutex_);
    backends_.push_back(comm::ObserveBackend(&real, this));
    return backends_.back().get();
  }

  // In place, so `recv` holds this rank's part before the call; every rank's is here when the call is done.
  absl::Status Around(const comm::CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override {
    const bool sums = info.recv.dtype() == DType::kF32 || info.recv.dtype() == DType::kF64;
    if (info.operation != operation_ || info.group->name != group_ || !sums) return call();
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const Key key(info.group->ranks[0], info.sequence);
    {
      const absl::MutexLock lock(&mutex_);
      std::vector<std::vector<double>>& parts = parts_[key];
      parts.resize(info.group->ranks.size());
      for (int64_t i = 0; i < info.recv.num_elements(); ++i) parts[info.rank].push_back(ElementOf(info.recv, i));
    }
    EK_RETURN_IF_ERROR(call());
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const absl::MutexLock lock(&mutex_);
    const std::vector<std::vector<double>>& parts = parts_[key];
    for (int64_t i = 0; i < info.recv.num_elements(); ++i) {
      if (info.recv.dtype() == DType::kF64) {
        Store<double>(parts, i, info.recv);
      } else {
        Store<float>(parts, i, info.recv);
      }
    }
    return absl::OkStatus();
  }

  // Elements that came out with other bits.
  int64_t changed() const {
    const absl::MutexLock lock(&mutex_);
    return changed_;
  }

 private:
  using Key = std::pair<int, int64_t>;

  template <typename T>
  void Store(const std::vector<std::vector<double>>& parts, int64_t i, const TensorView& recv)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    T sum = 0;
    for (const std::vector<double>& part : parts) sum += static_cast<T>(part[i]);
    T& to = recv.data<T>()[i];
    if (to != sum) ++changed_;
    to = sum;
  }

  const comm::Operation operation_;
  const std::string group_;
  mutable absl::Mutex mutex_;
  std::map<Key, std::vector<std::vector<double>>> parts_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<comm::Backend>> backends_ ABSL_GUARDED_BY(mutex_);
  int64_t changed_ ABSL_GUARDED_BY(mutex_) = 0;
};

using Case = std::tuple<DType, bool, Optimizer>;
class CanonicalTrainingTest : public ::testing::TestWithParam<Case> {};

// Every T, E, expert TP and W of at most eight ranks, 40 layouts. In each dtype every layout is run once: with and
// without a capacity, under SGD and AdamW and under the orders that fit, which take turns.
TEST_P(CanonicalTrainingTest, LayoutsHaveOneSetOfBits) {
  const auto& [dtype, capacity, optimizer] = GetParam();
  LayoutParityConfig config = Config(dtype, capacity, optimizer);
  Add(&config, "reference", kOneRank);
  const size_t quarter = (capacity ? 1 : 0) + (optimizer == Optimizer::kSgd ? 2 : 0);
  size_t next = static_cast<size_t>(dtype);
  const auto add = [&](const std::vector<std::string>& orders, const comm::MeshShape& mesh) {
    if (next++ % 4 == quarter) Add(&config, orders[next % orders.size()], mesh);
  };
  for (int tp : {1, 2, 4, 8}) {
    for (int dp = 1; tp * dp <= 8; dp *= 2) {
      for (int ep = 1; ep <= dp; ep *= 2) {
        add({"reference", "drop_gather", "fused", "token_sliced", "dedup"}, {.tp = tp, .ep = ep, .dp = dp, .etp = tp});
      }
      for (int ep = 1; tp > 1 && ep <= tp * dp; ep *= 2) {
        add({"unsharded", "token_sliced", "dedup"}, {.tp = tp, .ep = ep, .dp = dp, .etp = 1});
      }
    }
  }
  ExpectOneSetOfBits(config);
}

INSTANTIATE_TEST_SUITE_P(Matrix, CanonicalTrainingTest,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF64, DType::kBF16, DType::kF16),
                                            ::testing::Bool(), ::testing::Values(Optimizer::kSgd, Optimizer::kAdamW)),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return absl::StrCat(std::string(DTypeName(std::get<0>(info.param))),
                                               std::get<1>(info.param) ? "Capacity" : "Dropless",
                                               std::get<2>(info.param) == Optimizer::kSgd ? "Sgd" : "AdamW");
                         });

LayoutParityConfig PlainConfig() { return Config(DType::kF32, /*capacity=*/true, Optimizer::kSgd); }

// One layout of eight ranks under every order, fetch policy and way to run it.
TEST(CanonicalOptionsTest, OrdersPoliciesAndOptionsChangeNoBit) {
  LayoutParityConfig config = PlainConfig();
  const comm::MeshShape mesh = {.tp = 2, .ep = 2, .dp = 4, .etp = 2};
  for (const char* order : {"reference", "drop_gather", "fused", "token_sliced", "dedup", "overlapped(reference)"}) {
    Add(&config, order, mesh);
  }
  for (const char* order : {"unsharded", "token_sliced", "dedup"}) {
    Add(&config, order, {.tp = 2, .ep = 4, .dp = 4, .etp = 1});
  }
  for (const char* policy : {"coalesced", "per_parameter", "off"}) Add(&config, "fused", mesh, policy);
  Add(&config, "fused", mesh);
  config.runs.back().entry.change = [](TrainingConfig& own) { own.model.recompute = true; };
  Add(&config, "dedup", mesh);
  config.runs.back().entry.change = [](TrainingConfig& own) { own.worker_streams = true; };
  Add(&config, "token_sliced", mesh);
  config.runs.back().entry.change = [](TrainingConfig& own) { own.zero3.reduce_bucket_bytes = 512; };
  ExpectOneSetOfBits(config);
}

// The dense MLP beside the experts is sliced over lanes too.
TEST(CanonicalOptionsTest, SharedExpertsAndResidualMoe) {
  for (const bool residual : {false, true}) {
    LayoutParityConfig config = Config(residual ? DType::kBF16 : DType::kF32, /*capacity=*/true, Optimizer::kSgd);
    config.base.batches = 4;
    config.base.model.residual_moe = residual;
    config.base.model.shared_experts = residual ? 0 : 2;
    config.base.model.shared_gate = !residual;
    Add(&config, "reference", kOneRank);
    Add(&config, "fused", {.tp = 2, .ep = 2, .dp = 4, .etp = 2});
    Add(&config, "dedup", {.tp = 4, .ep = 4, .dp = 1, .etp = 1});
    config.runs.back().entry.change = [](TrainingConfig& own) { own.worker_streams = true; };
    ExpectOneSetOfBits(config);
  }
}

TEST(CanonicalOptionsTest, SixteenRanks) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    LayoutParityConfig config = Config(dtype, /*capacity=*/true, Optimizer::kAdamW);
    Add(&config, "fused", {.tp = 1, .ep = 2, .dp = 4, .etp = 1});
    Add(&config, "fused", {.tp = 2, .ep = 8, .dp = 8, .etp = 2});
    Add(&config, "dedup", {.tp = 4, .ep = 4, .dp = 4, .etp = 4});
    Add(&config, "unsharded", {.tp = 8, .ep = 8, .dp = 2, .etp = 1});
    ExpectOneSetOfBits(config);
  }
}

TEST(CanonicalOptionsTest, MoreStepsAndSequences) {
  LayoutParityConfig config = PlainConfig();
  config.steps = 8;
  config.base.batches = 4;
  config.base.model.sequences = 3;
  Add(&config, "reference", {.tp = 1, .ep = 1, .dp = 4, .etp = 1});
  Add(&config, "token_sliced", {.tp = 4, .ep = 1, .dp = 1, .etp = 4});
  Add(&config, "unsharded", {.tp = 2, .ep = 4, .dp = 2, .etp = 1});
  ExpectOneSetOfBits(config);
}

TEST(CanonicalOptionsTest, RefusesWhatItCannotWithTheNumbers) {
  const auto refused = [](const std::function<void(LayoutParityConfig*)>& spoil) {
    LayoutParityConfig config = PlainConfig();
    Add(&config, "fused", {.tp = 2, .ep = 2, .dp = 2, .etp = 2});
    spoil(&config);
    const absl::Status status = RunLayoutParity(config, TestCorpus()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  using C = LayoutParityConfig;
  EXPECT_THAT(refused([](C* c) { c->base.model.numerics = moe::ExpertNumerics::kFast; }), HasSubstr("canonical"));
  EXPECT_THAT(refused([](C* c) { c->base.batches = 0; }), HasSubstr("batches must be set"));
  EXPECT_THAT(refused([](C* c) { c->base.batches = 3; }), HasSubstr("batches 3 is not dp 2 times a power of two"));
  EXPECT_THAT(refused([](C* c) { c->base.batches = 6, c->runs[0].mesh = {.tp = 1, .ep = 1, .dp = 3, .etp = 1}; }),
              HasSubstr("batches is 6"));
  EXPECT_THAT(refused([](C* c) { c->base.model.ffn = 20; }), HasSubstr("ffn 20 with tp 2"));
  EXPECT_THAT(refused([](C* c) { c->base.model.experts = 6; }), HasSubstr("experts is 6"));
  EXPECT_THAT(refused([](C* c) { c->runs[0].mesh.tp = 3; }), HasSubstr("tp 3 does not divide heads 8"));
}

// ---- Planted faults ----

// Runs the rest as the baseline runs and the last run with a fault; the fault must be found there and nowhere else.
FirstDifference FoundInLast(const LayoutParityConfig& config) {
  const ParityResult result = Run(config);
  if (result.runs.size() != config.runs.size()) return {};
  EXPECT_FALSE(result.AllHold());
  for (size_t i = 0; i + 1 < result.runs.size(); ++i) {
    EXPECT_NE(result.runs[i].verdict, Verdict::kMismatch) << ResultText(result);
  }
  EXPECT_EQ(result.runs.back().verdict, Verdict::kMismatch) << ResultText(result);
  EXPECT_TRUE(result.runs.back().first_difference.has_value());
  return result.runs.back().first_difference.value_or(FirstDifference());
}

TEST(CanonicalPlantedFaultTest, ARunInFastNumericsIsFound) {
  LayoutParityConfig config = PlainConfig();
  Add(&config, "reference", kOneRank);
  Add(&config, "reference", {.tp = 4, .ep = 1, .dp = 1, .etp = 4});
  Add(&config, "reference", {.tp = 4, .ep = 1, .dp = 1, .etp = 4});
  config.runs.back().entry.change = [](TrainingConfig& own) { own.model.numerics = moe::ExpertNumerics::kFast; };
  const FirstDifference found = FoundInLast(config);
  EXPECT_EQ(found.step, 0);
  EXPECT_THAT(found.tensor, HasSubstr("activation layer.0.attention"));
  EXPECT_LT(found.ulps, 1000) << "rounding, not nonsense";
}

// Replicas' gradients one after the other instead of along the tree.
TEST(CanonicalPlantedFaultTest, ReplicasSummedInAnotherOrderAreFound) {
  LayoutParityConfig config = PlainConfig();
  const comm::MeshShape mesh = {.tp = 1, .ep = 1, .dp = 8, .etp = 1};
  Add(&config, "reference", kOneRank);
  Add(&config, "reference", mesh, "off");
  Add(&config, "reference", mesh, "off");
  Resummed resummed(comm::Operation::kAllReduce, "dp");
  config.decorate = [&](size_t index, comm::Backend& real) { return index == 2 ? resummed.Decorate(real) : &real; };
  const FirstDifference found = FoundInLast(config);
  EXPECT_EQ(found.step, 0);
  EXPECT_THAT(found.tensor, ::testing::StartsWith("gradient "));
  EXPECT_GT(resummed.changed(), 0);
}

// The lanes' partial sums of attention, one after the other instead of along the tree.
TEST(CanonicalPlantedFaultTest, LanesSummedInAnotherOrderAreFound) {
  LayoutParityConfig config = PlainConfig();
  Add(&config, "reference", kOneRank);
  Add(&config, "fused", {.tp = 8, .ep = 1, .dp = 1, .etp = 8});
  Add(&config, "fused", {.tp = 8, .ep = 1, .dp = 1, .etp = 8});
  Resummed resummed(comm::Operation::kAllReduce, "tp.attention");
  config.decorate = [&](size_t index, comm::Backend& real) { return index == 2 ? resummed.Decorate(real) : &real; };
  const FirstDifference found = FoundInLast(config);
  EXPECT_EQ(found.step, 0);
  EXPECT_EQ(found.tensor, "activation layer.0.attention of batch 0");
  EXPECT_GT(resummed.changed(), 0);
}

// The smallest change of an update: gradients of the first step agree, the parameters that it leaves do not.
TEST(CanonicalPlantedFaultTest, AnotherUpdateIsFoundInTheParametersItLeaves) {
  LayoutParityConfig config = PlainConfig();
  Add(&config, "reference", kOneRank);
  Add(&config, "dedup", {.tp = 2, .ep = 2, .dp = 4, .etp = 2});
  config.runs.back().entry.change = [](TrainingConfig& own) { own.zero3.optimizer.weight_decay = 1e-7; };
  const FirstDifference found = FoundInLast(config);
  EXPECT_EQ(found.step, 0);
  EXPECT_THAT(found.tensor, ::testing::StartsWith("parameter "));
}

}  // namespace
}  // namespace evenkeel::testutil
