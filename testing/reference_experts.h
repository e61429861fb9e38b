// The mixture of experts of the reference model, with its norm and its place beside the residual stream, written out
// plainly: every expert takes its kept routes' rows, token by token, and adds weight times result to their tokens.
//
//   y = x + mix(sum_j weight_j expert_j(norm(x)), branch(norm(x)))
#ifndef EVENKEEL_TESTING_REFERENCE_EXPERTS_H_
#define EVENKEEL_TESTING_REFERENCE_EXPERTS_H_

#include <cstdint>
#include <vector>

#include "evenkeel/testing/reference_branch.h"
#include "evenkeel/testing/reference_math.h"
#include "evenkeel/testing/reference_pass.h"
#include "evenkeel/testing/reference_routing.h"

namespace evenkeel::testutil {

// One expert's share, [kept routes, hidden or ffn].
struct ReferenceExpertTape {
  std::vector<int64_t> route;  // kept routes of this expert (token * top_k + choice), token by token
  reference::Matrix rows, inner, gate, active, out;
};

// What a layer's forward leaves for its backward.
struct ReferenceMoeTape {
  reference::Matrix input, normed;  // [tokens, hidden]
  ReferenceRouting routing;
  std::vector<ReferenceExpertTape> experts;
  ReferenceBranchTape branch;
};

// y [tokens, hidden] of x. `replay`: routes to take instead of the router's choice; null: its own.
reference::Matrix ReferenceMoeForward(const ReferencePass& pass, int64_t layer, int64_t capacity,
                                      const ReferenceRoutes* replay, const reference::Matrix& x,
                                      ReferenceMoeTape* tape);

// Returns the gradient of x and adds those of the layer's parameters.
reference::Matrix ReferenceMoeBackward(const ReferencePass& pass, int64_t layer, const ReferenceMoeTape& tape,
                                       const reference::Matrix& dout);

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_REFERENCE_EXPERTS_H_
