#include "evenkeel/testing/reference_experts.h"

#include <string>

#include "evenkeel/testing/reference_branch.h"
#include "evenkeel/testing/reference_parameters.h"

namespace evenkeel::testutil {

using reference::Matrix;
using reference::Rounding;

namespace {

std::string Name(int64_t layer, const char* rest) { return ReferenceLayerName(layer, std::string("moe.") + rest); }

const Matrix& Expert(const ReferencePass& pass, const std::string& name, int64_t e) {
  return pass.weights.experts.at(name)[e];
}

// y + bias of expert e, where there are biases.
Matrix Biased(const ReferencePass& pass, const Matrix& y, const std::string& name, int64_t e) {
  if (!pass.config.expert_bias) return y;
  return Sum(y, TakeRows(pass.Parameter(name), std::vector<int64_t>(y.rows, e)), pass.dense);
}

void ExpertForward(const ReferencePass& pass, int64_t layer, int64_t e, ReferenceExpertTape* tape) {
  tape->inner =
      Biased(pass, MatMul(tape->rows, Expert(pass, Name(layer, "w_in"), e), pass.dense), Name(layer, "b_in"), e);
  if (pass.config.swiglu) {
    tape->gate =
        Biased(pass, MatMul(tape->rows, Expert(pass, Name(layer, "w_gate"), e), pass.dense), Name(layer, "b_gate"), e);
    tape->active = Product(Apply(reference::Silu, tape->gate, pass.dense), tape->inner, pass.dense);
  } else {
    tape->active = Apply(reference::Gelu, tape->inner, pass.dense);
  }
  tape->out =
      Biased(pass, MatMul(tape->active, Expert(pass, Name(layer, "w_out"), e), pass.split), Name(layer, "b_out"), e);
}

ReferenceBranchRounding BranchRounding(const ReferencePass& pass) { return {pass.dense, pass.split, pass.depth}; }

// combined[token] += weight * out[i] for the i-th row of an expert.
void AddWeighted(const ReferencePass& pass, const Matrix& weights, const ReferenceExpertTape& expert, size_t i,
                 int64_t k, double own, Matrix* combined) {
  const int64_t token = expert.route[i] / k, choice = expert.route[i] % k;
  const double w = weights.at(token, choice), w_variance = weights.var(token, choice);
  for (int64_t c = 0; c < pass.config.hidden; ++c) {
    const double o = expert.out.at(static_cast<int64_t>(i), c);
    combined->at(token, c) += w * o;
    if (!pass.dense.track) continue;
    combined->variance[token * pass.config.hidden + c] += static_cast<float>(
        w * w * expert.out.var(static_cast<int64_t>(i), c) + o * o * w_variance + own * w * w * o * o);
  }
}

// dout rows of one expert (weight * dy) and the gradients of its routes' weights (out . dy).
Matrix CombineBackward(const ReferencePass& pass, const ReferenceRouting& routing, const ReferenceExpertTape& expert,
                       const Matrix& dy, Matrix* dweights) {
  const int64_t k = pass.config.router.top_k;
  Matrix dout(expert.out.rows, pass.config.hidden);
  if (pass.dense.track) dout.Track();
  const double own = pass.dense.SumVariance(pass.config.hidden);
  for (int64_t i = 0; i < dout.rows; ++i) {
    const int64_t token = expert.route[i] / k, choice = expert.route[i] % k;
    const double w = routing.weights.at(token, choice);
    double dot = 0, variance = 0;
    for (int64_t c = 0; c < pass.config.hidden; ++c) {
      const double d = dy.at(token, c), o = expert.out.at(i, c);
      dout.at(i, c) = w * d;
      dot += o * d;
      if (!pass.dense.track) continue;
      dout.variance[i * pass.config.hidden + c] =
          static_cast<float>(w * w * dy.var(token, c) + d * d * routing.weights.var(token, choice) +
                             pass.dense.arithmetic * pass.dense.arithmetic * w * w * d * d);
      variance += o * o * dy.var(token, c) + d * d * expert.out.var(i, c) + own * o * o * d * d;
    }
    dweights->at(token, choice) = dot;
    if (pass.dense.track) {
      dweights->variance[token * k + choice] = static_cast<float>(variance + pass.router.StoreVariance() * dot * dot);
    }
  }
  return pass.Stored(dout);
}

void AddBias(const ReferencePass& pass, const std::string& name, int64_t e, const Matrix& dy) {
  if (!pass.config.expert_bias) return;
  AddRows(dy, std::vector<int64_t>(dy.rows, e), pass.depth, pass.dense, &pass.Gradient(name));
}

Matrix ExpertLinearBackward(const ReferencePass& pass, const std::string& name, int64_t e, const Matrix& x,
                            const Matrix& dy, const Rounding& rounding) {
  Matrix& all = pass.Gradient(name);
  const int64_t first_row = e * (all.rows / pass.config.router.experts);
  AddTransposedProduct(x, dy, pass.depth, pass.dense, &all, first_row);
  return MatMul(dy, pass.weights.transposed.at(name)[e], rounding);
}

// Adds expert e's gradients and returns its rows'.
Matrix ExpertBackward(const ReferencePass& pass, int64_t layer, int64_t e, const ReferenceExpertTape& tape,
                      const Matrix& dout) {
  AddBias(pass, Name(layer, "b_out"), e, dout);
  const Matrix dactive = ExpertLinearBackward(pass, Name(layer, "w_out"), e, tape.active, dout, pass.dense);
  if (!pass.config.swiglu) {
    const Matrix dinner = ApplyBackward(reference::Gelu, tape.inner, dactive, pass.dense);
    AddBias(pass, Name(layer, "b_in"), e, dinner);
    return ExpertLinearBackward(pass, Name(layer, "w_in"), e, tape.rows, dinner, pass.split);
  }
  Rounding forward = pass.dense;  // computed again: not the gradients' magnitudes
  forward.reach = nullptr;
  const Matrix dinner = Product(dactive, Apply(reference::Silu, tape.gate, forward), pass.dense);
  const Matrix dgate = ApplyBackward(reference::Silu, tape.gate, Product(dactive, tape.inner, pass.dense), pass.dense);
  AddBias(pass, Name(layer, "b_in"), e, dinner);
  AddBias(pass, Name(layer, "b_gate"), e, dgate);
  const Matrix drows = ExpertLinearBackward(pass, Name(layer, "w_in"), e, tape.rows, dinner, pass.split);
  return Sum(drows, ExpertLinearBackward(pass, Name(layer, "w_gate"), e, tape.rows, dgate, pass.split), pass.dense);
}

}  // namespace

Matrix ReferenceMoeForward(const ReferencePass& pass, int64_t layer, int64_t capacity, const ReferenceRoutes* replay,
                           const Matrix& x, ReferenceMoeTape* tape) {
  tape->input = x;
  tape->normed = RmsNorm(x, pass.Parameter(Name(layer, "norm")), pass.config.norm_epsilon, pass.dense);
  tape->routing =
      Route(pass.config.router, tape->normed, pass.Parameter(Name(layer, "router")), capacity, replay, pass.router);
  const int64_t k = pass.config.router.top_k;
  tape->experts.resize(pass.config.router.experts);
  for (size_t route = 0; route < tape->routing.used.expert.size(); ++route) {
    if (!tape->routing.used.kept[route]) continue;
    tape->experts[tape->routing.used.expert[route]].route.push_back(static_cast<int64_t>(route));
  }
  Matrix combined(x.rows, pass.config.hidden);
  if (pass.dense.track) combined.Track();
  const double own = pass.dense.SumVariance(k + 1);
  for (int64_t e = 0; e < pass.config.router.experts; ++e) {
    ReferenceExpertTape& expert = tape->experts[e];
    std::vector<int64_t> from;
    for (int64_t route : expert.route) from.push_back(route / k);
    expert.rows = TakeRows(tape->normed, from);
    ExpertForward(pass, layer, e, &expert);
    for (size_t i = 0; i < from.size(); ++i) AddWeighted(pass, tape->routing.weights, expert, i, k, own, &combined);
  }
  Matrix y = pass.Stored(combined);
  if (pass.config.branch != ReferenceMix::kNone) {
    y = BranchForward(ReferenceBranchOf(pass.config), pass.parameters, Name(layer, "shared."), tape->normed, y,
                      BranchRounding(pass), &tape->branch);
  }
  return Sum(x, y, pass.dense);
}

Matrix ReferenceMoeBackward(const ReferencePass& pass, int64_t layer, const ReferenceMoeTape& tape,
                            const Matrix& dout) {
  Matrix dy = dout, from_branch;
  if (pass.config.branch != ReferenceMix::kNone) {
    from_branch = BranchBackward(ReferenceBranchOf(pass.config), pass.parameters, Name(layer, "shared."), tape.branch,
                                 dout, BranchRounding(pass), &dy, &pass.gradients);
  }
  const ReferenceRouting& routing = tape.routing;
  const int64_t k = pass.config.router.top_k;
  Matrix dweights(dy.rows, k);
  Matrix dnormed(dy.rows, pass.config.hidden);
  if (pass.dense.track) {
    dweights.Track();
    dnormed.Track();
  }
  for (int64_t e = 0; e < pass.config.router.experts; ++e) {
    const ReferenceExpertTape& expert = tape.experts[e];
    if (expert.route.empty()) continue;
    const Matrix drows = CombineBackward(pass, routing, expert, dy, &dweights);
    std::vector<int64_t> to;
    for (int64_t route : expert.route) to.push_back(route / k);
    AddRows(ExpertBackward(pass, layer, e, expert, drows), to, k, pass.dense, &dnormed);
  }
  const std::string router = Name(layer, "router");
  const Matrix from_router = RouteBackward(pass.config.router, routing, tape.normed, pass.Parameter(router), dweights,
                                           pass.depth, pass.router, &pass.Gradient(router));
  dnormed = Sum(pass.Stored(dnormed), from_router, pass.dense);
  if (pass.config.branch != ReferenceMix::kNone) dnormed = Sum(dnormed, from_branch, pass.dense);
  return Sum(dout, pass.NormBackward(Name(layer, "norm"), tape.input, dnormed), pass.dense);
}

}  // namespace evenkeel::testutil
