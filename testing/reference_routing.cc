#include "evenkeel/testing/reference_routing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace evenkeel::testutil {
namespace {

using reference::Matrix;
using reference::Rounding;

double Square(double x) { return x * x; }

// Keeps the first `capacity` routes of each expert in the order in which `order` names them.
std::vector<uint8_t> KeepFirst(const std::vector<int64_t>& expert, const std::vector<int64_t>& order, int64_t experts,
                               int64_t capacity) {
  std::vector<int64_t> taken(experts, 0);
  std::vector<uint8_t> kept(expert.size(), 0);
  for (int64_t route : order) kept[route] = taken[expert[route]]++ < capacity ? 1 : 0;
  return kept;
}

// The denominator of a token's weights: the sum of its kept probabilities, floored at f32 epsilon; 1 for k = 1.
double Denominator(const ReferenceRouterConfig& config, const ReferenceRouting& routing, int64_t token) {
  if (config.top_k == 1) return 1;
  double sum = 0;
  for (int64_t j = 0; j < config.top_k; ++j) {
    const int64_t route = token * config.top_k + j;
    if (routing.used.kept[route]) sum += routing.probabilities.at(token, routing.used.expert[route]);
  }
  return std::max(sum, static_cast<double>(std::numeric_limits<float>::epsilon()));
}

void ComputeWeights(const ReferenceRouterConfig& config, const Rounding& rounding, ReferenceRouting* routing) {
  const int64_t k = config.top_k;
  routing->weights = Matrix(routing->probabilities.rows, k);
  if (rounding.track) routing->weights.Track();
  for (int64_t t = 0; t < routing->weights.rows; ++t) {
    const double denominator = Denominator(config, *routing, t);
    double sum_variance = 0;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t route = t * k + j;
      if (routing->used.kept[route]) sum_variance += routing->probabilities.var(t, routing->used.expert[route]);
    }
    for (int64_t j = 0; j < k; ++j) {
      const int64_t route = t * k + j;
      if (!routing->used.kept[route]) continue;
      const double w = routing->probabilities.at(t, routing->used.expert[route]) / denominator;
      const double scale = config.route_scale;
      routing->weights.at(t, j) = scale * w;
      if (!rounding.track) continue;
      const double own = routing->probabilities.var(t, routing->used.expert[route]);
      const double inherited = k == 1 ? own : (own + Square(w) * sum_variance) / Square(denominator);
      routing->weights.variance[t * k + j] = static_cast<float>(
          Square(scale) * (inherited + Square((static_cast<double>(k) + 3) * rounding.arithmetic * w)));
    }
  }
}

// What the balance loss averages: the scores, sigmoid ones divided by their token's sum.
double Fraction(const ReferenceRouterConfig& config, const ReferenceRouting& routing, int64_t token, int64_t e) {
  if (!config.sigmoid) return routing.probabilities.at(token, e);
  double sum = 0;
  for (int64_t j = 0; j < config.experts; ++j) sum += routing.probabilities.at(token, j);
  return routing.probabilities.at(token, e) / sum;
}

// Elementwise 1 / (1 + e^-x).
Matrix SigmoidOf(const Matrix& logits, const Rounding& rounding) {
  Matrix scores(logits.rows, logits.cols);
  if (rounding.track) scores.Track();
  for (size_t i = 0; i < scores.value.size(); ++i) {
    const double s = 1 / (1 + std::exp(-logits.value[i]));
    scores.value[i] = s;
    if (!rounding.track) continue;
    scores.variance[i] = static_cast<float>(Square(s * (1 - s)) * logits.variance[i] +
                                            Square(reference::kElementary * rounding.arithmetic * s) +
                                            rounding.StoreVariance() * Square(s));
  }
  return scores;
}

// dp * s (1 - s) elementwise.
Matrix SigmoidBackward(const Matrix& scores, const Matrix& dp, const Rounding& rounding) {
  Matrix dx(scores.rows, scores.cols);
  if (rounding.track) dx.Track();
  for (size_t i = 0; i < dx.value.size(); ++i) {
    const double s = scores.value[i], slope = s * (1 - s);
    dx.value[i] = dp.value[i] * slope;
    if (!rounding.track) continue;
    dx.variance[i] =
        static_cast<float>(Square(slope) * dp.variance[i] + Square(dp.value[i] * (1 - 2 * s)) * scores.variance[i] +
                           Square(3 * rounding.arithmetic * dx.value[i]));
  }
  return dx;
}

// Balance loss: experts / routes counted * sum over experts of (mean probability * share of tokens), on the routes
// before any is dropped; k = 2 counts first choices only.
void ComputeLosses(const ReferenceRouterConfig& config, ReferenceRouting* routing) {
  const int64_t tokens = routing->probabilities.rows;
  const int64_t k = config.top_k;
  const int64_t counted = k == 2 ? 1 : k;
  routing->share.assign(config.experts, 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < counted; ++j) {
      routing->share[routing->used.expert[t * k + j]] += 1.0 / static_cast<double>(tokens);
    }
  }
  for (int64_t e = 0; e < config.experts; ++e) {
    double mean = 0;
    for (int64_t t = 0; t < tokens; ++t) mean += Fraction(config, *routing, t, e) / static_cast<double>(tokens);
    routing->balance_loss +=
        static_cast<double>(config.experts) / static_cast<double>(counted) * mean * routing->share[e];
  }
  for (int64_t t = 0; t < tokens; ++t) {
    double top = routing->logits.at(t, 0), sum = 0;
    for (int64_t e = 0; e < config.experts; ++e) top = std::max(top, routing->logits.at(t, e));
    for (int64_t e = 0; e < config.experts; ++e) sum += std::exp(routing->logits.at(t, e) - top);
    routing->z_loss += Square(top + std::log(sum)) / static_cast<double>(tokens);
  }
}

}  // namespace

int64_t ReferenceCapacity(const ReferenceRouterConfig& config, const std::vector<int64_t>& tokens) {
  int64_t capacity = 0;
  for (int64_t count : tokens) {
    int64_t need = count;
    if (config.capacity_numerator > 0) {
      const int64_t up = count * config.top_k * config.capacity_numerator;
      const int64_t down = config.capacity_denominator * config.experts;
      need = std::max((up + down - 1) / down, config.min_capacity);
    }
    capacity = std::max(capacity, need);
  }
  const int64_t unit = config.capacity_multiple;
  return (capacity + unit - 1) / unit * unit;
}

std::vector<uint8_t> KeptRoutes(const ReferenceRouterConfig& config, const Matrix& probabilities,
                                const std::vector<int64_t>& expert, int64_t capacity) {
  const int64_t k = config.top_k;
  std::vector<int64_t> order(expert.size());
  std::iota(order.begin(), order.end(), 0);
  ReferenceDrop drop = config.drop;
  if (drop == ReferenceDrop::kByTopK) {
    drop = k == 1 ? ReferenceDrop::kPosition : k == 2 ? ReferenceDrop::kChoicesFirst : ReferenceDrop::kProbabilities;
  }
  if (drop == ReferenceDrop::kChoicesFirst) {
    std::stable_sort(order.begin(), order.end(), [k](int64_t a, int64_t b) { return a % k < b % k; });
  } else if (drop == ReferenceDrop::kProbabilities) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return probabilities.at(a / k, expert[a]) > probabilities.at(b / k, expert[b]);
    });
  }
  return KeepFirst(expert, order, config.experts, capacity);
}

namespace {

// 1 for the experts of one token that its groups allow.
std::vector<uint8_t> AllowedExperts(const ReferenceRouterConfig& config, const Matrix& scores, int64_t token) {
  const int64_t size = config.experts / config.groups;
  std::vector<double> worth;
  for (int64_t g = 0; g < config.groups; ++g) {
    std::vector<double> own;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) own.push_back(scores.at(token, e));
    std::sort(own.begin(), own.end(), std::greater<double>());
    worth.push_back(own[0] + (config.group_top_two ? own[1] : 0));
  }
  std::vector<int64_t> best(config.groups);
  std::iota(best.begin(), best.end(), 0);
  std::stable_sort(best.begin(), best.end(), [&](int64_t a, int64_t b) { return worth[a] > worth[b]; });
  std::vector<uint8_t> allowed(config.experts, 0);
  for (int64_t i = 0; i < config.groups_kept; ++i) std::fill_n(allowed.begin() + best[i] * size, size, 1);
  return allowed;
}

}  // namespace

ReferenceRoutes ChooseRoutes(const ReferenceRouterConfig& config, const Matrix& probabilities, int64_t capacity) {
  ReferenceRoutes routes;
  std::vector<int64_t> ids(config.experts);
  for (int64_t t = 0; t < probabilities.rows; ++t) {
    std::iota(ids.begin(), ids.end(), 0);
    const std::vector<uint8_t> allowed = AllowedExperts(config, probabilities, t);
    std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) {
      if (allowed[a] != allowed[b]) return allowed[a] > allowed[b];
      return probabilities.at(t, a) > probabilities.at(t, b);
    });
    routes.expert.insert(routes.expert.end(), ids.begin(), ids.begin() + config.top_k);
  }
  routes.kept = KeptRoutes(config, probabilities, routes.expert, capacity);
  return routes;
}

ReferenceRouting Route(const ReferenceRouterConfig& config, const Matrix& x, const Matrix& weight, int64_t capacity,
                       const ReferenceRoutes* replay, const Rounding& rounding) {
  ReferenceRouting routing;
  routing.capacity = capacity;
  routing.logits = MatMul(x, Transpose(weight), rounding);
  routing.probabilities =
      config.sigmoid ? SigmoidOf(routing.logits, rounding) : Softmax(routing.logits, /*causal=*/false, rounding);
  routing.chosen = ChooseRoutes(config, routing.probabilities, capacity);
  routing.used = replay != nullptr ? *replay : routing.chosen;
  ComputeWeights(config, rounding, &routing);
  ComputeLosses(config, &routing);
  return routing;
}

namespace {

// Gradient of the probabilities from that of the route weights.
Matrix WeightsBackward(const ReferenceRouterConfig& config, const ReferenceRouting& routing, const Matrix& dweights,
                       const Rounding& rounding) {
  const int64_t k = config.top_k;
  Matrix dp(routing.probabilities.rows, config.experts);
  if (rounding.track) dp.Track();
  for (int64_t t = 0; t < dp.rows; ++t) {
    const double denominator = Denominator(config, routing, t);
    double dot = 0, dot_variance = 0, magnitude = 0;
    for (int64_t j = 0; j < k && k > 1; ++j) {
      // weights carry the scale already, so this is scale times what the unscaled ones would give.
      const double w = routing.weights.at(t, j), d = dweights.at(t, j);
      dot += w * d;
      dot_variance += Square(d) * routing.weights.var(t, j) + Square(w) * dweights.var(t, j);
      magnitude += Square(w * d);
    }
    dot_variance += rounding.SumVariance(k) * magnitude;
    for (int64_t j = 0; j < k; ++j) {
      const int64_t route = t * k + j;
      if (!routing.used.kept[route]) continue;
      const double scale = config.route_scale, d = scale * dweights.at(t, j);
      const int64_t e = routing.used.expert[route];
      dp.at(t, e) += (d - dot) / denominator;
      if (!rounding.track) continue;
      // The denominator's own error is at most that of the weights' sum, which the weights' variances hold already.
      const double relative =
          routing.weights.at(t, j) > 0 ? routing.weights.var(t, j) / Square(routing.weights.at(t, j)) : 0;
      dp.variance[t * config.experts + e] +=
          static_cast<float>((Square(scale) * dweights.var(t, j) + dot_variance + Square(d - dot) * relative +
                              Square(3 * rounding.arithmetic) * (Square(d) + Square(dot))) /
                             Square(denominator));
    }
  }
  return dp;
}

}  // namespace

namespace {

// dp += the balance loss's gradient; sigmoid scores go through the division by their sum.
void AddBalanceGradient(const ReferenceRouterConfig& config, const ReferenceRouting& routing, const Rounding& rounding,
                        Matrix* dp) {
  const double counted = static_cast<double>(config.top_k == 2 ? 1 : config.top_k);
  for (int64_t t = 0; t < dp->rows; ++t) {
    double sum = 1, mean = 0;  // of the scores; of what pushes them
    std::vector<double> push(config.experts);
    for (int64_t e = 0; e < config.experts; ++e) {
      push[e] = config.balance_coefficient * static_cast<double>(config.experts) / counted * routing.share[e] /
                static_cast<double>(dp->rows);
    }
    if (config.sigmoid) {
      sum = 0;
      for (int64_t e = 0; e < config.experts; ++e) {
        sum += routing.probabilities.at(t, e);
        mean += push[e] * Fraction(config, routing, t, e);
      }
    }
    for (int64_t e = 0; e < config.experts; ++e) {
      dp->at(t, e) += (push[e] - mean) / sum;
      if (!rounding.track) continue;
      const double own = static_cast<double>(config.sigmoid ? config.experts : 0) + 4;
      const double size = (std::abs(push[e]) + std::abs(mean)) / sum;
      dp->variance[t * config.experts + e] += static_cast<float>(Square(own * rounding.arithmetic * size));
    }
  }
}

}  // namespace

Matrix RouteBackward(const ReferenceRouterConfig& config, const ReferenceRouting& routing, const Matrix& x,
                     const Matrix& weight, const Matrix& dweights, int64_t depth, const Rounding& rounding,
                     Matrix* dweight) {
  const int64_t tokens = x.rows;
  Matrix dp = WeightsBackward(config, routing, dweights, rounding);
  AddBalanceGradient(config, routing, rounding, &dp);
  Matrix dlogits = config.sigmoid ? SigmoidBackward(routing.probabilities, dp, rounding)
                                  : SoftmaxBackward(routing.probabilities, dp, rounding);
  // What the z-loss pushes along.
  const Matrix softmax = config.sigmoid ? Softmax(routing.logits, /*causal=*/false, rounding) : routing.probabilities;
  for (int64_t t = 0; t < tokens && config.z_coefficient != 0; ++t) {
    double top = routing.logits.at(t, 0), sum = 0;
    for (int64_t e = 0; e < config.experts; ++e) top = std::max(top, routing.logits.at(t, e));
    for (int64_t e = 0; e < config.experts; ++e) sum += std::exp(routing.logits.at(t, e) - top);
    const double factor = config.z_coefficient * 2 * (top + std::log(sum)) / static_cast<double>(tokens);
    for (int64_t e = 0; e < config.experts; ++e) {
      const double push = factor * softmax.at(t, e);
      dlogits.at(t, e) += push;
      if (rounding.track) {
        dlogits.variance[t * config.experts + e] += static_cast<float>(
            Square(factor) * softmax.var(t, e) + Square(reference::kElementary * rounding.arithmetic * push));
      }
    }
  }
  AddTransposedProduct(dlogits, x, depth, rounding, dweight);
  return MatMul(dlogits, weight, rounding);
}

}  // namespace evenkeel::testutil
