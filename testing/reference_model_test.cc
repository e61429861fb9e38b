#include "evenkeel/testing/reference_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/testing/reference_optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using reference::Matrix;
using reference::Rounding;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kUnitF32 = 5.9604644775390625e-08;  // 2^-24

Matrix Random(int64_t rows, int64_t cols, const std::string& name, double scale) {
  const PhiloxStream stream(PhiloxKey(5).Add(name));
  Matrix out(rows, cols);
  for (size_t i = 0; i < out.value.size(); ++i) out.value[i] = static_cast<float>(scale * stream.Normal(i));
  return out;
}

ReferenceConfig SmallConfig(int64_t top_k) {
  ReferenceConfig config;
  config.vocabulary = 11;
  config.sequence = 5;
  config.hidden = 8;
  config.heads = 2;
  config.layers = 2;
  config.ffn = 12;
  config.router.experts = 4;
  config.router.top_k = top_k;
  config.router.capacity_numerator = 1;
  config.router.balance_coefficient = 0.05;
  config.router.z_coefficient = 0.01;
  return config;
}

ReferenceTensors Parameters(const ReferenceModel& model, double scale = 0.4) {
  ReferenceTensors tensors = model.ZeroTensors();
  for (auto& [name, tensor] : tensors) {
    tensor = Random(tensor.rows, tensor.cols, name, scale);
    if (absl::StrContains(name, "norm")) {
      for (double& x : tensor.value) x += 1;
    }
  }
  return tensors;
}

std::vector<ReferenceBatch> Batches(const ReferenceConfig& config, int replicas, int64_t sequences) {
  std::vector<ReferenceBatch> batches(replicas);
  for (int r = 0; r < replicas; ++r) {
    const PhiloxStream stream(PhiloxKey(7).Add(static_cast<uint64_t>(r)));
    for (int64_t i = 0; i < sequences * config.sequence; ++i) {
      batches[r].inputs.push_back(static_cast<int32_t>(stream.Below(2 * i, config.vocabulary)));
      batches[r].targets.push_back(static_cast<int32_t>(stream.Below(2 * i + 1, config.vocabulary)));
    }
  }
  return batches;
}

std::vector<std::vector<ReferenceRoutes>> RoutesOf(const ReferenceStep& step) {
  std::vector<std::vector<ReferenceRoutes>> routes;
  for (const ReferenceReplica& replica : step.replicas) {
    routes.emplace_back();
    for (const ReferenceRouting& routing : replica.routing) routes.back().push_back(routing.used);
  }
  return routes;
}

// Every parameter's gradient against a central difference of the loss, with the routes held fixed (choosing experts
// is a step function). h = 1e-5: truncation about 1e-10, rounding about 1e-16 / h.
void CheckGradients(const ReferenceConfig& config) {
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(config));
  ReferenceTensors parameters = Parameters(model);
  const std::vector<ReferenceBatch> batches = Batches(config, 2, 2);
  ASSERT_OK_AND_ASSIGN(const ReferenceStep step, model.Run(parameters, batches, {}));
  ReferenceRunOptions fixed;
  fixed.replay = RoutesOf(step);
  int64_t checked = 0, moved = 0;
  for (auto& [name, tensor] : parameters) {
    const int64_t size = static_cast<int64_t>(tensor.value.size());
    for (int64_t i = 0; i < size; i += std::max<int64_t>(1, size / 4)) {
      constexpr double kStep = 1e-5;
      const double saved = tensor.value[i];
      tensor.value[i] = saved + kStep;
      ASSERT_OK_AND_ASSIGN(const ReferenceStep up, model.Run(parameters, batches, fixed));
      tensor.value[i] = saved - kStep;
      ASSERT_OK_AND_ASSIGN(const ReferenceStep down, model.Run(parameters, batches, fixed));
      tensor.value[i] = saved;
      const double difference = (up.loss - down.loss) / (2 * kStep);
      EXPECT_NEAR(step.gradients.at(name).value[i], difference, 1e-8 + 1e-6 * std::abs(difference)) << name << " " << i;
      ++checked;
      moved += std::abs(difference) > 1e-6 ? 1 : 0;
    }
  }
  EXPECT_GT(moved, checked / 2) << "most gradients must not vanish, or this test says little";
}

TEST(ReferenceModelTest, GradientsAreFiniteDifferencesTop1) { CheckGradients(SmallConfig(1)); }
TEST(ReferenceModelTest, GradientsAreFiniteDifferencesTop2WithBias) {
  ReferenceConfig config = SmallConfig(2);
  config.expert_bias = true;
  CheckGradients(config);
}
TEST(ReferenceModelTest, GradientsAreFiniteDifferencesTop3SwiGlu) {
  ReferenceConfig config = SmallConfig(3);
  config.swiglu = true;
  config.expert_bias = true;
  CheckGradients(config);
}
TEST(ReferenceModelTest, GradientsAreFiniteDifferencesDropless) {
  ReferenceConfig config = SmallConfig(2);
  config.router.capacity_numerator = 0;
  CheckGradients(config);
}

TEST(ReferenceModelTest, GradientsAreFiniteDifferencesBesideADenseBranch) {
  for (ReferenceMix mix : {ReferenceMix::kAdd, ReferenceMix::kSigmoid, ReferenceMix::kSoftmax}) {
    SCOPED_TRACE(static_cast<int>(mix));
    ReferenceConfig config = SmallConfig(2);
    config.branch = mix;
    config.branch_ffn = 6;
    config.expert_bias = config.swiglu = mix != ReferenceMix::kSigmoid;
    CheckGradients(config);
  }
}

TEST(ReferenceModelTest, GradientsAreFiniteDifferencesSigmoidScaledInGroups) {
  for (int top_k : {1, 2, 3}) {
    ReferenceConfig config = SmallConfig(top_k);
    config.router.sigmoid = true;
    config.router.route_scale = 2.5;
    config.router.experts = 6;
    config.router.groups = 3;
    config.router.groups_kept = 2;
    config.router.group_top_two = top_k == 2;
    CheckGradients(config);
  }
}

TEST(ReferenceModelTest, ActivationGradientsAreFiniteDifferencesThroughTheEmbedding) {
  // A position row moves the boundary behind the embedding for every sequence of a replica.
  ReferenceConfig config = SmallConfig(2);
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(config));
  const ReferenceTensors parameters = Parameters(model);
  const std::vector<ReferenceBatch> batches = Batches(config, 1, 2);
  ASSERT_OK_AND_ASSIGN(const ReferenceStep step, model.Run(parameters, batches, {}));
  const Matrix& dx = step.replicas[0].activation_gradients[0];
  for (int64_t c = 0; c < config.hidden; ++c) {
    EXPECT_NEAR(step.gradients.at("embedding.position").at(3, c), dx.at(3, c) + dx.at(8, c), 1e-15);
  }
}

TEST(ReferenceModelTest, DroppedTokensPassByTheExperts) {
  ReferenceConfig config = SmallConfig(1);
  config.router.capacity_numerator = 1;
  config.router.capacity_denominator = 4;
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(config));
  ASSERT_OK_AND_ASSIGN(const ReferenceStep step, model.Run(Parameters(model), Batches(config, 1, 2), {}));
  const ReferenceReplica& replica = step.replicas[0];
  int dropped = 0;
  for (int64_t t = 0; t < 10; ++t) {
    if (replica.routing[0].used.kept[t]) continue;
    ++dropped;
    for (int64_t c = 0; c < config.hidden; ++c) {
      EXPECT_EQ(replica.activations[2].at(t, c), replica.activations[1].at(t, c));
    }
  }
  EXPECT_GT(dropped, 2);
}

Matrix Probabilities(std::vector<std::vector<double>> rows) {
  Matrix p(static_cast<int64_t>(rows.size()), static_cast<int64_t>(rows[0].size()));
  for (int64_t r = 0; r < p.rows; ++r) std::copy(rows[r].begin(), rows[r].end(), p.value.begin() + r * p.cols);
  return p;
}

TEST(ReferenceRoutingTest, TiesGoToTheLowestExpertAndToken) {
  const Matrix p = Probabilities({{.25, .25, .25, .25}, {.1, .4, .4, .1}, {.25, .25, .25, .25}});
  ReferenceRouterConfig config{.experts = 4, .top_k = 3};
  EXPECT_THAT(ChooseRoutes(config, p, 2).expert, ElementsAre(0, 1, 2, 1, 2, 0, 0, 1, 2));
  // Expert 0 is chosen with .25, .1, .25: the least probable goes. Experts 1 and 2: the later of the equal two.
  EXPECT_THAT(ChooseRoutes(config, p, 2).kept, ElementsAre(1, 1, 1, 1, 1, 0, 1, 0, 0));
  config.drop = ReferenceDrop::kPosition;
  EXPECT_THAT(ChooseRoutes(config, p, 2).kept, ElementsAre(1, 1, 1, 1, 1, 1, 0, 0, 0));
}

TEST(ReferenceRoutingTest, OnlyTheBestGroupsMayBeChosenFrom) {
  const Matrix p = Probabilities({{.9, .1, .6, .5, .3, .2}});
  ReferenceRouterConfig config{.experts = 6, .top_k = 2, .groups = 3, .groups_kept = 1};
  EXPECT_THAT(ChooseRoutes(config, p, 9).expert, ElementsAre(0, 1));
  config.group_top_two = true;
  EXPECT_THAT(ChooseRoutes(config, p, 9).expert, ElementsAre(2, 3));
  config.groups_kept = 2;
  EXPECT_THAT(ChooseRoutes(config, p, 9).expert, ElementsAre(0, 2));
}

TEST(ReferenceRoutingTest, Top2FirstChoicesComeBeforeSecondChoices) {
  const Matrix p = Probabilities({{.6, .4}, {.4, .6}, {.4, .6}});
  const ReferenceRouterConfig config{.experts = 2, .top_k = 2};
  EXPECT_THAT(ChooseRoutes(config, p, 2).expert, ElementsAre(0, 1, 1, 0, 1, 0));
  EXPECT_THAT(ChooseRoutes(config, p, 2).kept, ElementsAre(1, 0, 1, 1, 1, 0));
}

TEST(ReferenceRoutingTest, CapacityIsTheLargestNeedRoundedUp) {
  ReferenceRouterConfig config{.experts = 8, .top_k = 2, .capacity_numerator = 5, .capacity_denominator = 4};
  EXPECT_EQ(ReferenceCapacity(config, {32}), 10);
  EXPECT_EQ(ReferenceCapacity(config, {3, 33, 7}), 11);
  config.capacity_multiple = 4;
  EXPECT_EQ(ReferenceCapacity(config, {3, 33, 7}), 12);
  config.min_capacity = 13;
  EXPECT_EQ(ReferenceCapacity(config, {3}), 16);
  config.capacity_numerator = 0;
  EXPECT_EQ(ReferenceCapacity(config, {3, 33}), 36);
}

TEST(ReferenceModelTest, CapacityIsSharedByTheReplicasOfOneExchange) {
  ReferenceConfig config = SmallConfig(1);
  config.capacity_replicas = 2;
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(config));
  std::vector<ReferenceBatch> batches = Batches(config, 4, 1);
  batches[1] = Batches(config, 1, 4)[0];
  ASSERT_OK_AND_ASSIGN(const ReferenceStep step, model.Run(Parameters(model), batches, {}));
  EXPECT_EQ(step.replicas[0].routing[0].capacity, 5);
  EXPECT_EQ(step.replicas[1].routing[0].capacity, 5);
  EXPECT_EQ(step.replicas[2].routing[0].capacity, 2);
}

// What f32 arithmetic really does, against the model of it.
struct FloatCheck {
  double worst = 0;  // largest |error| / bound
  void Compare(float value, const Matrix& wanted, int64_t i) {
    worst = std::max(worst, std::abs(value - wanted.value[i]) / Bound(wanted, i, kUnitF32));
  }
};

TEST(ReferenceMathTest, FloatProductsStayInsideTheBoundAndNearIt) {
  const Rounding rounding{.track = true};
  const Matrix a = Random(9, 200, "a", 1), b = Random(200, 7, "b", 1);
  const Matrix c = MatMul(a, b, rounding);
  FloatCheck check;
  for (int64_t i = 0; i < 9; ++i) {
    for (int64_t j = 0; j < 7; ++j) {
      float sum = 0;
      for (int64_t p = 0; p < 200; ++p) sum += static_cast<float>(a.at(i, p)) * static_cast<float>(b.at(p, j));
      check.Compare(sum, c, i * 7 + j);
    }
  }
  EXPECT_LE(check.worst, 1);
  EXPECT_GT(check.worst, 1e-3) << "a bound a thousand times too wide finds nothing";
}

TEST(ReferenceMathTest, FloatSoftmaxAndNormStayInsideTheBound) {
  const Rounding rounding{.track = true};
  const Matrix x = Random(8, 50, "x", 3), w = Random(1, 50, "w", 1);
  const Matrix p = Softmax(x, false, rounding), y = RmsNorm(x, w, 1e-5, rounding);
  FloatCheck softmax, norm;
  for (int64_t r = 0; r < x.rows; ++r) {
    float top = -1e30f, sum = 0, squares = 0;
    for (int64_t c = 0; c < 50; ++c) top = std::max(top, static_cast<float>(x.at(r, c)));
    for (int64_t c = 0; c < 50; ++c) {
      sum += std::exp(static_cast<float>(x.at(r, c)) - top);
      squares += static_cast<float>(x.at(r, c)) * static_cast<float>(x.at(r, c));
    }
    const float inverse = 1.0f / std::sqrt(squares / 50.0f + 1e-5f);
    for (int64_t c = 0; c < 50; ++c) {
      softmax.Compare(std::exp(static_cast<float>(x.at(r, c)) - top) / sum, p, r * 50 + c);
      norm.Compare(static_cast<float>(x.at(r, c)) * inverse * static_cast<float>(w.value[c]), y, r * 50 + c);
    }
  }
  EXPECT_LE(softmax.worst, 1);
  EXPECT_LE(norm.worst, 1);
}

// The largest |difference| / bound over the boundaries and over the gradients of two steps.
double WorstRatio(const ReferenceStep& judged, const ReferenceStep& wanted) {
  double worst = 0;
  const auto compare = [&](const Matrix& a, const Matrix& b) {
    for (size_t i = 0; i < a.value.size(); ++i) {
      const double difference = std::abs(a.value[i] - b.value[i]);
      if (difference > 0) worst = std::max(worst, difference / Bound(b, i, kUnitF32));
    }
  };
  for (size_t r = 0; r < wanted.replicas.size(); ++r) {
    for (size_t b = 0; b < wanted.replicas[r].activations.size(); ++b) {
      compare(judged.replicas[r].activations[b], wanted.replicas[r].activations[b]);
    }
  }
  for (const auto& [name, gradient] : wanted.gradients) compare(judged.gradients.at(name), gradient);
  return worst;
}

TEST(ReferenceModelTest, TheBoundCatchesOneRouteInTheWrongPlace) {
  ReferenceConfig config;
  config.router = {.experts = 8, .top_k = 2, .capacity_numerator = 5, .capacity_denominator = 4};
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(config));
  const ReferenceTensors parameters = Parameters(model, 0.05);
  const std::vector<ReferenceBatch> batches = Batches(config, 2, 1);
  ReferenceRunOptions options;
  options.dense.track = options.router.track = true;
  ASSERT_OK_AND_ASSIGN(const ReferenceStep wanted, model.Run(parameters, batches, options));
  ReferenceRunOptions planted;
  planted.replay = RoutesOf(wanted);
  ASSERT_OK_AND_ASSIGN(const ReferenceStep same, model.Run(parameters, batches, planted));
  EXPECT_EQ(WorstRatio(same, wanted), 0);
  ReferenceRoutes& routes = planted.replay[1][1];
  for (int64_t e = 0; e < 8; ++e) {
    if (e != routes.expert[34] && e != routes.expert[35]) routes.expert[35] = e;
  }
  routes.kept[35] = 1;
  ASSERT_OK_AND_ASSIGN(const ReferenceStep judged, model.Run(parameters, batches, planted));
  EXPECT_GT(WorstRatio(judged, wanted), 20);
  // A relative change of 1e-3 in one weight is seen too.
  ReferenceTensors moved = parameters;
  moved.at("layer.0.moe.w_in").value[100] *= 1.001;
  ASSERT_OK_AND_ASSIGN(const ReferenceStep judged_moved, model.Run(moved, batches, {.replay = RoutesOf(wanted)}));
  EXPECT_GT(WorstRatio(judged_moved, wanted), 1);
}

TEST(ReferenceModelTest, SgdAndAdamWAreTheirFormulas) {
  ReferenceTensors parameters, gradients;
  parameters["p"] = Probabilities({{1.0, -2.0}});
  gradients["p"] = Probabilities({{0.5, 0.25}});
  ReferenceSgd(0.1, 0.5, gradients, &parameters);
  EXPECT_THAT(parameters["p"].value, ElementsAre(1.0 - 0.1 * (0.5 + 0.5), -2.0 - 0.1 * (0.25 - 1.0)));
  EXPECT_DOUBLE_EQ(ReferenceGlobalNorm(gradients), std::sqrt(0.25 + 0.0625));
  // The first AdamW step moves by the learning rate against the sign, whatever the gradient's size.
  parameters["p"] = Probabilities({{1.0, -2.0}});
  ReferenceAdamWState state;
  ReferenceAdamW({.learning_rate = 0.01, .epsilon = 0, .weight_decay = 0.1}, gradients, &state, &parameters);
  EXPECT_NEAR(parameters["p"].value[0], 1.0 - 0.01 - 0.001, 1e-15);
  EXPECT_NEAR(parameters["p"].value[1], -2.0 - 0.01 + 0.002, 1e-15);
}

TEST(ReferenceModelTest, BadInputIsRefusedWithTheNumbers) {
  ReferenceConfig config = SmallConfig(5);
  EXPECT_THAT(ReferenceModel::Create(config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("experts 4, top_k 5")));
  ASSERT_OK_AND_ASSIGN(const ReferenceModel model, ReferenceModel::Create(SmallConfig(2)));
  ReferenceTensors parameters = Parameters(model);
  std::vector<ReferenceBatch> batches = Batches(model.config(), 1, 1);
  batches[0].inputs[2] = 11;
  EXPECT_THAT(model.Run(parameters, batches, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("below 11")));
  batches = Batches(model.config(), 1, 1);
  parameters.at("output") = Matrix(8, 10);
  EXPECT_THAT(model.Run(parameters, batches, {}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("output is [8, 10], wanted [8, 11]")));
  parameters.erase("output");
  EXPECT_THAT(model.Run(parameters, batches, {}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("output")));
}

}  // namespace
}  // namespace evenkeel::testutil
