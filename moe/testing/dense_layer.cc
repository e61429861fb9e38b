// The naive layer in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/moe/testing/layer_harness.h"

namespace evenkeel::moe {
namespace {

double Sigmoid(double z) { return 1 / (1 + std::exp(-z)); }
constexpr double kGeluScale = 0.7978845608028654;  // sqrt(2 / pi)
double GeluInner(double z) { return kGeluScale * (z + 0.044715 * z * z * z); }
double Gelu(double z) { return 0.5 * z * (1 + std::tanh(GeluInner(z))); }
double GeluSlope(double z) {
  const double t = std::tanh(GeluInner(z));
  return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * kGeluScale * (1 + 3 * 0.044715 * z * z);
}

class Dense {
 public:
  Dense(const LayerCase& c, const LayerRun& run) : c_(c), run_(run) {
    const int64_t e = c.experts, h = c.hidden, F = c.ffn;
    const bool gated = c.activation == ExpertActivation::kSwiGlu;
    const auto load = [&](const char* name, int64_t n) {
      std::vector<double> v(n);
      for (int64_t i = 0; i < n; ++i) v[i] = DataAt(c, name, i);
      return v;
    };
    router_ = load("router", e * h);
    w_in_ = load("w_in", e * h * F);
    w_out_ = load("w_out", e * F * h);
    w_gate_ = load("w_gate", gated ? e * h * F : 0);
    b_in_ = load("b_in", c.bias ? e * F : 0);
    b_gate_ = load("b_gate", c.bias && gated ? e * F : 0);
    b_out_ = load("b_out", c.bias ? e * h : 0);
    Values& sums = result_.sums;
    sums.w_in.resize(w_in_.size());
    sums.w_out.resize(w_out_.size());
    sums.w_gate.resize(w_gate_.size());
    sums.b_in.resize(b_in_.size());
    sums.b_gate.resize(b_gate_.size());
    sums.b_out.resize(b_out_.size());
  }

  DenseResult Run() {
    for (int replica = 0; replica < c_.replicas(); ++replica) RunReplica(replica);
    return std::move(result_);
  }

 private:
  const RoutingDecision& DecisionOf(int replica) const {
    for (const RankRun& rank : run_.ranks) {
      if (rank.replica == replica) return rank.decision;
    }
    return run_.ranks.front().decision;
  }

  // One token through one expert: the output, and what backward needs.
  struct Middle {
    std::vector<double> pre, gate, hidden, out;
  };

  Middle Expert(int64_t g, const double* x) const {
    const int64_t h = c_.hidden, F = c_.ffn;
    Middle m;
    for (int64_t f = 0; f < F; ++f) {
      double z = b_in_.empty() ? 0 : b_in_[g * F + f], q = b_gate_.empty() ? 0 : b_gate_[g * F + f];
      for (int64_t i = 0; i < h; ++i) {
        z += x[i] * w_in_[(g * h + i) * F + f];
        if (!w_gate_.empty()) q += x[i] * w_gate_[(g * h + i) * F + f];
      }
      m.pre.push_back(z);
      m.gate.push_back(q);
      m.hidden.push_back(w_gate_.empty() ? Gelu(z) : q * Sigmoid(q) * z);
    }
    for (int64_t i = 0; i < h; ++i) {
      double y = b_out_.empty() ? 0 : b_out_[g * h + i];
      for (int64_t f = 0; f < F; ++f) y += m.hidden[f] * w_out_[(g * F + f) * h + i];
      m.out.push_back(y);
    }
    return m;
  }

  void ExpertBackward(int64_t g, const double* x, const Middle& m, const std::vector<double>& dout, double* dx) {
    const int64_t h = c_.hidden, F = c_.ffn;
    Values& sums = result_.sums;
    for (int64_t i = 0; i < h && !b_out_.empty(); ++i) sums.b_out[g * h + i] += dout[i];
    for (int64_t f = 0; f < F; ++f) {
      double dhidden = 0;
      for (int64_t i = 0; i < h; ++i) {
        sums.w_out[(g * F + f) * h + i] += m.hidden[f] * dout[i];
        dhidden += w_out_[(g * F + f) * h + i] * dout[i];
      }
      double dpre = dhidden * GeluSlope(m.pre[f]), dgate = 0;
      if (!w_gate_.empty()) {
        const double q = m.gate[f], sig = Sigmoid(q);
        dpre = dhidden * q * sig;
        dgate = dhidden * m.pre[f] * (sig + q * sig * (1 - sig));
      }
      if (!b_in_.empty()) sums.b_in[g * F + f] += dpre;
      if (!b_gate_.empty()) sums.b_gate[g * F + f] += dgate;
      for (int64_t i = 0; i < h; ++i) {
        sums.w_in[(g * h + i) * F + f] += x[i] * dpre;
        dx[i] += w_in_[(g * h + i) * F + f] * dpre;
        if (w_gate_.empty()) continue;
        sums.w_gate[(g * h + i) * F + f] += x[i] * dgate;
        dx[i] += w_gate_[(g * h + i) * F + f] * dgate;
      }
    }
  }

  // d(loss)/d(weights) of one token -> logits -> router matrix and x. Softmax; k > 1 normalises over kept routes.
  void RouterBackward(const RoutingDecision& d, int64_t token, const double* x, const std::vector<double>& dweight,
                      double* dx, std::vector<double>* drouter) const {
    const int64_t e = c_.experts, h = c_.hidden, k = d.top_k;
    std::vector<double> score(e);
    double largest = -std::numeric_limits<double>::infinity(), total = 0;
    for (int64_t g = 0; g < e; ++g) {
      for (int64_t i = 0; i < h; ++i) score[g] += x[i] * router_[g * h + i];
      largest = std::max(largest, score[g]);
    }
    for (double& s : score) total += s = std::exp(s - largest);
    for (double& s : score) s /= total;
    double kept = 0, weighted = 0;
    for (int64_t j = 0; j < k; ++j) {
      if (d.slot[token * k + j] < 0) continue;
      kept += score[d.expert[token * k + j]];
      weighted += score[d.expert[token * k + j]] * dweight[j];
    }
    std::vector<double> dscore(e, 0.0);
    for (int64_t j = 0; j < k; ++j) {
      if (d.slot[token * k + j] < 0) continue;
      dscore[d.expert[token * k + j]] = k == 1 ? dweight[j] : dweight[j] / kept - weighted / (kept * kept);
    }
    double dot = 0;
    for (int64_t g = 0; g < e; ++g) dot += dscore[g] * score[g];
    for (int64_t g = 0; g < e; ++g) {
      const double dlogit = score[g] * (dscore[g] - dot);
      for (int64_t i = 0; i < h; ++i) {
        (*drouter)[g * h + i] += dlogit * x[i];
        dx[i] += dlogit * router_[g * h + i];
      }
    }
  }

  void RunReplica(int replica) {
    const RoutingDecision& d = DecisionOf(replica);
    const int64_t s = c_.tokens_in(replica), h = c_.hidden, k = d.top_k;
    const std::vector<double> x = InputsOf(c_, "x", replica), dy = InputsOf(c_, "dy", replica);
    std::vector<double> y(s * h), dx(s * h), drouter(c_.experts * h);
    for (int64_t t = 0; t < s; ++t) {
      std::vector<double> dweight(k, 0.0);
      for (int64_t j = 0; j < k; ++j) {
        if (d.slot[t * k + j] < 0) continue;
        const int64_t g = d.expert[t * k + j];
        const double w = d.weight[t * k + j];
        const Middle m = Expert(g, &x[t * h]);
        std::vector<double> dout(h);
        for (int64_t i = 0; i < h; ++i) {
          y[t * h + i] += w * m.out[i];
          dweight[j] += m.out[i] * dy[t * h + i];
          dout[i] = w * dy[t * h + i];
        }
        ExpertBackward(g, &x[t * h], m, dout, &dx[t * h]);
      }
      RouterBackward(d, t, &x[t * h], dweight, &dx[t * h], &drouter);
    }
    for (size_t i = 0; i < y.size(); ++i) result_.loss += y[i] * dy[i];
    result_.y.push_back(std::move(y));
    result_.dx.push_back(std::move(dx));
    result_.router.push_back(std::move(drouter));
  }

  const LayerCase& c_;
  const LayerRun& run_;
  std::vector<double> router_, w_in_, w_gate_, w_out_, b_in_, b_gate_, b_out_;
  DenseResult result_;
};

}  // namespace

DenseResult RunDense(const LayerCase& c, const LayerRun& run) { return Dense(c, run).Run(); }

}  // namespace evenkeel::moe
