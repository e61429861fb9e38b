// The three ways the built-in policies lay a unit out. Pure.
#ifndef EVENKEEL_ZERO3_POLICY_LAYOUTS_H_
#define EVENKEEL_ZERO3_POLICY_LAYOUTS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/zero3/flat_layout.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/unit_layout.h"

namespace evenkeel::zero3 {

// The dtype gradients of `spec` are accumulated and reduced in: f64 for f64, else f32.
DType GradientDType(const ParameterSpec& spec);

// The parameters as items of a flat layout, in their order: sizes and dtypes.
std::vector<FlatItem> FlatItems(absl::Span<const ParameterSpec> parameters);

// Back to back, cut into equal shards (see FlatLayout). Where all parameters are trainable and of one dtype, gradients
// mirror the weights element by element; otherwise they are packed and the ranks' gradient shards differ in size.
absl::StatusOr<UnitLayout> FlatUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size);

// Every parameter cut into `world_size` shards of ceil(n / W) elements; a rank's shards back to back, each padded.
absl::StatusOr<UnitLayout> PerParameterUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size);

// Everything on every rank, laid out as a flat layout of one rank.
absl::StatusOr<UnitLayout> ReplicatedUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_POLICY_LAYOUTS_H_
