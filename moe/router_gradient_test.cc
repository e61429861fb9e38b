// The router's gradients against a second implementation in double that shares no code with the first: differentiated
// by dual numbers, and once more by finite differences.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "evenkeel/moe/router.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kTokens = 7;
constexpr int64_t kHidden = 5;
constexpr int kExperts = 6;

// A number and its derivative.
struct Dual {
  double value = 0;
  double slope = 0;
};
Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.slope + b.slope}; }
Dual operator*(Dual a, Dual b) { return {a.value * b.value, a.slope * b.value + a.value * b.slope}; }
Dual operator/(Dual a, Dual b) {
  return {a.value / b.value, (a.slope * b.value - a.value * b.slope) / (b.value * b.value)};
}
Dual Exp(Dual a) { return {std::exp(a.value), std::exp(a.value) * a.slope}; }
Dual Log(Dual a) { return {std::log(a.value), a.slope / a.value}; }
Dual Constant(double value) { return {value, 0}; }

// What is held fixed while differentiating: which routes exist, and the weights of the loss terms.
struct Problem {
  RouterConfig config;
  RoutingDecision decision;
  std::vector<double> dweight;
  double balance = 0;
  double z = 0;
  std::vector<double> jitter;  // factor of every x, or empty
};

std::vector<Dual> Scores(const Problem& p, const std::vector<Dual>& logits) {
  std::vector<Dual> scores(logits.size());
  Dual sum;
  for (const Dual& l : logits) sum = sum + Exp(l);
  for (size_t e = 0; e < logits.size(); ++e) {
    scores[e] = p.config.score == ScoreFunction::kSoftmax ? Exp(logits[e]) / sum
                                                          : Constant(1) / (Constant(1) + Exp(Constant(-1) * logits[e]));
  }
  return scores;
}

// <weight, dweight> of one token.
Dual WeightTerm(const Problem& p, int64_t token, const std::vector<Dual>& scores) {
  const int k = p.decision.top_k;
  Dual denominator;
  for (int j = 0; j < k; ++j) {
    if (p.decision.slot[token * k + j] >= 0) denominator = denominator + scores[p.decision.expert[token * k + j]];
  }
  const bool normalized = p.config.effective_normalization() == WeightNormalization::kOverKept;
  if (!normalized) denominator = Constant(1);
  if (denominator.value < 0x1p-23) denominator = Constant(0x1p-23);
  Dual total;
  for (int j = 0; j < k; ++j) {
    if (p.decision.slot[token * k + j] < 0) continue;
    const Dual weight = Constant(p.config.route_scale) * scores[p.decision.expert[token * k + j]] / denominator;
    total = total + Constant(p.dweight[token * k + j]) * weight;
  }
  return total;
}

// The whole loss as a function of x [s, h] and gate [e, h].
Dual Loss(const Problem& p, const std::vector<Dual>& x, const std::vector<Dual>& gate) {
  const RoutingDecision& d = p.decision;
  const bool all = p.config.effective_balance() == BalanceChoices::kAll;
  std::vector<double> counts(kExperts, 0);
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int j = 0; d.is_active(t) && j < (all ? d.top_k : 1); ++j) counts[d.expert[t * d.top_k + j]] += 1;
  }
  const double n = static_cast<double>(d.active_tokens);
  const double routes = n * (all ? d.top_k : 1);
  Dual total;
  for (int64_t t = 0; t < kTokens; ++t) {
    if (!d.is_active(t)) continue;
    std::vector<Dual> logits(kExperts);
    for (int e = 0; e < kExperts; ++e) {
      for (int64_t i = 0; i < kHidden; ++i) {
        const Dual factor = Constant(p.jitter.empty() ? 1.0 : p.jitter[t * kHidden + i]);
        logits[e] = logits[e] + factor * x[t * kHidden + i] * gate[e * kHidden + i];
      }
    }
    const std::vector<Dual> scores = Scores(p, logits);
    total = total + WeightTerm(p, t, scores);
    Dual sum, exps;
    for (int e = 0; e < kExperts; ++e) {
      sum = sum + scores[e];
      exps = exps + Exp(logits[e]);
    }
    for (int e = 0; e < kExperts; ++e) {
      const Dual g = p.config.score == ScoreFunction::kSoftmax ? scores[e] : scores[e] / sum;
      total = total + Constant(p.balance * kExperts * counts[e] / routes / n) * g;
    }
    total = total + Constant(p.z / n) * Log(exps) * Log(exps);
  }
  return total;
}

std::vector<Dual> Lift(const std::vector<float>& values) {
  std::vector<Dual> lifted;
  for (const float v : values) lifted.push_back(Constant(v));
  return lifted;
}

std::vector<float> Values(int64_t n, uint64_t seed, absl::string_view name, double scale) {
  const PhiloxStream stream(PhiloxKey(seed).Add(name));
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(scale * stream.Normal(i));
  return values;
}

// Derivatives of Loss by every element of `moved` (x or gate).
std::vector<double> Derivatives(const Problem& p, std::vector<Dual> x, std::vector<Dual> gate, bool by_x,
                                bool finite_differences) {
  std::vector<Dual>& moved = by_x ? x : gate;
  std::vector<double> derivatives;
  for (Dual& element : moved) {
    if (finite_differences) {
      constexpr double kStep = 1e-5;
      const double before = element.value;
      element.value = before + kStep;
      const double up = Loss(p, x, gate).value;
      element.value = before - kStep;
      const double down = Loss(p, x, gate).value;
      element.value = before;
      derivatives.push_back((up - down) / (2 * kStep));
    } else {
      element.slope = 1;
      derivatives.push_back(Loss(p, x, gate).slope);
      element.slope = 0;
    }
  }
  return derivatives;
}

// f32: some hundred roundings of 6e-8 each, relative to the largest gradient.
void ExpectClose(const std::vector<float>& actual, const std::vector<double>& expected, double relative,
                 const std::string& what) {
  double largest = 1e-3;
  for (const double v : expected) largest = std::max(largest, std::fabs(v));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], relative * largest) << what << " element " << i;
  }
}

void Check(RouterConfig config, float balance, float z, std::vector<uint8_t> mask, uint64_t seed) {
  SCOPED_TRACE(::testing::Message() << "k " << config.top_k << " score " << static_cast<int>(config.score)
                                    << " normalization " << static_cast<int>(config.normalization) << " balance "
                                    << balance << " z " << z << " seed " << seed);
  config.layer = "moe";
  config.hidden = kHidden;
  config.experts = kExperts;
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("compute"));
  ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, device.get()));
  std::vector<float> x = Values(kTokens * kHidden, seed, "x", 1.0);
  std::vector<float> gate = Values(kExperts * kHidden, seed, "gate", 0.7);
  const RouterInput input{.x = ConstTensorView(x.data(), DType::kF32, {kTokens, kHidden}),
                          .gate = ConstTensorView(gate.data(), DType::kF32, {kExperts, kHidden}),
                          .token_mask = mask.empty() ? nullptr : mask.data()};
  const RouterStep step{.training = true, .seed = seed, .step = 2, .source = 1};
  Problem p;
  p.config = config;
  p.balance = balance;
  p.z = z;
  ASSERT_OK_AND_ASSIGN(p.decision, router->Route(input, step, *stream));
  ASSERT_OK(p.decision.Validate());
  std::vector<float> dweight = Values(p.decision.num_routes(), seed, "dweight", 1.0);
  p.dweight.assign(dweight.begin(), dweight.end());
  if (config.jitter > 0) {
    // The same factors, seen through the router's own logits: a one-hot gate would do; the key is documented.
    const PhiloxStream numbers(PhiloxKey(seed).Add(2).Add("moe").Add(1).Add("router").Add("jitter"));
    for (uint64_t i = 0; i < x.size(); ++i) {
      p.jitter.push_back(1.0f + config.jitter * (2.0f * numbers.Uniform(i) - 1.0f));
    }
  }
  std::vector<float> dx(x.size(), 0.0f);
  std::vector<float> dgate(gate.size(), 0.0f);
  ASSERT_OK(router->Backward(input, step, p.decision,
                             ConstTensorView(dweight.data(), DType::kF32, {kTokens, p.decision.top_k}),
                             {.balance = balance, .z = z}, TensorView(dx.data(), DType::kF32, {kTokens, kHidden}),
                             TensorView(dgate.data(), DType::kF32, {kExperts, kHidden}), *stream));
  const std::vector<double> exact_dx = Derivatives(p, Lift(x), Lift(gate), true, false);
  const std::vector<double> exact_dgate = Derivatives(p, Lift(x), Lift(gate), false, false);
  ExpectClose(dx, exact_dx, 2e-5, "dx");
  ExpectClose(dgate, exact_dgate, 2e-5, "dgate");
  // Central differences: truncation about 1e-10, cancellation about 1e-11 of the loss.
  ExpectClose(dx, Derivatives(p, Lift(x), Lift(gate), true, true), 2e-5, "dx by differences");
  ExpectClose(dgate, Derivatives(p, Lift(x), Lift(gate), false, true), 2e-5, "dgate by differences");
  EXPECT_NEAR(
      p.decision.balance_loss,
      [&] {
        Problem only = p;
        only.dweight.assign(p.dweight.size(), 0.0);
        only.balance = 1;
        only.z = 0;
        return Loss(only, Lift(x), Lift(gate)).value;
      }(),
      1e-5);
}

TEST(RouterGradientTest, MatchesDualNumbersAndFiniteDifferences) {
  uint64_t seed = 1;
  for (const int k : {1, 2, 3, kExperts}) {
    for (const ScoreFunction score : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const WeightNormalization normalization : {WeightNormalization::kNone, WeightNormalization::kOverKept}) {
        for (const int terms : {0, 1, 2, 3}) {
          RouterConfig config;
          config.top_k = k;
          config.score = score;
          config.normalization = normalization;
          config.route_scale = 1.75;
          config.capacity.factor = *Rational::Create(3, 4);  // drops
          config.capacity.min_capacity = 1;
          Check(config, terms & 1 ? 0.3f : 0.0f, terms & 2 ? 0.2f : 0.0f, {}, seed++);
        }
      }
    }
  }
}

TEST(RouterGradientTest, MaskedTokensGetNone) {
  RouterConfig config;
  config.top_k = 2;
  Check(config, 0.3f, 0.2f, {1, 0, 1, 1, 0, 1, 1}, 5);
}

TEST(RouterGradientTest, GoesThroughJitter) {
  RouterConfig config;
  config.top_k = 3;
  config.jitter = 0.3f;
  Check(config, 0.3f, 0.2f, {}, 6);
}

TEST(RouterGradientTest, BothBalanceFormulas) {
  for (const BalanceChoices balance : {BalanceChoices::kFirst, BalanceChoices::kAll}) {
    RouterConfig config;
    config.top_k = 3;
    config.balance = balance;
    config.capacity.mode = CapacityMode::kDropless;
    Check(config, 0.5f, 0.0f, {}, 7);
  }
}

// The scores of a token whose kept sum is floored: the denominator is a constant there.
TEST(RouterGradientTest, FlooredDenominator) {
  RouterConfig config;
  config.layer = "moe";
  config.hidden = 1;
  config.experts = 2;
  config.top_k = 2;
  config.score = ScoreFunction::kSigmoid;
  config.capacity.mode = CapacityMode::kDropless;
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("compute"));
  ASSERT_OK_AND_ASSIGN(const auto router, CreateRouter(config, {}, device.get()));
  const float x = 1.0f;
  const float gate[] = {-20.0f, -21.0f};
  const RouterInput input{.x = ConstTensorView(&x, DType::kF32, {1, 1}),
                          .gate = ConstTensorView(gate, DType::kF32, {2, 1})};
  ASSERT_OK_AND_ASSIGN(const RoutingDecision d, router->Route(input, {}, *stream));
  const float dweight[] = {2.0f, 3.0f};
  float dx = 0;
  float dgate[] = {0, 0};
  ASSERT_OK(router->Backward(input, {}, d, ConstTensorView(dweight, DType::kF32, {1, 2}), {},
                             TensorView(&dx, DType::kF32, {1, 1}), TensorView(dgate, DType::kF32, {2, 1}), *stream));
  for (int e = 0; e < 2; ++e) {
    const double score = 1 / (1 + std::exp(-double{gate[e]}));
    EXPECT_NEAR(dgate[e] / (dweight[e] * 0x1p23 * score * (1 - score)), 1.0, 1e-5);
  }
}

}  // namespace
}  // namespace evenkeel::moe
