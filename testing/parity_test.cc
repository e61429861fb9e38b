// Whole runs: orders, layouts, dtypes and fetch policies against one another and against the double reference.
#include "evenkeel/testing/parity.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/parity_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kBuiltin = {"reference", "drop_gather", "fused", "token_sliced", "unsharded"};

// Slots per expert and source: ceil(s k f / e), at least 4, a multiple of T.
int64_t CapacityOf(const TrainingConfig& config) {
  const LanguageModelConfig& model = config.model;
  const double need = std::ceil(static_cast<double>(model.tokens() * model.top_k) *
                                static_cast<double>(model.capacity_factor.numerator()) /
                                static_cast<double>(model.capacity_factor.denominator() * model.experts));
  const int64_t capacity = std::max<int64_t>(static_cast<int64_t>(need), 4), t = config.mesh.tp;
  return (capacity + t - 1) / t * t;
}

// Closed forms of DeepSpeed #5626's orders (SEMANTICS 3.3), in units of V/(T E): bytes sent by a rank in a forward.
struct ClosedForm {
  int64_t ep = 0;
  int64_t tp = 0;
};
ClosedForm FormOf(const std::string& order, int64_t t, int64_t e) {
  if (order == "reference") return {2 * (e - 1) * t, 2 * (t - 1) * e};
  if (order == "drop_gather") return {2 * (e - 1), 4 * (t - 1) * e};
  if (order == "fused") return {2 * (e - 1), 3 * (t - 1) * e};
  return {2 * (e - 1), (t - 1) * e};  // unsharded
}

void ExpectClosedForms(const ParityConfig& config, const ParityRun& run) {
  EXPECT_EQ(run.bytes.ep.counted, run.bytes.ep.predicted) << run.order;
  EXPECT_EQ(run.bytes.tp.counted, run.bytes.tp.predicted) << run.order;
  if (run.order == "token_sliced") return;  // depends on the routing
  const comm::MeshShape& mesh = config.base.mesh;
  const LanguageModelConfig& model = config.base.model;
  const int64_t v = model.experts * CapacityOf(config.base) * model.hidden * SizeOf(model.dtype);
  const int64_t times = 2 * model.layers * config.steps * mesh.tp * mesh.dp;  // forward and backward
  const ClosedForm form = FormOf(run.order, mesh.tp, mesh.ep);
  EXPECT_EQ(run.bytes.ep.counted * mesh.tp * mesh.ep, form.ep * v * times) << run.order;
  EXPECT_EQ(run.bytes.tp.counted * mesh.tp * mesh.ep, form.tp * v * times) << run.order;
}

void ExpectHolds(ParityConfig config) {
  config.judge_reference = true;
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  const std::string text = ResultText(result);
  EXPECT_EQ(result.runs.size(), config.entries.size());
  for (size_t i = 0; i < result.runs.size(); ++i) {
    const ParityRun& run = result.runs[i];
    const bool other_layout = run.order == "unsharded" && config.base.mesh.tp > 1;
    const Verdict wanted = i == 0 ? Verdict::kReference : other_layout ? Verdict::kBounded : Verdict::kBitwise;
    EXPECT_EQ(run.verdict, wanted) << text;
    EXPECT_GT(run.values_compared, 1000) << text;
    EXPECT_FALSE(run.first_difference.has_value()) << text;
    if (wanted == Verdict::kBitwise) {
      EXPECT_EQ(run.max_abs_diff, 0);
      EXPECT_EQ(run.loss_digest, result.runs[0].loss_digest);
      EXPECT_EQ(run.parameter_digest, result.runs[0].parameter_digest);
    } else {
      EXPECT_GT(run.bound_used, 0.001) << "a bound far above what happens proves nothing: " << text;
      EXPECT_LE(run.bound_used, 1) << text;
    }
    ExpectClosedForms(config, run);
    EXPECT_EQ(run.peak_gathered_bytes.counted, run.peak_gathered_bytes.predicted) << text;
    // Fetching leaves is the same work under every order of the same layout.
    const double fetch_ops = other_layout ? run.leaf_fetch_host_ops : result.runs[0].leaf_fetch_host_ops;
    EXPECT_EQ(run.leaf_fetch_host_ops, fetch_ops) << text;
  }
}

struct Layout {
  int tp, ep, dp;
};

class ParityLayoutTest : public ::testing::TestWithParam<Layout> {};

TEST_P(ParityLayoutTest, EveryOrderHoldsAndMovesItsClosedForm) {
  const Layout& layout = GetParam();
  ParityConfig config = SmallConfig(layout.tp, layout.ep, layout.dp, kBuiltin);
  ExpectHolds(config);
}

// World sizes 1 to 16, with replica counts that are no power of two, EDP groups of 1, 2 and 3, experts on one rank.
INSTANTIATE_TEST_SUITE_P(Layouts, ParityLayoutTest,
                         ::testing::Values(Layout{1, 1, 1}, Layout{1, 2, 2}, Layout{1, 4, 4}, Layout{1, 1, 3},
                                           Layout{2, 1, 1}, Layout{2, 2, 2}, Layout{2, 2, 4}, Layout{2, 4, 8},
                                           Layout{2, 1, 3}, Layout{4, 1, 2}, Layout{4, 2, 2}, Layout{1, 1, 5}),
                         [](const auto& info) {
                           return absl::StrCat("Tp", info.param.tp, "Ep", info.param.ep, "Dp", info.param.dp);
                         });

TEST(ParityTest, DoublePrecisionHolds) {
  ParityConfig config = SmallConfig(2, 2, 4, kBuiltin);
  config.base.model.dtype = DType::kF64;
  ExpectHolds(config);
}

TEST(ParityTest, BrainFloatHolds) {
  ParityConfig config = SmallConfig(2, 2, 4, kBuiltin);
  config.base.model.dtype = DType::kBF16;
  ExpectHolds(config);
}

TEST(ParityTest, EveryNumberOfRoutesAndCapacitiesThatDoNotDivide) {
  for (const auto& [top_k, factor] :
       std::vector<std::pair<int, const char*>>{{1, "0.7"}, {2, "1.3"}, {3, "0.9"}, {4, "0.6"}}) {
    SCOPED_TRACE(absl::StrCat("top_k ", top_k, " capacity factor ", factor));
    ParityConfig config = SmallConfig(2, 2, 2, kBuiltin, 2);
    config.base.model.top_k = top_k;
    config.base.model.min_capacity = 1;
    config.base.model.capacity_factor = *moe::Rational::Parse(factor);
    ParityConfig bytes = config;
    bytes.base.model.min_capacity = 4;
    ExpectHolds(bytes);
    ASSERT_OK_AND_ASSIGN(const ParityResult tight, RunParityOnThreads(config, TestCorpus()));
    EXPECT_TRUE(tight.AllHold()) << ResultText(tight);
    EXPECT_GT(tight.runs[0].dropped_routes, 0) << ResultText(tight);
  }
}

TEST(ParityTest, SwiGluWithBiasesAndNothingDropped) {
  ParityConfig config = SmallConfig(2, 2, 2, kBuiltin);
  config.base.model.activation = moe::ExpertActivation::kSwiGlu;
  config.base.model.expert_bias = true;
  config.base.model.capacity_factor = moe::Rational();
  config.base.model.z_coefficient = 0.01f;
  config.judge_reference = true;
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  EXPECT_EQ(result.runs[0].dropped_routes, 0);
}

// Routing as DeepSeek-V3's, short of its bias: sigmoid scores, groups, normalised and scaled weights.
TEST(ParityTest, SigmoidScoresInGroupsHold) {
  for (int top_k : {1, 2, 3}) {
    SCOPED_TRACE(top_k);
    ParityConfig config = SmallConfig(2, 2, 2, kBuiltin);
    LanguageModelConfig& model = config.base.model;
    model.top_k = top_k;
    model.score = moe::ScoreFunction::kSigmoid;
    model.route_scale = 2.5;
    model.groups = 2;
    model.groups_kept = top_k == 3 ? 2 : 1;
    model.group_score = moe::GroupScore::kTopTwoSum;
    model.z_coefficient = 0.01f;
    model.balance_coefficient = 0.1f;
    ExpectHolds(config);
    model.dtype = DType::kF64;
    ExpectHolds(config);
  }
}

// Shared experts, gated shared experts and residual MoE beside the routed ones, in whole runs.
TEST(ParityTest, DenseBranchesHold) {
  using Change = std::function<void(LanguageModelConfig&)>;
  const std::vector<Change> branches = {
      [](LanguageModelConfig& model) { model.shared_experts = 2; },
      [](LanguageModelConfig& model) { model.shared_experts = 1, model.shared_gate = true; },
      [](LanguageModelConfig& model) { model.residual_moe = true; },
  };
  for (size_t i = 0; i < branches.size(); ++i) {
    SCOPED_TRACE(i);
    ParityConfig config = SmallConfig(2, 2, 2, kBuiltin, 2);
    branches[i](config.base.model);
    config.base.model.activation = i == 1 ? moe::ExpertActivation::kSwiGlu : moe::ExpertActivation::kGelu;
    config.base.model.expert_bias = i != 0;
    ExpectHolds(config);
    for (DType dtype : {DType::kF64, DType::kBF16}) {
      ParityConfig other = SmallConfig(2, 1, 2, {"fused", "token_sliced"}, 2);
      branches[i](other.base.model);
      other.base.model.dtype = dtype;
      ExpectHolds(other);
    }
  }
}

TEST(ParityTest, DenseBranchesAreTheSameBitsRecomputedAndOnWorkerStreams) {
  ParityConfig config = SmallConfig(2, 2, 2, {"fused", "fused", "fused"});
  config.base.model.residual_moe = true;
  config.entries[1].change = [](TrainingConfig& own) { own.model.recompute = true; };
  config.entries[2].change = [](TrainingConfig& own) { own.model.recompute = own.worker_streams = true; };
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
}

TEST(ParityTest, FetchPoliciesGiveTheSameBitsAndTheirOwnCounts) {
  ParityConfig config = SmallConfig(2, 2, 4, {"fused"}, 4);
  for (const char* policy : {"coalesced", "per_parameter", "off"}) {
    config.entries.push_back(*NamedEntry("fused", policy));
  }
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  for (size_t i = 1; i < result.runs.size(); ++i) {
    EXPECT_EQ(result.runs[i].verdict, Verdict::kBitwise) << ResultText(result);
    EXPECT_EQ(result.runs[i].parameter_digest, result.runs[0].parameter_digest);
  }
  EXPECT_LE(result.runs[0].leaf_fetch_host_ops, 10) << "flat";
  EXPECT_GT(result.runs[1].leaf_fetch_host_ops, result.runs[0].leaf_fetch_host_ops) << "coalesced";
  EXPECT_GT(result.runs[2].leaf_fetch_host_ops, result.runs[1].leaf_fetch_host_ops) << "per_parameter";
}

TEST(ParityTest, RecomputationChangesNoBit) {
  ParityConfig config = SmallConfig(2, 2, 2, {"fused", "fused", "token_sliced"});
  for (size_t i = 1; i < 3; ++i) {
    config.entries[i].change = [](TrainingConfig& own) { own.model.recompute = true; };
  }
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  EXPECT_EQ(result.runs[1].bytes.ep.counted, 3 * result.runs[0].bytes.ep.counted / 2) << "one more forward";
}

// Options of the fetch that may change speed and memory, never a bit. Prefetch, reuse and persistence see each state of
// the recorded order: recording, complete, and complete again after the tests' own reads of gradients.
TEST(ParityTest, FetchOptionsChangeNoBit) {
  using Options = zero3::PartitionedModelOptions;
  const std::vector<std::function<void(Options&)>> changes = {
      [](Options& own) { own.prefetch_bytes = 1 << 20; },  [](Options& own) { own.reuse_distance_bytes = 1 << 20; },
      [](Options& own) { own.persistent_elements = 20; },  // norms stay, the rest does not
      [](Options& own) { own.reduce_bucket_bytes = 256; }, [](Options& own) { own.verify_shards = true; },
  };
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    ParityConfig config = SmallConfig(2, 2, 4, {"fused"}, 4);
    for (const auto& change : changes) {
      ParityEntry entry = *NamedEntry("fused", policy);
      entry.change = [change](TrainingConfig& own) { change(own.zero3); };
      config.entries.push_back(std::move(entry));
    }
    ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
    EXPECT_TRUE(result.AllHold()) << policy << "\n" << ResultText(result);
  }
}

// Compute and communication on threads of their own, slowed down at random places, with freed memory poisoned: a
// missing edge between the two streams shows as other bits.
TEST(ParityTest, WorkerStreamsWithDelaysChangeNoBit) {
  ParityConfig config = SmallConfig(2, 2, 2, {"fused"}, 3);
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    for (const int64_t late : {0, 1}) {
      ParityEntry entry = *NamedEntry("fused", policy);
      entry.change = [late](TrainingConfig& own) {
        own.worker_streams = true;
        own.zero3.prefetch_bytes = 1 << 20;
        own.delay = [late](absl::string_view stream, int64_t n) {
          const bool slow = (stream == "comm") == (late == 1) && n % 7 == late;
          return slow ? absl::Microseconds(300) : absl::ZeroDuration();
        };
      };
      config.entries.push_back(std::move(entry));
    }
  }
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
}

TEST(ParityTest, CountedBytesAreNotBelowTheBoundOfTheRouting) {
  ParityConfig config = SmallConfig(2, 4, 4, {"reference", "token_sliced", "unsharded"});
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  for (const ParityRun& run : result.runs) {
    EXPECT_GT(run.bytes.ep.bound, 0);
    EXPECT_GE(run.bytes.ep.counted, run.bytes.ep.bound) << run.order;
    EXPECT_GE(run.bytes.tp.counted, run.bytes.tp.bound) << run.order;
    EXPECT_EQ(run.bytes.tp.bound > 0, run.order != "unsharded") << run.order;
    EXPECT_GT(run.bytes.tp_bound_at_least_ep, run.bytes.tp.bound) << run.order;
  }
}

// An order that sums tokens over TP, both ways, sends what any order must there when no token is dropped.
TEST(ParityTest, TokensSummedOverLanesAreAtTheBoundOfTheLanes) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference"});
  config.base.model.capacity_factor = *moe::Rational::Create(0, 1);
  ParityEntry entry;
  entry.name = "token_sums";
  ASSERT_OK_AND_ASSIGN(entry.order, moe::ParseOrder(R"pb(
                                                      name: "token_sums"
                                                      step { kind: COPY axis: TP }
                                                      step { kind: DISPATCH dim: SLOTS }
                                                      step { kind: ALL_TO_ALL axis: EP }
                                                      step { kind: EXPERTS }
                                                      step { kind: ALL_TO_ALL axis: EP }
                                                      step { kind: COMBINE to: PARTIAL }
                                                      step { kind: ALL_REDUCE axis: TP }
                                                    )pb",
                                                    "token_sums"));
  entry.judged_by = JudgedBy::kDense;
  config.entries.push_back(entry);
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  EXPECT_GT(result.runs[1].bytes.tp.bound, 0);
  EXPECT_EQ(result.runs[1].bytes.tp.counted, result.runs[1].bytes.tp.bound);
  EXPECT_GT(result.runs[0].bytes.tp.counted, result.runs[0].bytes.tp.bound);
}

// Nodes of two TP groups: exchanges in two levels have their order's bits, and every byte is booked where it goes.
TEST(ParityTest, TwoLevelOrdersOverNodes) {
  ParityConfig config =
      SmallConfig(2, 4, 4,
                  {"reference", "two_level(reference)", "two_level(fused)", "two_level(token_sliced)",
                   "overlapped(two_level(token_sliced))", "dedup", "two_level(dedup)", "per_node(dedup)"});
  config.ranks_per_node = 4;
  config.base.model.experts = 8;  // two on each rank, for two chunks
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  for (const ParityRun& run : result.runs) {
    EXPECT_GT(run.bytes.ep_inter_node.counted, 0) << run.order;
    EXPECT_EQ(run.bytes.ep_inter_node.counted, run.bytes.ep_inter_node.predicted) << run.order;
    EXPECT_EQ(run.bytes.ep.counted, run.bytes.ep.predicted) << run.order;
    EXPECT_GE(run.bytes.ep_inter_node.counted, run.bytes.ep_inter_node.bound) << run.order;
  }
  for (int i : {1, 2, 3, 4}) EXPECT_EQ(result.runs[i].verdict, Verdict::kBitwise) << result.runs[i].order;
  EXPECT_EQ(result.runs[5].parameter_digest, result.runs[6].parameter_digest);
  EXPECT_EQ(result.runs[5].parameter_digest, result.runs[7].parameter_digest);
  // A row per token and rank is more than must go between nodes, a row per token and node is not.
  EXPECT_GT(result.runs[5].bytes.ep_inter_node.counted, result.runs[5].bytes.ep_inter_node.bound);
  EXPECT_EQ(result.runs[7].bytes.ep_inter_node.counted, result.runs[7].bytes.ep_inter_node.bound);
  EXPECT_EQ(result.runs[0].bytes.ep_inter_node.counted, result.runs[1].bytes.ep_inter_node.counted);
}

TEST(ParityTest, TwoLevelOrdersNeedEqualNodes) {
  ParityConfig config = SmallConfig(2, 4, 4, {"reference", "two_level(fused)"});
  config.ranks_per_node = 6;
  EXPECT_THAT(RunParityOnThreads(config, TestCorpus()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("on nodes 0, 0, 0, 1")));
}

TEST(ParityTest, NearTiesOfLowPrecisionAreCountedNotForgiven) {
  // In bf16 the router sees rounded activations, so some close scores change places.
  ParityConfig config = SmallConfig(2, 2, 4, {"reference"}, 6);
  config.judge_reference = true;
  config.base.model.dtype = DType::kBF16;
  config.base.model.sequence = 48;
  ASSERT_OK_AND_ASSIGN(const ParityResult result, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(result.AllHold()) << ResultText(result);
  EXPECT_GT(result.runs[0].routing_differences, 0);
  EXPECT_LT(result.runs[0].routing_differences, 50);
}

TEST(ParityTest, ClippedRunsHoldToo) {
  ParityConfig config = SmallConfig(2, 2, 4, kBuiltin);
  config.base.zero3.max_gradient_norm = 0.25;
  ExpectHolds(config);
}

TEST(ParityTest, TheNaiveRunTakesPartAsReferenceAndAsCandidate) {
  ParityConfig config = SmallConfig(2, 2, 2, {"dense", "reference", "unsharded"}, 5);
  ASSERT_OK_AND_ASSIGN(const ParityResult judged, RunParityOnThreads(config, TestCorpus()));
  EXPECT_TRUE(judged.AllHold()) << ResultText(judged);
  EXPECT_EQ(judged.runs[1].verdict, Verdict::kBounded);
  EXPECT_EQ(judged.runs[2].verdict, Verdict::kBounded);
  ASSERT_EQ(judged.runs[0].loss.size(), 5u);
  for (int step = 0; step < 5; ++step) EXPECT_NEAR(judged.runs[0].loss[step], judged.runs[1].loss[step], 1e-4);

  config = SmallConfig(2, 2, 2, {"reference", "dense"});
  config.judge_reference = false;
  ASSERT_OK_AND_ASSIGN(const ParityResult candidate, RunParityOnThreads(config, TestCorpus()));
  EXPECT_EQ(candidate.runs[1].verdict, Verdict::kBounded) << ResultText(candidate);
  EXPECT_GT(candidate.runs[1].bound_used, 0);
}

TEST(ParityTest, RunsAreRepeatableAndTheSeedMatters) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference", "fused"});
  ASSERT_OK_AND_ASSIGN(const ParityResult first, RunParityOnThreads(config, TestCorpus()));
  ASSERT_OK_AND_ASSIGN(const ParityResult again, RunParityOnThreads(config, TestCorpus()));
  EXPECT_EQ(first.runs[0].parameter_digest, again.runs[0].parameter_digest);
  EXPECT_EQ(first.runs[0].loss_digest, again.runs[0].loss_digest);
  config.base.seed = 2;
  ASSERT_OK_AND_ASSIGN(const ParityResult other, RunParityOnThreads(config, TestCorpus()));
  EXPECT_NE(first.runs[0].parameter_digest, other.runs[0].parameter_digest);
  EXPECT_NE(first.runs[0].loss_digest, other.runs[0].loss_digest);
}

TEST(ParityTest, BadConfigurationsAreOneClearLine) {
  ParityConfig config = SmallConfig(2, 2, 2, {"reference"});
  config.steps = 0;
  EXPECT_THAT(RunParityOnThreads(config, TestCorpus()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("steps is 0")));
  config = SmallConfig(2, 2, 2, {});
  EXPECT_THAT(RunParityOnThreads(config, TestCorpus()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 runs")));
  config = SmallConfig(2, 3, 2, {"reference"});
  EXPECT_THAT(RunParityOnThreads(config, TestCorpus()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ep 3")));
  config = SmallConfig(2, 4, 2, {"reference"});
  EXPECT_THAT(RunParityOnThreads(config, TestCorpus()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dp")));
  config = SmallConfig(1, 1, 1, {"reference"});
  EXPECT_THAT(RunParityOnThreads(config, *Corpus::FromText("short")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("5 bytes")));
  EXPECT_THAT(NamedEntry("no_such_order", "flat"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such_order")));
}

}  // namespace
}  // namespace evenkeel::testutil
