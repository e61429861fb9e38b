// The layer's gradients against slopes of a loss, and against each other when more ranks share the experts.
#include <cmath>
#include <string>
#include <vector>

#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

// Trail 33, 36: an expert's gradient is the sum over all tokens, however many ranks share the experts.
TEST(MoeLayerGradientTest, Trail33_Trail36_ExpertGradientsDoNotDependOnE) {
  for (const char* order : {"reference", "token_sliced"}) {
    std::vector<double> norms;
    for (int ep : {1, 2, 4}) {
      const LayerCase c = {.tp = 1, .ep = ep, .dp = 4, .experts = 4, .top_k = 2, .tokens = 7, .min_capacity = 14};
      const LayerRun run = RunOrder(c, order);
      ExpectLikeDense(c, run, Name(c, order));
      double squares = 0;
      for (const RankRun& rank : run.ranks) {
        if (rank.edp_rank != 0) continue;
        for (double g : SumOverEdp(c, run, rank, &Values::w_in)) squares += g * g;
      }
      norms.push_back(squares);
    }
    EXPECT_GT(norms[0], 0);
    EXPECT_NEAR(norms[1], norms[0], 1e-6 * norms[0]) << order;
    EXPECT_NEAR(norms[2], norms[0], 1e-6 * norms[0]) << order;
  }
}

double Loss(const LayerCase& c, const Order& order) {
  absl::StatusOr<LayerRun> run = RunLayer(c, order);
  EK_CHECK_OK(run);
  double loss = 0;
  for (const RankRun& rank : run->ranks) {
    if (rank.lane != 0) continue;
    for (size_t i = 0; i < rank.values.y.size(); ++i) loss += rank.values.y[i] * rank.values.dy[i];
  }
  return loss;
}

// One element of one tensor, by its index in the whole tensor. The router computes in f32, so its slope needs a wider
// step and bound.
struct Probe {
  std::string name;
  int64_t index;
  double step, bound;
};

// The gradient of an expert tensor's element, summed over the ranks that hold it: a one-hot image of the whole tensor
// says where it is.
double ExpertGradient(const LayerCase& c, const LayerRun& run, const Probe& probe) {
  std::vector<double> one_hot(probe.name[0] == 'w' ? c.experts * c.hidden * c.ffn : c.experts * c.hidden);
  one_hot[probe.index] = 1;
  double gradient = 0;
  for (const Member& member : kExpertMembers) {
    if (member.name != probe.name) continue;
    for (const RankRun& rank : run.ranks) {
      if (probe.name == "b_out" && rank.lane != 0) continue;  // the same on every lane
      const std::vector<double> mask = ExpertShard(c, rank, probe.name, one_hot);
      for (size_t i = 0; i < mask.size(); ++i) gradient += mask[i] * (rank.values.*member.values)[i];
    }
  }
  return gradient;
}

double Gradient(const LayerCase& c, const LayerRun& run, const Probe& probe) {
  if (probe.name == "x") return run.ranks[0].values.dx[probe.index];
  if (probe.name != "router") return ExpertGradient(c, run, probe);
  double gradient = 0;
  for (const RankRun& rank : run.ranks) gradient += rank.lane == 0 ? rank.values.router[probe.index] : 0;
  return gradient;
}

double Slope(const LayerCase& c, const Order& order, const Probe& probe) {
  LayerCase up = c, down = c;
  up.perturb = down.perturb = probe.name;
  up.perturb_index = down.perturb_index = probe.index;
  up.perturb_by = probe.step;
  down.perturb_by = -probe.step;
  return (Loss(up, order) - Loss(down, order)) / (2 * probe.step);
}

TEST(MoeLayerGradientTest, GradientsAreTheSlopesOfTheLoss) {
  const Probe probes[] = {{"w_in", 37, 1e-5, 1e-7}, {"w_gate", 70, 1e-5, 1e-7}, {"w_out", 101, 1e-5, 1e-7},
                          {"b_in", 9, 1e-5, 1e-7},  {"b_out", 17, 1e-5, 1e-7},  {"router", 11, 2e-3, 2e-3},
                          {"x", 21, 2e-3, 2e-3}};
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 2, .tokens = 5};
  c.mode = CapacityMode::kNoDrop;
  c.activation = ExpertActivation::kSwiGlu;
  c.bias = true;
  for (const char* name : {"drop_gather", "fused", "token_sliced", "dedup"}) {
    ASSERT_OK_AND_ASSIGN(const Order order, FindOrder(name));
    const LayerRun base = RunOrder(c, name);
    for (const Probe& probe : probes) {
      const double gradient = Gradient(c, base, probe);
      EXPECT_NEAR(Slope(c, order, probe), gradient, probe.bound * (1 + std::abs(gradient)))
          << name << " " << probe.name;
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
