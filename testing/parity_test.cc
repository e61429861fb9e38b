#include "evenkeel/testing/parity.h"

#include <string>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

LanguageModelConfig SmallModel() {
  LanguageModelConfig model;
  model.sequence = 12;
  model.hidden = 16;
  model.heads = 4;
  model.ffn = 24;
  model.experts = 4;
  return model;
}

ParityConfig Config(comm::MeshShape mesh, std::vector<std::string> orders, int64_t steps = 3) {
  ParityConfig config;
  config.base.model = SmallModel();
  config.base.mesh = mesh;
  config.steps = steps;
  for (const std::string& order : orders) config.entries.push_back(*NamedEntry(order, "flat"));
  return config;
}

const Corpus& Text() {
  static const Corpus* corpus = new Corpus(*Corpus::Read(kDefaultCorpus));
  return *corpus;
}

std::string Describe(const ParityResult& result) {
  std::string text;
  for (const ParityRun& run : result.runs) {
    text += run.order + " " + run.zero3 + ": " + VerdictName(run.verdict) + ", " + run.note;
    if (run.first_difference.has_value()) {
      const FirstDifference& d = *run.first_difference;
      text += " [step " + std::to_string(d.step) + " " + d.tensor + " rank " + std::to_string(d.rank) + " index " +
              std::to_string(d.index) + " " + std::to_string(d.reference) + " " + std::to_string(d.candidate) +
              " bound " + std::to_string(d.bound) + "]";
    }
    text += " ms " + std::to_string(run.ms_per_step) + " loss " + std::to_string(run.loss.front()) + ".." +
            std::to_string(run.loss.back()) + " bytes " + std::to_string(run.ep.counted) + "/" +
            std::to_string(run.ep.predicted) + " " + std::to_string(run.tp.counted) + "/" +
            std::to_string(run.tp.predicted) + "\n";
  }
  return text;
}

TEST(ParityTest, OrdersOfOneLayoutAreBitwiseEqual) {
  ASSERT_OK_AND_ASSIGN(const ParityResult result,
                       RunParityOnThreads(Config({.tp = 2, .ep = 2, .dp = 2, .etp = 2},
                                                 {"reference", "drop_gather", "fused", "unsharded"}),
                                          Text()));
  std::printf("%s", Describe(result).c_str());
  EXPECT_TRUE(result.AllHold()) << Describe(result);
}

}  // namespace
}  // namespace evenkeel::testutil
