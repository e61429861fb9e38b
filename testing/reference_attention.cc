#include "evenkeel/testing/reference_attention.h"

#include <cmath>
#include <string>

#include "evenkeel/testing/reference_parameters.h"
namespace evenkeel::testutil {

using reference::Matrix;

namespace {

std::string Name(int64_t layer, const char* rest) {
  return ReferenceLayerName(layer, std::string("attention.") + rest);
}

// Gradients of q, k and v from that of the context.
void ScoresBackward(const ReferencePass& pass, const ReferenceAttentionTape& tape, const Matrix& dcontext, Matrix* dq,
                    Matrix* dk, Matrix* dv) {
  const int64_t s = pass.config.sequence, d = pass.config.hidden / pass.config.heads;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  *dq = *dk = *dv = Matrix(dcontext.rows, pass.config.hidden);
  size_t block = 0;
  for (int64_t row = 0; row < dcontext.rows; row += s) {
    for (int64_t head = 0; head < pass.config.heads; ++head) {
      const Matrix& p = tape.probabilities[block++];
      const Matrix dout = Block(dcontext, row, s, head * d, d);
      PutBlock(MatMul(Transpose(p), dout, pass.dense), row, head * d, dv);
      const Matrix dp = MatMul(dout, Transpose(Block(tape.v, row, s, head * d, d)), pass.dense);
      Matrix dscores = SoftmaxBackward(p, dp, pass.dense);
      reference::ScaleInPlace(scale, &dscores);
      PutBlock(MatMul(dscores, Block(tape.k, row, s, head * d, d), pass.dense), row, head * d, dq);
      PutBlock(MatMul(Transpose(dscores), Block(tape.q, row, s, head * d, d), pass.dense), row, head * d, dk);
    }
  }
}

}  // namespace

Matrix ReferenceAttentionForward(const ReferencePass& pass, int64_t layer, const Matrix& x,
                                 ReferenceAttentionTape* tape) {
  tape->input = x;
  tape->normed = RmsNorm(x, pass.Parameter(Name(layer, "norm")), pass.config.norm_epsilon, pass.dense);
  tape->q = MatMul(tape->normed, pass.Parameter(Name(layer, "wq")), pass.dense);
  tape->k = MatMul(tape->normed, pass.Parameter(Name(layer, "wk")), pass.dense);
  tape->v = MatMul(tape->normed, pass.Parameter(Name(layer, "wv")), pass.dense);
  tape->context = Matrix(x.rows, pass.config.hidden);
  const int64_t s = pass.config.sequence, d = pass.config.hidden / pass.config.heads;
  for (int64_t row = 0; row < x.rows; row += s) {
    for (int64_t head = 0; head < pass.config.heads; ++head) {
      Matrix scores =
          MatMul(Block(tape->q, row, s, head * d, d), Transpose(Block(tape->k, row, s, head * d, d)), pass.dense);
      reference::ScaleInPlace(1 / std::sqrt(static_cast<double>(d)), &scores);
      tape->probabilities.push_back(Softmax(scores, /*causal=*/true, pass.dense));
      PutBlock(MatMul(tape->probabilities.back(), Block(tape->v, row, s, head * d, d), pass.dense), row, head * d,
               &tape->context);
    }
  }
  return Sum(x, MatMul(tape->context, pass.Parameter(Name(layer, "wo")), pass.split), pass.dense);
}

Matrix ReferenceAttentionBackward(const ReferencePass& pass, int64_t layer, const ReferenceAttentionTape& tape,
                                  const Matrix& dy) {
  const Matrix dcontext = pass.LinearBackward(Name(layer, "wo"), tape.context, dy, pass.dense);
  Matrix dq, dk, dv;
  ScoresBackward(pass, tape, dcontext, &dq, &dk, &dv);
  Matrix dnormed = pass.LinearBackward(Name(layer, "wq"), tape.normed, dq, pass.split);
  dnormed = Sum(dnormed, pass.LinearBackward(Name(layer, "wk"), tape.normed, dk, pass.split), pass.dense);
  dnormed = Sum(dnormed, pass.LinearBackward(Name(layer, "wv"), tape.normed, dv, pass.split), pass.dense);
  return Sum(dy, pass.NormBackward(Name(layer, "norm"), tape.input, dnormed), pass.dense);
}

}  // namespace evenkeel::testutil
