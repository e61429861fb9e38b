// The program behind the parity_test macro (parity.bzl): one parity job on threads with a small model, checked against
// the verdicts that are wanted.
//
//   parity_test_main --candidates=fused,//mine/order.textproto --tp=2 --ep=2 --dp=2
#include <gflags/gflags.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/parity.h"
#include "evenkeel/testing/parity_result.h"

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

namespace evenkeel::testutil {
namespace {

absl::StatusOr<ParityConfig> ConfigFromFlags() {
  ParityConfig config;
  LanguageModelConfig& model = config.base.model;
  model.sequence = 12;
  model.hidden = 16;
  model.ffn = 24;
  model.heads = std::max(4, FLAGS_tp);
  model.hidden = 4 * model.heads;
  model.experts = FLAGS_experts;
  model.top_k = FLAGS_top_k;
  EK_ASSIGN_OR_RETURN(model.capacity_factor, moe::Rational::Parse(FLAGS_capacity_factor));
  EK_ASSIGN_OR_RETURN(model.dtype, ParseDType(FLAGS_dtype));
  config.base.mesh = {.tp = FLAGS_tp, .ep = FLAGS_ep, .dp = FLAGS_dp, .etp = FLAGS_tp};
  config.base.seed = FLAGS_seed;
  config.steps = FLAGS_steps;
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

absl::Status Run() {
  EK_ASSIGN_OR_RETURN(const ParityConfig config, ConfigFromFlags());
  EK_ASSIGN_OR_RETURN(const Corpus corpus, Corpus::Read(kDefaultCorpus));
  EK_ASSIGN_OR_RETURN(const ParityResult result, RunParityOnThreads(config, corpus));
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
