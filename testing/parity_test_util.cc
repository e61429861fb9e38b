#include "evenkeel/testing/parity_test_util.h"

#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::testutil {

ParityConfig SmallConfig(int tp, int ep, int dp, const std::vector<std::string>& orders, int64_t steps) {
  ParityConfig config;
  LanguageModelConfig& model = config.base.model;
  model.sequence = 12;
  model.hidden = 16;
  model.heads = 4;
  model.ffn = 24;
  model.experts = 4;
  config.base.mesh = {.tp = tp, .ep = ep, .dp = dp, .etp = tp};
  config.steps = steps;
  config.judge_reference = false;
  for (const std::string& order : orders) {
    absl::StatusOr<ParityEntry> entry = NamedEntry(order, "flat");
    EK_CHECK_OK(entry);
    config.entries.push_back(*std::move(entry));
  }
  return config;
}

const Corpus& TestCorpus() {
  static const Corpus* corpus = new Corpus(*Corpus::Read(kDefaultCorpus));
  return *corpus;
}

std::string ResultText(const ParityResult& result) {
  std::string text;
  for (const ParityRun& run : result.runs) {
    absl::StrAppendFormat(&text, "%s %s: %s, max %.3g, used %.3g, ep %d/%d tp %d/%d, loss %.4f to %.4f, %s\n",
                          run.order, run.zero3, VerdictName(run.verdict), run.max_abs_diff, run.bound_used,
                          run.bytes.ep.counted, run.bytes.ep.predicted, run.bytes.tp.counted, run.bytes.tp.predicted,
                          run.loss.empty() ? 0 : run.loss.front(), run.loss.empty() ? 0 : run.loss.back(), run.note);
    if (!run.first_difference.has_value()) continue;
    const FirstDifference& d = *run.first_difference;
    absl::StrAppendFormat(&text, "  step %d, %s, rank %d, index %d: %.9g, %.9g, %g ulps, bound %.3g\n", d.step,
                          d.tensor, d.rank, d.index, d.reference, d.candidate, d.ulps, d.bound);
  }
  return text;
}

}  // namespace evenkeel::testutil
