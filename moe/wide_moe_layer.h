// A 16-bit layer that computes in f32: tokens and expert weights are widened on the way in, results rounded once on the
// way out. Canonical numerics need it, because partial sums that travel between lanes in 16 bits would be rounded once
// per lane. Internal to the layer.
#ifndef EVENKEEL_MOE_WIDE_MOE_LAYER_H_
#define EVENKEEL_MOE_WIDE_MOE_LAYER_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "evenkeel/moe/moe_layer.h"

namespace evenkeel::moe {

// `config` says bf16 or f16; `create` makes the layer that computes, from the same configuration in f32. Predicted
// memory counts the widened copies: tokens in and out, their gradients, and one layer's expert weights during each
// call.
absl::StatusOr<std::unique_ptr<MoeLayer>> CreateWideMoeLayer(
    const MoeConfig& config,
    absl::FunctionRef<absl::StatusOr<std::unique_ptr<MoeLayer>>(const MoeConfig& wide)> create);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_WIDE_MOE_LAYER_H_
