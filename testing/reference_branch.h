// The dense MLP beside the experts in double, written out plainly: the other side of moe/dense_branch.h.
//
//   kAdd      y = m + d                                     shared experts
//   kSigmoid  y = m + sigmoid(x . w) d                      a gated shared expert
//   kSoftmax  y = a_0 m + a_1 d, (a_0, a_1) = softmax(x W' + b)      residual MoE
// with m the experts' output for x and d = MLP(x). Values carry bounds as in reference_math.h; the coefficients and
// their products are taken as exact arithmetic on inexact values, because the judged run computes them in double.
#ifndef EVENKEEL_TESTING_REFERENCE_BRANCH_H_
#define EVENKEEL_TESTING_REFERENCE_BRANCH_H_

#include <cstdint>
#include <string>

#include "evenkeel/testing/reference_math.h"

namespace evenkeel::testutil {

enum class ReferenceMix : uint8_t { kNone, kAdd, kSigmoid, kSoftmax };

struct ReferenceBranchConfig {
  ReferenceMix mix = ReferenceMix::kNone;
  int64_t hidden = 0;
  int64_t ffn = 0;  // width of the MLP
  bool swiglu = false;
  bool bias = false;

  bool present() const { return mix != ReferenceMix::kNone; }
};

// Zeros of the branch's parameters under `prefix` ("layer.0.moe.shared."): w_in (w_gate) [hidden, ffn], w_out [ffn,
// hidden]; with biases b_in (b_gate) [1, ffn], b_out [1, hidden]; mix [1 or 2, hidden]; kSoftmax: mix_bias [1, 2].
void AddBranchTensors(const ReferenceBranchConfig& config, const std::string& prefix, reference::Tensors* tensors);

// What a forward leaves for its backward.
struct ReferenceBranchTape {
  reference::Matrix x, m, d;              // [tokens, hidden]
  reference::Matrix inner, gate, active;  // [tokens, ffn]
  reference::Matrix a;                    // coefficients of m and d, [tokens, 2]; variance: of the sigmoid's argument
};

// Roundings of the judged run.
struct ReferenceBranchRounding {
  reference::Rounding dense;
  reference::Rounding split;  // of products whose sum is split over lanes
  int64_t depth = 1;          // tokens that the whole run sums into one weight
};

// y. `parameters` has the branch's under `prefix`.
reference::Matrix BranchForward(const ReferenceBranchConfig& config, const reference::Tensors& parameters,
                                const std::string& prefix, const reference::Matrix& x, const reference::Matrix& m,
                                const ReferenceBranchRounding& rounding, ReferenceBranchTape* tape);

// Returns what passes to x through the branch, sets *dm, adds to `gradients`.
reference::Matrix BranchBackward(const ReferenceBranchConfig& config, const reference::Tensors& parameters,
                                 const std::string& prefix, const ReferenceBranchTape& tape,
                                 const reference::Matrix& dy, const ReferenceBranchRounding& rounding,
                                 reference::Matrix* dm, reference::Tensors* gradients);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_BRANCH_H_
