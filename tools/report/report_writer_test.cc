#include "evenkeel/tools/report/report_writer.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/tools/report/loss_chart.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::tools {
namespace {

using ::evenkeel::testutil::ParityResult;
using ::evenkeel::testutil::ParityRun;
using ::evenkeel::testutil::StatusIs;
using ::evenkeel::testutil::Verdict;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ParityRun Run(const std::string& order, Verdict verdict, double offset) {
  ParityRun run;
  run.order = order;
  run.zero3 = "flat";
  run.verdict = verdict;
  for (int step = 0; step < 50; ++step) run.loss.push_back(5.5 * std::exp(-0.03 * step) + offset * step);
  run.bytes.ep = {1234567, 1234567, -1};
  run.bytes.ep_inter_node = {4000, 4000, 3200};
  run.bytes.tp = {100, 96, 64};
  run.bytes.tp_bound_at_least_ep = 80;
  run.collectives = 321;
  run.leaf_fetch_host_ops = 6;
  run.peak_gathered_bytes = {4096, 4096};
  run.ms_per_step = 12.34;
  return run;
}

ParityResult Result() {
  ParityResult result;
  result.config = {{"tp", "2"}, {"corpus", "/data/a<b>&c"}};
  result.runs = {Run("reference", Verdict::kReference, 0), Run("fused", Verdict::kBitwise, 0),
                 Run("unsharded", Verdict::kBounded, 1e-7)};
  return result;
}

ParityResult Mismatch() {
  ParityResult result = Result();
  ParityRun bad = Run("my|order", Verdict::kMismatch, 1e-3);
  bad.max_abs_diff = 0.25;
  bad.first_difference = {7, "grad layer.1.moe.w_in", 3, 41, 1.5, 1.75, 2097152, 0};
  result.runs.push_back(bad);
  return result;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

TEST(ReportWriterTest, JsonHasTheContractsKeysAndRealNumbers) {
  const auto json = nlohmann::json::parse(RenderJson(Mismatch()));
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["config"]["tp"], "2");
  ASSERT_EQ(json["runs"].size(), 4u);
  const auto& fused = json["runs"][1];
  EXPECT_EQ(fused["order"], "fused");
  EXPECT_EQ(fused["verdict"], "bitwise");
  EXPECT_TRUE(fused["first_difference"].is_null());
  EXPECT_EQ(fused["loss"].size(), 50u);
  EXPECT_EQ(fused["bytes"]["ep"]["counted"], 1234567);
  EXPECT_TRUE(fused["bytes"]["ep"]["bound"].is_null());
  EXPECT_EQ(fused["bytes"]["tp"]["bound"], 64);
  EXPECT_EQ(fused["bytes"]["tp"]["bound_at_least_ep"], 80);
  EXPECT_EQ(fused["bytes"]["ep"]["inter_node"]["counted"], 4000);
  EXPECT_EQ(fused["bytes"]["ep"]["inter_node"]["bound"], 3200);
  EXPECT_EQ(fused["peak_gathered_bytes"]["predicted"], 4096);
  EXPECT_EQ(json["runs"][3]["first_difference"]["index"], 41);
  EXPECT_TRUE(json["late_ranks"].is_array());
}

TEST(ReportWriterTest, JsonSurvivesNonFiniteLossAndBrokenUtf8) {
  ParityResult result = Result();
  result.runs[0].loss[3] = std::nan("");
  result.config.push_back({"corpus", "\xff\xfe"});
  const auto json = nlohmann::json::parse(RenderJson(result));
  EXPECT_TRUE(json["runs"][0]["loss"][3].is_null());
}

TEST(ReportWriterTest, TableShowsPredictionOnlyWhereItDiffers) {
  const std::string table = RenderTable(Result());
  EXPECT_THAT(table, HasSubstr("1,234,567 ="));
  EXPECT_THAT(table, HasSubstr("100 (predicted 96)"));
  EXPECT_THAT(table, HasSubstr("bounded"));
  EXPECT_THAT(table, HasSubstr("4,000 ="));  // between nodes
  EXPECT_THAT(table, HasSubstr("1.25"));     // times its bound
  EXPECT_THAT(table, HasSubstr("1.56"));     // TP
}

TEST(ReportWriterTest, MismatchNamesStepTensorRankIndexAndBothValues) {
  const std::string text = RenderDifference(Mismatch().runs[3]);
  EXPECT_THAT(text, HasSubstr("step 7, grad layer.1.moe.w_in, rank 3, index 41"));
  EXPECT_THAT(text, HasSubstr("reference 1.5, candidate 1.75"));
  EXPECT_THAT(RenderMarkdown(Mismatch()), HasSubstr("1 of 3 candidates do NOT hold"));
  EXPECT_THAT(RenderMarkdown(Mismatch()), HasSubstr("my\\|order"));
}

TEST(ReportWriterTest, HtmlEscapesDataAndEmbedsTheCurves) {
  const std::string html = RenderHtml(Mismatch());
  EXPECT_THAT(html, HasSubstr("/data/a&lt;b&gt;&amp;c"));
  EXPECT_THAT(html, Not(HasSubstr("a<b>")));
  EXPECT_THAT(html, HasSubstr("<polyline"));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST(LossChartTest, LeavesOutNonFinitePoints) {
  const std::string svg = RenderLossSvg({{"reference", {1, std::nan(""), HUGE_VAL, 2}}, {"x", {}}});
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
  EXPECT_THAT(RenderLossSvg({}), HasSubstr("<svg"));
}

TEST(ReportWriterTest, WritesEveryFile) {
  const std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/deep/report";
  ASSERT_OK(PrepareOutputFolder(folder));
  ASSERT_OK_AND_ASSIGN(const ReportFiles files, WriteReport(Result(), folder));
  EXPECT_EQ(files.warning, "");
  EXPECT_THAT(files.written, ElementsAre(folder + "/report.json", folder + "/report.html", folder + "/report.md",
                                         folder + "/loss.png"));
  EXPECT_EQ(ReadFile(folder + "/loss.png").substr(1, 3), "PNG");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator()), 4);
}

// A run whose loss was never finite is what one wants to look at: its picture is drawn, whatever is left of it.
TEST(ReportWriterTest, DrawsRunsWithoutAFiniteLoss) {
  ParityResult result = Result();
  for (const size_t broken : {1u, 0u, 2u, 3u}) {
    if (broken >= result.runs.size()) continue;
    for (double& loss : result.runs[broken].loss) loss = std::nan("");
    const std::string folder = std::string(std::getenv("TEST_TMPDIR")) + "/nan" + std::to_string(broken);
    ASSERT_OK(PrepareOutputFolder(folder));
    ASSERT_OK_AND_ASSIGN(const ReportFiles files, WriteReport(result, folder));
    EXPECT_EQ(files.warning, "") << broken;
    EXPECT_EQ(ReadFile(folder + "/loss.png").substr(1, 3), "PNG") << broken;
  }
}

TEST(ReportWriterTest, RefusesAFolderThatIsAFile) {
  const std::string file = std::string(std::getenv("TEST_TMPDIR")) + "/taken";
  std::ofstream(file) << "x";
  EXPECT_THAT(PrepareOutputFolder(file), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(file)));
}

}  // namespace
}  // namespace evenkeel::tools
