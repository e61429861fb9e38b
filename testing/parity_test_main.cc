// The program behind the parity_test macro (parity.bzl): one parity job on threads with a small model, checked against
// the verdicts that are wanted.
//
//   parity_test_main --candidates=fused,mine/order.textproto --tp=2 --ep=2 --dp=2 --options='score=sigmoid;drop=probs'
#include <gflags/gflags.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/layout_parity.h"
#include "evenkeel/testing/layout_text.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/testing/training_options.h"

DEFINE_string(reference, "reference", "order name, path, or `dense`");
DEFINE_string(candidates, "", "order names or paths, comma separated");
DEFINE_string(policies, "flat", "fetch policies; each order runs under each of them");
DEFINE_int32(tp, 2, "tensor-parallel size");
DEFINE_int32(ep, 2, "expert-parallel size");
DEFINE_int32(dp, 2, "data-parallel replicas");
DEFINE_int32(experts, 4, "experts of a layer");
DEFINE_int32(top_k, 2, "routes per token");
DEFINE_string(capacity_factor, "1.25", "0: nothing is dropped");
DEFINE_string(dtype, "f32", "f32, f64, bf16, or f16 with a dynamic loss scale");
DEFINE_int64(steps, 3, "training steps");
DEFINE_uint64(seed, 1, "of weights and batches");
DEFINE_string(expect, "holds",
              "holds: every candidate is equal or inside its bound; mismatch: every candidate differs");

DEFINE_string(options, "", "NAME=VALUE;...: further options of the training run (training_options.h)");
DEFINE_int32(ranks_per_node, 0, "consecutive ranks on each node; 0: one node");
DEFINE_string(baseline_layout, "", "canonical numerics: the reference's layout; default: that of the candidates");

namespace evenkeel::testutil {
namespace {

absl::Status SetOptions(TrainingConfig* base) {
  const std::pair<const char*, std::string> own[] = {{"capacity_factor", FLAGS_capacity_factor},
                                                     {"dtype", FLAGS_dtype}};
  for (const auto& [name, value] : own) EK_RETURN_IF_ERROR(SetTrainingOption(name, value, base));
  for (const absl::string_view option : absl::StrSplit(FLAGS_options, ';', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> words = absl::StrSplit(option, absl::MaxSplits('=', 1));
    EK_RETURN_IF_ERROR(SetTrainingOption(words.first, words.second, base));
  }
  return absl::OkStatus();
}

absl::StatusOr<comm::MeshShape> BaselineLayout() {
  if (FLAGS_baseline_layout.empty())
    return ParseLayout(absl::StrCat("tp=", FLAGS_tp, ",ep=", FLAGS_ep, ",dp=", FLAGS_dp));
  return ParseLayout(FLAGS_baseline_layout);
}

// Canonical numerics: sizes that every layout can cut, and as many batches as the layout with more replicas has.
absl::Status MakeCanonical(TrainingConfig* base) {
  EK_ASSIGN_OR_RETURN(const comm::MeshShape baseline, BaselineLayout());
  base->model.heads = moe::kCanonicalBlocks;
  base->model.hidden = 4 * moe::kCanonicalBlocks;
  base->batches = std::max(FLAGS_dp, baseline.dp);
  return absl::OkStatus();
}

absl::StatusOr<ParityConfig> ConfigFromFlags() {
  ParityConfig config;
  LanguageModelConfig& model = config.base.model;
  model.sequence = 12;
  model.ffn = 24;
  model.heads = std::max(4, FLAGS_tp);
  model.hidden = 4 * model.heads;
  model.experts = FLAGS_experts;
  model.top_k = FLAGS_top_k;
  config.base.mesh = {.tp = FLAGS_tp, .ep = FLAGS_ep, .dp = FLAGS_dp, .etp = FLAGS_tp};
  config.base.seed = FLAGS_seed;
  if (absl::StrContains(FLAGS_options, "numerics=canonical")) EK_RETURN_IF_ERROR(MakeCanonical(&config.base));
  EK_RETURN_IF_ERROR(SetOptions(&config.base));
  if (!FLAGS_baseline_layout.empty() && !config.base.model.canonical()) {
    return absl::InvalidArgumentError(
        absl::StrCat("baseline_layout=", FLAGS_baseline_layout, " wants canonical numerics"));
  }
  config.steps = FLAGS_steps;
  config.ranks_per_node = FLAGS_ranks_per_node;
  std::vector<std::string> orders = absl::StrSplit(FLAGS_candidates, ',', absl::SkipEmpty());
  orders.insert(orders.begin(), FLAGS_reference);
  const std::vector<std::string> policies = absl::StrSplit(FLAGS_policies, ',', absl::SkipEmpty());
  for (const std::string& order : orders) {
    for (const std::string& policy : policies) {
      EK_ASSIGN_OR_RETURN(ParityEntry entry, NamedEntry(order, policy));
      if (!entry.dense || policy == policies[0]) config.entries.push_back(std::move(entry));
    }
  }
  return config;
}

absl::StatusOr<ParityResult> RunAll(const ParityConfig& config, const Corpus& corpus) {
  if (!config.base.model.canonical() || config.entries[0].dense) return RunParityOnThreads(config, corpus);
  LayoutParityConfig layouts;
  layouts.base = config.base;
  layouts.steps = config.steps;
  EK_ASSIGN_OR_RETURN(const comm::MeshShape baseline, BaselineLayout());
  for (size_t i = 0; i < config.entries.size(); ++i) {
    layouts.runs.push_back({config.entries[i], i == 0 ? baseline : config.base.mesh});
  }
  return RunLayoutParity(layouts, corpus);
}

absl::Status Run() {
  EK_ASSIGN_OR_RETURN(const ParityConfig config, ConfigFromFlags());
  EK_ASSIGN_OR_RETURN(const Corpus corpus, Corpus::Read(kDefaultCorpus));
  EK_ASSIGN_OR_RETURN(const ParityResult result, RunAll(config, corpus));
  bool as_expected = result.runs.size() > 1;
  for (size_t i = 0; i < result.runs.size(); ++i) {
    const ParityRun& run = result.runs[i];
    std::printf("%s (zero3 %s): %s, %s\n", run.order.c_str(), run.zero3.c_str(), VerdictName(run.verdict),
                run.note.c_str());
    if (run.first_difference.has_value()) {
      const FirstDifference& d = *run.first_difference;
      std::printf("  step %lld, %s, rank %d, index %lld: %.9g against %.9g\n", static_cast<long long>(d.step),
                  d.tensor.c_str(), d.rank, static_cast<long long>(d.index), d.reference, d.candidate);
    }
    const bool differs = run.verdict == Verdict::kMismatch;
    as_expected &= differs == (i > 0 && FLAGS_expect == "mismatch");
  }
  if (as_expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("expected: ", FLAGS_expect, "; ", result.runs.size(), " runs"));
}

}  // namespace
}  // namespace evenkeel::testutil

int main(int argc, char** argv) {
  gflags::ParseCommandLineFlags(&argc, &argv, true);
  const absl::Status status = evenkeel::testutil::Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}
