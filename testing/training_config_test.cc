#include "evenkeel/testing/training_config.h"

#include <cstdlib>
#include <fstream>
#include <string>

#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

TrainingConfig DefaultConfig(const char* order = "reference") {
  TrainingConfig config;
  config.mesh = {.tp = 2, .ep = 4, .dp = 8, .etp = 2};
  config.order = *moe::FindOrder(order);
  return config;
}

// The only line that ValidateTrainingConfig says about a change of the default.
template <typename Change>
std::string Refusal(Change change) {
  TrainingConfig config = DefaultConfig();
  change(config);
  const absl::Status status = ValidateTrainingConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(std::string(status.message()).find('\n'), std::string::npos);
  return std::string(status.message());
}

TEST(TrainingConfigTest, TheDefaultsOfTheMainJobAreGood) {
  for (const char* order : {"reference", "drop_gather", "unsharded", "fused"}) {
    EXPECT_OK(ValidateTrainingConfig(DefaultConfig(order))) << order;
  }
}

TEST(TrainingConfigTest, EachBadNumberIsNamed) {
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.mesh.ep = 3; }), HasSubstr("ep 3 does not divide experts 8"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) {
                c.mesh.ep = 3;
                c.model.experts = 9;
              }),
              HasSubstr("3"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) {
                c.mesh.tp = 3;
                c.mesh.etp = 3;
              }),
              HasSubstr("tp 3 does not divide heads 4"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.top_k = 9; }), HasSubstr("top_k 9 exceeds experts 8"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.top_k = 0; }), HasSubstr("top_k is 0"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.ffn = 127; }), HasSubstr("etp 2 does not divide ffn 127"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.hidden = 66; }), HasSubstr("heads 4 does not divide hidden 66"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.dtype = DType::kI32; }), HasSubstr("dtype i32"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.zero3.optimizer.learning_rate = -1; }), HasSubstr("learning rate -1"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.mesh.dp = 0; }), HasSubstr("dp is 0"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.groups = 3; }), HasSubstr("groups 3 does not divide experts 8"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.groups = 8; }),
              HasSubstr("groups_kept 1 of 8 groups of 1 experts does not fit top_k 2"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.route_scale = 0; }), HasSubstr("route_scale 0"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.shared_experts = -1; }), HasSubstr("shared_experts is -1"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.model.shared_gate = true; }), HasSubstr("needs shared_experts"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) {
                c.model.shared_experts = 2;
                c.model.residual_moe = true;
              }),
              HasSubstr("residual_moe beside 2 shared_experts"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) {
                c.model.numerics = moe::ExpertNumerics::kCanonical;
                c.model.heads = 12;
                c.model.hidden = 96;
              }),
              HasSubstr("canonical numerics want powers of two, heads is 12"));
  EXPECT_THAT(Refusal([](TrainingConfig& c) { c.batches = 12; }), HasSubstr("batches 12 is not dp 8 times a power"));
}

TEST(TrainingConfigTest, AnOrderBringsItsExpertLayout) {
  const comm::MeshShape mesh{.tp = 2, .ep = 4, .dp = 8, .etp = 2};
  EXPECT_EQ(MeshForOrder(mesh, *moe::FindOrder("unsharded")).etp, 1);
  EXPECT_EQ(MeshForOrder(mesh, *moe::FindOrder("fused")).etp, 2);
  EXPECT_EQ(MeshText(mesh), "tp 2 ep 4 dp 8 etp 2");
}

TEST(TrainingConfigTest, OrdersComeByNameOrFromAFile) {
  ASSERT_OK_AND_ASSIGN(const moe::Order known, LoadOrder("drop_gather"));
  EXPECT_EQ(known.name, "drop_gather");
  EXPECT_THAT(LoadOrder("no_such_order"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such_order is no file")));
  const char* folder = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(folder != nullptr ? folder : ".") + "/mine.textproto";
  ASSERT_OK_AND_ASSIGN(const std::string text, moe::FindOrderText("reference"));
  std::ofstream(path) << text;
  ASSERT_OK_AND_ASSIGN(const moe::Order mine, LoadOrder(path));
  EXPECT_EQ(mine.steps.size(), 7u);
  std::ofstream(path) << "name: \"x\"\nstep { kind: NONSENSE }\n";
  EXPECT_THAT(LoadOrder(path), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("mine.textproto:2")));
  EXPECT_THAT(LoadOrder("/"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/: it is a folder")));
}

TEST(TrainingConfigTest, TheReferenceSharesCapacityAsTheEpGroupDoes) {
  const LanguageModelConfig model;
  EXPECT_EQ(ReferenceConfigOf(model, {.tp = 2, .ep = 4, .dp = 8, .etp = 2}).capacity_replicas, 4);
  EXPECT_EQ(ReferenceConfigOf(model, {.tp = 2, .ep = 4, .dp = 8, .etp = 1}).capacity_replicas, 2);
  EXPECT_EQ(ReferenceConfigOf(model, {.tp = 2, .ep = 1, .dp = 8, .etp = 1}).capacity_replicas, 1);
}

}  // namespace
}  // namespace evenkeel::testutil
