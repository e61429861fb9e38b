#include "evenkeel/testing/training_options.h"

#include <map>
#include <string>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TrainingOptionsTest, SetsWhatItNames) {
  TrainingConfig config;
  const std::map<std::string, std::string> values = {
      {"activation", "swiglu"},
      {"batches", "16"},
      {"capacity_factor", "0.5"},
      {"dp", "4"},
      {"drop", "position"},
      {"dtype", "bf16"},
      {"ep", "4"},
      {"etp", "1"},
      {"expert_bias", "true"},
      {"experts", "16"},
      {"ffn", "96"},
      {"groups", "4"},
      {"groups_kept", "2"},
      {"heads", "8"},
      {"hidden", "32"},
      {"layers", "3"},
      {"learning_rate", "0.5"},
      {"loss_scale", "256"},
      {"numerics", "canonical"},
      {"recompute", "true"},
      {"residual_moe", "true"},
      {"route_scale", "2"},
      {"score", "sigmoid"},
      {"seed", "9"},
      {"sequence", "12"},
      {"shared_gate", "1"},
      {"shared_experts", "2"},
      {"top_k", "3"},
      {"tp", "8"},
      {"optimizer", "sgd"},
      {"z_coefficient", "0.0625"},
  };
  for (const std::string& name : TrainingOptionNames()) {
    ASSERT_EQ(values.count(name), 1u) << name;
    ASSERT_OK(SetTrainingOption(name, values.at(name), &config));
  }
  const LanguageModelConfig& model = config.model;
  EXPECT_EQ(model.activation, moe::ExpertActivation::kSwiGlu);
  EXPECT_EQ(config.batches, 16);
  EXPECT_EQ(model.capacity_factor, *moe::Rational::Create(1, 2));
  EXPECT_EQ(MeshText(config.mesh), "tp 8 ep 4 dp 4 etp 1");
  EXPECT_EQ(model.drop, moe::DropPolicy::kPosition);
  EXPECT_EQ(model.dtype, DType::kBF16);
  EXPECT_TRUE(model.expert_bias && model.recompute && model.residual_moe && model.shared_gate);
  EXPECT_EQ(model.experts, 16);
  EXPECT_EQ(model.ffn, 96);
  EXPECT_EQ(model.groups, 4);
  EXPECT_EQ(model.groups_kept, 2);
  EXPECT_EQ(model.heads, 8);
  EXPECT_EQ(model.hidden, 32);
  EXPECT_EQ(model.layers, 3);
  EXPECT_EQ(config.zero3.loss_scale.initial, 256);
  EXPECT_TRUE(model.canonical());
  EXPECT_EQ(model.route_scale, 2);
  EXPECT_EQ(model.score, moe::ScoreFunction::kSigmoid);
  EXPECT_EQ(config.seed, 9u);
  EXPECT_EQ(config.zero3.seed, 9u);
  EXPECT_EQ(model.sequence, 12);
  EXPECT_EQ(model.shared_experts, 2);
  EXPECT_EQ(model.top_k, 3);
  EXPECT_EQ(model.z_coefficient, 0.0625f);
  ASSERT_OK(SetTrainingOption("learning_rate", "0.5", &config));
  EXPECT_EQ(config.zero3.optimizer.learning_rate, 0.5);
  ASSERT_OK(SetTrainingOption("optimizer", "adamw", &config));
  EXPECT_EQ(config.zero3.optimizer.kind, zero3::OptimizerOptions::Kind::kAdamW);
  EXPECT_EQ(config.zero3.optimizer.learning_rate, DefaultLearningRate(zero3::OptimizerOptions::Kind::kAdamW));
}

TEST(TrainingOptionsTest, RefusesWithNameValueAndWhy) {
  TrainingConfig config;
  const auto refusal = [&config](const char* name, const char* value) {
    const absl::Status status = SetTrainingOption(name, value, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name << " " << value;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal("colour", "red"), AllOf(HasSubstr("colour=red: unknown"), HasSubstr("activation, batches")));
  EXPECT_EQ(refusal("score", "tanh"), "score=tanh: known are softmax, sigmoid");
  EXPECT_EQ(refusal("top_k", "two"), "top_k=two: wanted a whole number");
  EXPECT_EQ(refusal("top_k", "4294967298"), "top_k=4294967298: wanted a whole number");
  EXPECT_EQ(refusal("learning_rate", ""), "learning_rate=: wanted a number");
  EXPECT_EQ(refusal("recompute", "maybe"), "recompute=maybe: wanted true or false");
  EXPECT_THAT(refusal("capacity_factor", "-1"), HasSubstr("capacity_factor=-1: "));
  EXPECT_THAT(refusal("dtype", "f12"), HasSubstr("unknown dtype 'f12'"));
}

}  // namespace
}  // namespace evenkeel::testutil
