// Sharded runs against each other and against an unsharded computation written here, bit by bit.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

void ExpectSameBits(const ToyRun& a, const ToyRun& b, const std::string& what) {
  ASSERT_EQ(a.ranks.size(), b.ranks.size());
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    ASSERT_EQ(a.ranks[r].steps.size(), b.ranks[r].steps.size());
    for (size_t s = 0; s < a.ranks[r].steps.size(); ++s) {
      const ToyStep& x = a.ranks[r].steps[s];
      const ToyStep& y = b.ranks[r].steps[s];
      ASSERT_EQ(x.gradients_digest, y.gradients_digest) << what << ": gradients, rank " << r << " step " << s;
      ASSERT_EQ(x.weights_digest, y.weights_digest) << what << ": weights, rank " << r << " step " << s;
      ASSERT_EQ(x.result.gradient_norm, y.result.gradient_norm) << what << " rank " << r << " step " << s;
      ASSERT_EQ(x.result.clip_scale, y.result.clip_scale) << what << " rank " << r << " step " << s;
    }
  }
}

ToyConfig BaseConfig(int world) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = world, .etp = 1};
  config.options.max_gradient_norm = 2.0;
  config.options.optimizer.momentum = 0.9;
  config.device.poison = true;
  config.options.poison_released = true;
  return config;
}

class WorldTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, WorldTest, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(WorldTest, PoliciesGiveTheSameBits) {
  ToyConfig config = BaseConfig(GetParam());
  config.options.policy = "replicated";
  ASSERT_OK_AND_ASSIGN(const ToyRun reference, RunToy(config));
  ASSERT_TRUE(reference.ranks[0].steps[0].result.stepped);
  EXPECT_LT(reference.ranks[0].steps[0].result.clip_scale, 1.0);
  for (const char* policy : {"per_parameter", "coalesced", "flat"}) {
    config.options.policy = policy;
    config.options.prefetch_bytes = 0;
    ASSERT_OK_AND_ASSIGN(const ToyRun plain, RunToy(config));
    ExpectSameBits(reference, plain, policy);
    config.options.prefetch_bytes = 4000;
    config.options.reuse_distance_bytes = 0;
    config.options.persistent_elements = 40;
    ASSERT_OK_AND_ASSIGN(const ToyRun early, RunToy(config));
    ExpectSameBits(reference, early, std::string(policy) + " with prefetch, reuse and persistence");
    if (GetParam() > 1) {
      EXPECT_GT(early.ranks[0].counts.prefetched, 0);
    }
  }
}

// Three steps while each order is being recorded, three by the plan, three that leave it, each with an order of its
// own; with an expert that nobody uses, a rank without tokens, accumulation, recomputation, and parameters on both
// sides of the persistence threshold.
TEST_P(WorldTest, ThreeStepsInEveryTraceState) {
  ToyConfig config = BaseConfig(GetParam());
  config.steps = 10;
  config.micro_batches = 2;
  config.recompute = true;
  config.expert_used = [](int, int replica, int expert) { return expert != 2 && replica != 1; };
  config.trace = [](int step) { return step < 3 ? absl::StrCat("order ", step) : std::string("order 0"); };
  config.order = [](int step, int num_leaves) {
    std::vector<int> order;
    for (int l = 0; l < num_leaves; ++l) order.push_back(l);
    if (step >= 6) std::rotate(order.begin(), order.begin() + step % num_leaves, order.end());
    return order;
  };
  config.options.policy = "replicated";
  ASSERT_OK_AND_ASSIGN(const ToyRun reference, RunToy(config));
  for (const char* policy : {"per_parameter", "coalesced", "flat"}) {
    config.options.policy = policy;
    config.options.prefetch_bytes = 2000;
    config.options.reuse_distance_bytes = 0;
    config.options.persistent_elements = 40;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ExpectSameBits(reference, run, policy);
    const ToyRank& rank = run.ranks[0];
    for (size_t s = 0; s < rank.steps.size(); ++s) {
      EXPECT_EQ(rank.steps[s].trace_state, s < 3 ? TraceState::kRecording : TraceState::kComplete) << policy << s;
    }
    EXPECT_EQ(rank.counts.trace_changes, 4) << policy;  // in steps 6 to 9
    EXPECT_EQ(rank.counts.peak_gathered_bytes, rank.counts.predicted_peak_gathered_bytes) << policy;
  }
}

// What the run must give, computed for all replicas in one place with the canonical tree, one scalar at a time.
class UnshardedSgd {
 public:
  explicit UnshardedSgd(const ToyConfig& config) : config_(config) {
    const comm::Mesh mesh = *comm::Mesh::Create({.tp = 1, .ep = 1, .dp = 1, .etp = 1});
    specs_ = ToyDescription(config, mesh, 0).parameters;
    for (const ParameterSpec& spec : specs_) {
      weights_.emplace_back();
      for (int64_t i = 0; i < spec.num_elements(); ++i) {
        weights_.back().push_back(static_cast<float>(InitialValue(spec, config.options.seed, i)));
      }
      momenta_.emplace_back(weights_.back().size(), 0.0f);
    }
  }

  void Step(int step) {
    std::vector<std::vector<float>> gradients;
    long double squares = 0;
    for (size_t p = 0; p < specs_.size(); ++p) {
      gradients.emplace_back(weights_[p].size(), 0.0f);
      if (!specs_[p].trainable) continue;
      for (size_t i = 0; i < weights_[p].size(); ++i) {
        gradients[p][i] = Average(step, p, i);
        squares += static_cast<long double>(gradients[p][i]) * gradients[p][i];
      }
    }
    norm_ = static_cast<double>(std::sqrt(squares));
    const double clip = norm_ > config_.options.max_gradient_norm ? config_.options.max_gradient_norm / norm_ : 1;
    for (size_t p = 0; p < specs_.size(); ++p) {
      if (specs_[p].trainable) Update(p, gradients[p], static_cast<float>(clip));
    }
  }

  double norm() const { return norm_; }
  const std::vector<std::vector<float>>& weights() const { return weights_; }
  const std::vector<ParameterSpec>& specs() const { return specs_; }

 private:
  float Average(int step, size_t p, size_t i) {
    const int dp = config_.mesh.dp;
    float total = 0;
    for (int micro = 0; micro < config_.micro_batches; ++micro) {
      std::vector<float> shares;
      // A tied parameter gets a share from each of its two leaves.
      const int uses = config_.tied_head && specs_[p].name == "embed.weight" ? 2 : 1;
      for (int r = 0; r < dp; ++r) {
        double value = ToyGradientShare(config_, specs_[p].name, step, micro, r, 0, static_cast<int64_t>(i));
        value += 0.125 * weights_[p][i];
        float sum = 0;
        for (int u = 0; u < uses; ++u) sum += static_cast<float>(value);
        shares.push_back(sum);
      }
      total += static_cast<float>(1.0 / dp) * Tree(shares, 0, dp);
    }
    return total;
  }

  static float Tree(const std::vector<float>& x, int begin, int end) {
    if (end - begin == 1) return x[static_cast<size_t>(begin)];
    int half = 1;
    while (half * 2 < end - begin) half *= 2;
    return Tree(x, begin, begin + half) + Tree(x, begin + half, end);
  }

  void Update(size_t p, const std::vector<float>& gradients, float clip) {
    const auto momentum = static_cast<float>(config_.options.optimizer.momentum);
    const auto rate = static_cast<float>(config_.options.optimizer.learning_rate);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const float m = gradients[i] * clip + 0.0f * weights_[p][i] + momentum * momenta_[p][i];
      momenta_[p][i] = m;
      weights_[p][i] -= rate * m;
    }
  }

  const ToyConfig& config_;
  std::vector<ParameterSpec> specs_;
  std::vector<std::vector<float>> weights_;
  std::vector<std::vector<float>> momenta_;
  double norm_ = 0;
};

TEST_P(WorldTest, EqualsAnUnshardedComputation) {
  for (int micro_batches : {1, 2}) {
    ToyConfig config = BaseConfig(GetParam());
    config.micro_batches = micro_batches;
    config.recompute = micro_batches > 1;
    UnshardedSgd expected(config);
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    for (int step = 0; step < config.steps; ++step) {
      expected.Step(step);
      for (const ToyRank& rank : run.ranks) {
        EXPECT_NEAR(rank.steps[static_cast<size_t>(step)].result.gradient_norm, expected.norm(),
                    1e-12 * expected.norm());
      }
    }
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      for (size_t p = 0; p < expected.specs().size(); ++p) {
        ASSERT_EQ(run.ranks[r].weights[p].size(), expected.weights()[p].size());
        for (size_t i = 0; i < expected.weights()[p].size(); ++i) {
          ASSERT_EQ(static_cast<float>(run.ranks[r].weights[p][i]), expected.weights()[p][i])
              << expected.specs()[p].name << "[" << i << "] rank " << r << " micro " << micro_batches;
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::zero3
