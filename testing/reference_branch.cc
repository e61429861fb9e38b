#include "evenkeel/testing/reference_branch.h"

#include <cmath>
#include <vector>

namespace evenkeel::testutil {
namespace {

using reference::Matrix;
using reference::Rounding;
using reference::Tensors;

double Square(double x) { return x * x; }
double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

int64_t MixRows(ReferenceMix mix) {
  if (mix == ReferenceMix::kSigmoid) return 1;
  return mix == ReferenceMix::kSoftmax ? 2 : 0;
}

// y + bias, where there are biases.
Matrix Biased(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& name, const Matrix& y,
              const Rounding& rounding) {
  if (!config.bias) return y;
  return Sum(y, TakeRows(parameters.at(name), std::vector<int64_t>(y.rows, 0)), rounding);
}

void AddBiasGradient(const ReferenceBranchConfig& config, const std::string& name, const Matrix& dy,
                     const ReferenceBranchRounding& rounding, Tensors* gradients) {
  if (!config.bias) return;
  AddRows(dy, std::vector<int64_t>(dy.rows, 0), rounding.depth, rounding.dense, &gradients->at(name));
}

// The argument of the coefficients' sigmoid for one token, and its variance. softmax(l_0, l_1)_1 = sigmoid(l_1 - l_0).
struct Argument {
  double value = 0;
  double variance = 0;
};
Argument ArgumentOf(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                    const Matrix& x, int64_t token) {
  const Matrix& mix = parameters.at(prefix + "mix");
  const bool two = config.mix == ReferenceMix::kSoftmax;
  Argument argument;
  for (int64_t c = 0; c < x.cols; ++c) {
    const double w = two ? mix.at(1, c) - mix.at(0, c) : mix.at(0, c);
    argument.value += w * x.at(token, c);
    argument.variance += Square(w) * x.var(token, c);
  }
  if (two) {
    const Matrix& bias = parameters.at(prefix + "mix_bias");
    argument.value += bias.at(0, 1) - bias.at(0, 0);
  }
  return argument;
}

Matrix Coefficients(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                    const Matrix& x, bool track) {
  Matrix a(x.rows, 2);
  if (track) a.Track();
  for (int64_t t = 0; t < x.rows; ++t) {
    const Argument argument = ArgumentOf(config, parameters, prefix, x, t);
    a.at(t, 1) = Sigmoid(argument.value);
    a.at(t, 0) = config.mix == ReferenceMix::kSoftmax ? Sigmoid(-argument.value) : 1;
    if (track) a.variance[2 * t] = a.variance[2 * t + 1] = static_cast<float>(argument.variance);
  }
  return a;
}

// What a change of the argument does to a coefficient.
double Slope(const Matrix& a, int64_t token) { return a.at(token, 1) * (1 - a.at(token, 1)); }

Matrix Mixed(const ReferenceBranchConfig& config, const ReferenceBranchTape& tape, const Rounding& rounding) {
  Matrix y(tape.m.rows, tape.m.cols);
  if (rounding.track) y.Track();
  for (int64_t t = 0; t < y.rows; ++t) {
    const double a0 = tape.a.at(t, 0), a1 = tape.a.at(t, 1);
    for (int64_t c = 0; c < y.cols; ++c) {
      const double m = tape.m.at(t, c), d = tape.d.at(t, c);
      y.at(t, c) = a0 * m + a1 * d;
      if (!rounding.track) continue;
      const double turn = config.mix == ReferenceMix::kSoftmax ? d - m : d;
      y.variance[t * y.cols + c] =
          static_cast<float>(Square(a0) * tape.m.var(t, c) + Square(a1) * tape.d.var(t, c) +
                             Square(turn * Slope(tape.a, t)) * tape.a.var(t, 1) + rounding.Written(y.at(t, c)));
    }
  }
  return y;
}

// dy times coefficient `which`.
Matrix Scaled(const ReferenceBranchConfig& config, const ReferenceBranchTape& tape, const Matrix& dy, int which,
              const Rounding& rounding) {
  Matrix out(dy.rows, dy.cols);
  if (rounding.track) out.Track();
  const bool fixed = which == 0 && config.mix != ReferenceMix::kSoftmax;
  for (int64_t t = 0; t < dy.rows; ++t) {
    const double a = tape.a.at(t, which);
    const double turned = fixed ? 0 : Square(Slope(tape.a, t)) * tape.a.var(t, 1);
    for (int64_t c = 0; c < dy.cols; ++c) {
      const double g = dy.at(t, c);
      out.at(t, c) = a * g;
      if (!rounding.track) continue;
      rounding.Reach(a * g);
      out.variance[t * dy.cols + c] =
          static_cast<float>(Square(a) * dy.var(t, c) + Square(g) * turned + rounding.Written(a * g));
    }
  }
  return out;
}

// Gradient of the sigmoid's argument, [tokens, 1].
Matrix ArgumentGradient(const ReferenceBranchConfig& config, const ReferenceBranchTape& tape, const Matrix& dy,
                        bool track) {
  Matrix out(dy.rows, 1);
  if (track) out.Track();
  for (int64_t t = 0; t < dy.rows; ++t) {
    double sum = 0, variance = 0;
    for (int64_t c = 0; c < dy.cols; ++c) {
      const bool both = config.mix == ReferenceMix::kSoftmax;
      const double turn = tape.d.at(t, c) - (both ? tape.m.at(t, c) : 0), g = dy.at(t, c);
      sum += g * turn;
      variance += Square(turn) * dy.var(t, c) + Square(g) * (tape.d.var(t, c) + (both ? tape.m.var(t, c) : 0));
    }
    const double slope = Slope(tape.a, t), curve = slope * (1 - 2 * tape.a.at(t, 1));
    out.at(t, 0) = slope * sum;
    if (track) {
      out.variance[t] = static_cast<float>(Square(slope) * variance + Square(curve * sum) * tape.a.var(t, 1));
    }
  }
  return out;
}

// Through the coefficients: adds the gradients of mix and mix_bias, returns that of x.
Matrix CoefficientsBackward(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                            const ReferenceBranchTape& tape, const Matrix& dy, const ReferenceBranchRounding& rounding,
                            Tensors* gradients) {
  const Matrix dargument = ArgumentGradient(config, tape, dy, rounding.dense.track);
  const int64_t rows = MixRows(config.mix);
  Matrix dlogit(dy.rows, rows);
  if (rounding.dense.track) dlogit.Track();
  for (int64_t t = 0; t < dy.rows; ++t) {
    for (int64_t j = 0; j < rows; ++j) {
      dlogit.at(t, j) = j + 1 == rows ? dargument.at(t, 0) : -dargument.at(t, 0);
      if (rounding.dense.track) dlogit.variance[t * rows + j] = dargument.variance[t];
    }
  }
  AddTransposedProduct(dlogit, tape.x, rounding.depth, rounding.dense, &gradients->at(prefix + "mix"));
  if (config.mix == ReferenceMix::kSoftmax) {
    AddRows(dlogit, std::vector<int64_t>(dy.rows, 0), rounding.depth, rounding.dense,
            &gradients->at(prefix + "mix_bias"));
  }
  return MatMul(dlogit, parameters.at(prefix + "mix"), rounding.dense);
}

// Adds the gradient of w and returns that of x for y = x w.
Matrix LinearBackward(const Tensors& parameters, const std::string& name, const Matrix& x, const Matrix& dy,
                      const ReferenceBranchRounding& rounding, const Rounding& product, Tensors* gradients) {
  AddTransposedProduct(x, dy, rounding.depth, rounding.dense, &gradients->at(name));
  return MatMul(dy, Transpose(parameters.at(name)), product);
}

Matrix MlpBackward(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                   const ReferenceBranchTape& tape, const Matrix& dout, const ReferenceBranchRounding& rounding,
                   Tensors* gradients) {
  const Rounding& dense = rounding.dense;
  AddBiasGradient(config, prefix + "b_out", dout, rounding, gradients);
  const Matrix dactive = LinearBackward(parameters, prefix + "w_out", tape.active, dout, rounding, dense, gradients);
  if (!config.swiglu) {
    const Matrix dinner = ApplyBackward(reference::Gelu, tape.inner, dactive, dense);
    AddBiasGradient(config, prefix + "b_in", dinner, rounding, gradients);
    return LinearBackward(parameters, prefix + "w_in", tape.x, dinner, rounding, rounding.split, gradients);
  }
  Rounding forward = dense;  // computed again: not the gradients' magnitudes
  forward.reach = nullptr;
  const Matrix dinner = Product(dactive, Apply(reference::Silu, tape.gate, forward), dense);
  const Matrix dgate = ApplyBackward(reference::Silu, tape.gate, Product(dactive, tape.inner, dense), dense);
  AddBiasGradient(config, prefix + "b_in", dinner, rounding, gradients);
  AddBiasGradient(config, prefix + "b_gate", dgate, rounding, gradients);
  return Sum(LinearBackward(parameters, prefix + "w_in", tape.x, dinner, rounding, rounding.split, gradients),
             LinearBackward(parameters, prefix + "w_gate", tape.x, dgate, rounding, rounding.split, gradients), dense);
}

}  // namespace

void AddBranchTensors(const ReferenceBranchConfig& config, const std::string& prefix, Tensors* tensors) {
  if (!config.present()) return;
  const auto add = [&](const char* name, int64_t rows, int64_t cols) {
    (*tensors)[prefix + name] = Matrix(rows, cols);
  };
  add("w_in", config.hidden, config.ffn);
  if (config.swiglu) add("w_gate", config.hidden, config.ffn);
  add("w_out", config.ffn, config.hidden);
  if (config.bias) {
    add("b_in", 1, config.ffn);
    if (config.swiglu) add("b_gate", 1, config.ffn);
    add("b_out", 1, config.hidden);
  }
  if (config.mix != ReferenceMix::kAdd) add("mix", MixRows(config.mix), config.hidden);
  if (config.mix == ReferenceMix::kSoftmax) add("mix_bias", 1, 2);
}

Matrix BranchForward(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                     const Matrix& x, const Matrix& m, const ReferenceBranchRounding& rounding,
                     ReferenceBranchTape* tape) {
  const Rounding& dense = rounding.dense;
  const auto linear = [&](const Matrix& in, const char* w, const char* b, const Rounding& product) {
    return Biased(config, parameters, prefix + b, MatMul(in, parameters.at(prefix + w), product), dense);
  };
  tape->x = x;
  tape->m = m;
  tape->inner = linear(x, "w_in", "b_in", dense);
  if (config.swiglu) {
    tape->gate = linear(x, "w_gate", "b_gate", dense);
    tape->active = Product(Apply(reference::Silu, tape->gate, dense), tape->inner, dense);
  } else {
    tape->active = Apply(reference::Gelu, tape->inner, dense);
  }
  tape->d = linear(tape->active, "w_out", "b_out", rounding.split);
  if (config.mix == ReferenceMix::kAdd) return Sum(m, tape->d, dense);
  tape->a = Coefficients(config, parameters, prefix, x, dense.track);
  return Mixed(config, *tape, dense);
}

Matrix BranchBackward(const ReferenceBranchConfig& config, const Tensors& parameters, const std::string& prefix,
                      const ReferenceBranchTape& tape, const Matrix& dy, const ReferenceBranchRounding& rounding,
                      Matrix* dm, Tensors* gradients) {
  if (config.mix == ReferenceMix::kAdd) {
    *dm = dy;
    return MlpBackward(config, parameters, prefix, tape, dy, rounding, gradients);
  }
  *dm = Scaled(config, tape, dy, 0, rounding.dense);
  const Matrix dd = Scaled(config, tape, dy, 1, rounding.dense);
  const Matrix through_mlp = MlpBackward(config, parameters, prefix, tape, dd, rounding, gradients);
  const Matrix through_mix = CoefficientsBackward(config, parameters, prefix, tape, dy, rounding, gradients);
  return Sum(through_mlp, through_mix, rounding.dense);
}

}  // namespace evenkeel::testutil
