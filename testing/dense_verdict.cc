#include "evenkeel/testing/dense_verdict.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/testing/bitwise_judge.h"
#include "evenkeel/testing/reference_optimizer.h"
#include "evenkeel/testing/tensor_difference.h"

namespace evenkeel::testutil {

using reference::Matrix;

namespace {

// Below this, f32 has no full precision any more.
constexpr double kSmallest = 1.2e-38;
constexpr double kBeyond = 1e300;

// The largest f16 number, and where it rounds to zero: half of its smallest step.
constexpr double kLargestF16 = 65504;
constexpr double kHalfStepF16 = 0x1p-25;

// Partial sums of a run: over its lanes, in canonical numerics over all blocks.
int PartialsOf(const TrainingConfig& config, const comm::MeshShape& mesh) {
  return config.model.canonical() ? std::max<int>(moe::kCanonicalBlocks, static_cast<int>(config.model.heads))
                                  : mesh.tp;
}

}  // namespace

double UnitRoundoff(DType dtype) { return dtype == DType::kF64 ? std::ldexp(1.0, -53) : std::ldexp(1.0, -24); }

ReferenceRunOptions RoundingsOf(DType dtype, int lanes) {
  ReferenceRunOptions options;
  options.partials = lanes;
  options.dense.track = options.router.track = true;
  if (dtype == DType::kBF16) options.dense.store = std::ldexp(1.0, 24 - 8);
  if (dtype == DType::kF16) {
    options.dense.store = std::ldexp(1.0, 24 - 11);
    options.dense.floor = kHalfStepF16 / UnitRoundoff(dtype);
  }
  if (dtype == DType::kF64) options.router.arithmetic = options.router.store = std::ldexp(1.0, 53 - 24);
  return options;
}

DenseVerdict::DenseVerdict(const TrainingConfig& config, const comm::MeshShape& mesh, ReferenceModel model,
                           const Corpus* corpus)
    : config_(config),
      mesh_(mesh),
      model_(std::move(model)),
      corpus_(*corpus),
      roundings_(RoundingsOf(config.model.dtype, PartialsOf(config, mesh))),
      unit_(UnitRoundoff(config.model.dtype)),
      store_unit_(unit_ * roundings_.dense.store) {}

void DenseVerdict::Differ(int64_t place, FirstDifference difference) {
  finding_.max_abs_diff = std::max(finding_.max_abs_diff, std::abs(difference.candidate - difference.reference));
  finding_.Add(place, std::move(difference));
}

void DenseVerdict::JudgeValue(int64_t place, int64_t step, const std::string& tensor, int rank, int64_t index,
                              double wanted, double got, double bound) {
  ++finding_.values_compared;
  const double difference = std::abs(got - wanted);
  if (difference <= bound) {
    if (difference == 0) return;
    finding_.max_abs_diff = std::max(finding_.max_abs_diff, difference);
    if (difference > finding_.bound_used * bound) {
      finding_.bound_used = difference / bound;
      finding_.worst = tensor;
    }
    return;
  }
  finding_.bound_used = std::max(finding_.bound_used, bound > 0 ? difference / bound : kBeyond);
  finding_.worst = tensor;
  FirstDifference first;
  first.step = step;
  first.tensor = tensor;
  first.rank = rank;
  first.index = index;
  first.reference = wanted;
  first.candidate = got;
  first.ulps = UlpsBetween(config_.model.dtype, wanted, got);
  first.bound = bound;
  Differ(place, std::move(first));
}

void DenseVerdict::JudgeMatrix(int64_t place, int64_t step, const std::string& tensor, int rank, const Matrix& wanted,
                               const std::vector<double>& got) {
  for (size_t i = 0; i < got.size(); ++i) {
    JudgeValue(place, step, tensor, rank, static_cast<int64_t>(i), wanted.value[i], got[i],
               Bound(wanted, static_cast<int64_t>(i), unit_) + kSmallest);
  }
}

std::vector<ReferenceBatch> DenseVerdict::Batches(int64_t step) const {
  std::vector<ReferenceBatch> batches;
  for (int64_t r = 0; r < config_.num_batches(); ++r) {
    CorpusBatch batch = corpus_.Batch({.seed = config_.seed, .step = step, .replica = r}, config_.model.sequences,
                                      config_.model.sequence);
    batches.push_back({std::move(batch.inputs), std::move(batch.targets)});
  }
  return batches;
}

absl::Status DenseVerdict::JudgeStep(int64_t step, Collected collected) {
  ReferenceRunOptions options = roundings_;
  options.replay = collected.routes;
  options.loss_scale = collected.loss_scale;
  EK_ASSIGN_OR_RETURN(ReferenceStep wanted, model_.Run(collected.parameters, Batches(step), options));
  losses_.push_back(wanted.loss);
  const std::vector<std::string> names = model_.BoundaryNames();
  for (int64_t r = 0; r < config_.num_batches(); ++r) {
    const int rank = RankOf(r);
    const ReferenceReplica& replica = wanted.replicas[r];
    for (int64_t layer = 0; layer < config_.model.layers; ++layer) {
      JudgeRouting(step, layer, rank, replica.routing[layer]);
    }
    for (size_t b = 0; b < names.size(); ++b) {
      JudgeMatrix(ForwardPlace(b), step, TapText(TapKind::kActivation, names[b]), rank, replica.activations[b],
                  collected.activations[r][b]);
    }
    const double slack = LossBound(replica.loss_variance, replica.loss);
    JudgeValue(kLossPlace, step, "loss", rank, 0, replica.loss, collected.losses[r], slack);
  }
  JudgeValue(kLossPlace + 1, step, "mean loss", 0, 0, wanted.loss, collected.mean_loss,
             LossBound(wanted.loss_variance, wanted.loss));
  // Behind an overflow the backward of f16 holds nothing to compare; of other dtypes it shows where it went wrong.
  if (collected.stepped || config_.model.dtype != DType::kF16) {
    JudgeBackward(step, wanted, collected);
    JudgeGradients(step, wanted, collected);
  }
  if (!collected.stepped) JudgeSkip(step, wanted, collected);
  before_ = {std::move(collected.parameters), std::move(wanted.gradients), collected.clip_scale, collected.stepped};
  return absl::OkStatus();
}

void DenseVerdict::JudgeBackward(int64_t step, const ReferenceStep& wanted, const Collected& collected) {
  const std::vector<std::string> names = model_.BoundaryNames();
  for (int64_t r = 0; r < config_.num_batches(); ++r) {
    for (size_t b = 0; b < names.size(); ++b) {
      std::vector<double> unscaled = collected.activation_gradients[r][b];
      for (double& x : unscaled) x /= collected.loss_scale;
      JudgeMatrix(BackwardPlace(b), step, TapText(TapKind::kActivationGradient, names[b]), RankOf(r),
                  wanted.replicas[r].activation_gradients[b], unscaled);
    }
  }
}

// A step may be skipped only where a loss scale is at work, a gradient is not finite, and some value of the backward
// could not be written in f16: half of its range stays for how far the run may be from the reference.
void DenseVerdict::JudgeSkip(int64_t step, const ReferenceStep& wanted, const Collected& collected) {
  bool finite = true;
  for (const auto& [name, gradient] : collected.gradients) {
    for (double x : gradient.value) finite &= std::isfinite(x);
  }
  const double reach = wanted.backward_reach * collected.loss_scale;
  ++finding_.values_compared;
  if (config_.model.dtype == DType::kF16 && !finite && reach > kLargestF16 / 2) return;
  FirstDifference skipped;
  skipped.step = step;
  skipped.tensor = finite ? "update (skipped although every gradient is finite)"
                          : "update (skipped: a gradient is not finite, though no value reaches the largest number)";
  skipped.index = -1;
  skipped.reference = reach;
  Differ(kNormPlace, std::move(skipped));
}

// The last additions of a loss are a handful of roundings of its size, in f32 for the auxiliary losses.
double DenseVerdict::LossBound(double variance, double loss) const {
  return reference::kBoundDeviations * unit_ * std::sqrt(variance) +
         8 * unit_ * roundings_.router.arithmetic * std::abs(loss);
}

void DenseVerdict::JudgeGradients(int64_t step, const ReferenceStep& wanted, const Collected& collected) {
  double variance = 0;
  int64_t at = 0;
  for (const auto& [name, gradient] : wanted.gradients) {
    JudgeMatrix(kGradientPlace + at++, step, TapText(TapKind::kGradient, name), 0, gradient,
                collected.gradients.at(name).value);
    for (size_t i = 0; i < gradient.variance.size(); ++i) {
      variance += gradient.value[i] * gradient.value[i] * gradient.variance[i];
    }
  }
  if (!collected.stepped) return;
  const double norm = ReferenceGlobalNorm(wanted.gradients);
  const double slack = norm > 0 ? reference::kBoundDeviations * unit_ * std::sqrt(variance) / norm : 0;
  JudgeValue(kNormPlace, step, "gradient norm", 0, 0, norm, collected.gradient_norm, slack + 16 * unit_ * norm);
}

void DenseVerdict::JudgeParameters(int64_t step, const ReferenceTensors& after) {
  const zero3::OptimizerOptions& optimizer = config_.zero3.optimizer;
  if (optimizer.kind != zero3::OptimizerOptions::Kind::kSgd || optimizer.momentum != 0) return;
  int64_t at = 0;
  for (const auto& [name, parameter] : after) {
    const Matrix& before = before_.parameters.at(name);
    const Matrix& gradient = before_.gradients.at(name);
    const std::string tensor = TapText(TapKind::kParameter, name);
    const double rate = optimizer.learning_rate * before_.clip_scale;
    for (size_t i = 0; i < parameter.value.size(); ++i) {
      const double p = before.value[i];
      const double move = rate * gradient.value[i] + optimizer.learning_rate * optimizer.weight_decay * p;
      // 16-bit parameters follow an f32 master that is within one rounding of what was seen.
      const double bound = rate * Bound(gradient, static_cast<int64_t>(i), unit_) + 4 * store_unit_ * std::abs(p) +
                           4 * store_unit_ * std::abs(move) + 4 * unit_ * roundings_.dense.floor + kSmallest;
      const double wanted = before_.stepped ? p - move : p;
      JudgeValue(kParameterPlace + at, step, tensor, 0, static_cast<int64_t>(i), wanted, parameter.value[i],
                 before_.stepped ? bound : 0);
    }
    ++at;
  }
}

// How far apart two scores of a token must be to be told apart.
double DenseVerdict::Margin(const Matrix& scores, int64_t token, int64_t a, int64_t other_token, int64_t b) const {
  return reference::kBoundDeviations * unit_ *
         (std::sqrt(scores.var(token, a)) + std::sqrt(scores.var(other_token, b)));
}

void DenseVerdict::DifferInRoute(int64_t step, int64_t layer, int rank, int64_t route, double wanted, double got,
                                 double margin) {
  FirstDifference difference;
  difference.step = step;
  difference.tensor = absl::StrCat("routing layer.", layer, ".moe");
  difference.rank = rank;
  difference.index = route;
  difference.reference = wanted;
  difference.candidate = got;
  difference.bound = margin;
  Differ(kForwardPlace + 10 * (2 * layer + 1) + 5, std::move(difference));
}

void DenseVerdict::JudgeRouting(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing) {
  const ReferenceRouterConfig& router = model_.config().router;
  const Matrix& scores = routing.probabilities;
  const int64_t k = router.top_k;
  const std::vector<int64_t>& expert = routing.used.expert;
  for (int64_t t = 0; t < scores.rows; ++t) {
    for (int64_t j = 0; j < k; ++j) {
      ++finding_.values_compared;
      const int64_t route = t * k + j;
      const int64_t wanted = routing.chosen.expert[route], got = expert[route];
      if (wanted == got) continue;
      ++finding_.routing_differences;
      const double margin = Margin(scores, t, wanted, t, got);
      if (std::abs(scores.at(t, wanted) - scores.at(t, got)) > margin) {
        DifferInRoute(step, layer, rank, route, static_cast<double>(wanted), static_cast<double>(got), margin);
      }
    }
  }
  const std::vector<uint8_t> kept = KeptRoutes(router, scores, expert, routing.capacity);
  if (router.capacity_numerator == 0 || kept == routing.used.kept) return;
  JudgeDrops(step, layer, rank, routing, kept);
}

// Dropping by score may differ between close scores; by position it may not.
void DenseVerdict::JudgeDrops(int64_t step, int64_t layer, int rank, const ReferenceRouting& routing,
                              const std::vector<uint8_t>& wanted) {
  const ReferenceRouterConfig& router = model_.config().router;
  const int64_t k = router.top_k;
  const bool by_score =
      router.drop == ReferenceDrop::kProbabilities || (router.drop == ReferenceDrop::kByTopK && k > 2);
  const std::vector<int64_t>& expert = routing.used.expert;
  const Matrix& scores = routing.probabilities;
  for (size_t a = 0; a < expert.size(); ++a) {
    if (wanted[a] == routing.used.kept[a]) continue;
    ++finding_.routing_differences;
    bool close = false;
    for (size_t b = 0; by_score && b < expert.size(); ++b) {
      if (expert[b] != expert[a] || wanted[b] == wanted[a] || wanted[b] == routing.used.kept[b]) continue;
      const int64_t ta = static_cast<int64_t>(a) / k, tb = static_cast<int64_t>(b) / k, e = expert[a];
      close |= std::abs(scores.at(ta, e) - scores.at(tb, e)) <= Margin(scores, ta, e, tb, e);
    }
    if (!close) DifferInRoute(step, layer, rank, static_cast<int64_t>(a), wanted[a], routing.used.kept[a], 0);
  }
}

}  // namespace evenkeel::testutil
