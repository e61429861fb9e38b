// The backward program of an order, derived step by step: the exact adjoint of each, in reverse.
//
//   slice I->V                  all_gather V->I
//   all_gather V->I             slice I->V
//   all_gather V->R             reduce_scatter P->V
//   copy I->R                   all_reduce P->I
//   all_reduce P->I             copy I->R
//   reduce_scatter P->V         all_gather V->R
//   all_to_all, all_to_all_v    the reverse exchange
//   dispatch, experts, combine, expand, fold    the transposed maps
// No factor is hidden anywhere: the backward of every mapping is its transpose, on values typed as gradients.
#ifndef EVENKEEL_MOE_ORDER_ADJOINT_H_
#define EVENKEEL_MOE_ORDER_ADJOINT_H_

#include <vector>

#include "absl/types/span.h"
#include "evenkeel/moe/order.h"

namespace evenkeel::moe {

// The adjoint of one typed forward step.
TypedStep AdjointStep(const TypedStep& forward);

// The adjoints of `forward`, last step first.
std::vector<TypedStep> DeriveBackward(absl::Span<const TypedStep> forward);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_ADJOINT_H_
