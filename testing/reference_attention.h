// Causal attention of the reference model, with its norm and its place beside the residual stream, written out plainly.
//
//   y = x + concat_heads(softmax(q k' / sqrt(d), causal) v) wo,   q, k, v = norm(x) wq, wk, wv
#ifndef EVENKEEL_TESTING_REFERENCE_ATTENTION_H_
#define EVENKEEL_TESTING_REFERENCE_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_pass.h"

namespace evenkeel::testutil {

// What a layer's forward leaves for its backward.
struct ReferenceAttentionTape {
  reference::Matrix input, normed, q, k, v, context;  // [tokens, hidden]
  std::vector<reference::Matrix> probabilities;       // [sequence, sequence], by sequence, then head
};

// y [tokens, hidden] of x, whole sequences back to back.
reference::Matrix ReferenceAttentionForward(const ReferencePass& pass, int64_t layer, const reference::Matrix& x,
                                            ReferenceAttentionTape* tape);

// Returns the gradient of x and adds those of the layer's parameters.
reference::Matrix ReferenceAttentionBackward(const ReferencePass& pass, int64_t layer,
                                             const ReferenceAttentionTape& tape, const reference::Matrix& dy);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_ATTENTION_H_
