#include "evenkeel/zero3/parameter_spec.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"

namespace evenkeel::zero3 {
namespace {

absl::Status Bad(const ParameterSpec& spec, absl::string_view what) {
  ErrorContext where;
  where.module = "zero3";
  where.operation = "parameter";
  where.group = spec.name;
  return MakeError(absl::StatusCode::kInvalidArgument, where, what);
}

PhiloxStream StreamOf(const ParameterSpec& spec, uint64_t seed) {
  return PhiloxStream(PhiloxKey(seed).Add("initial value").Add(spec.name));
}

double ValueAt(const Initializer& initializer, const PhiloxStream& stream, int64_t global_index) {
  switch (initializer.kind) {
    case Initializer::Kind::kConstant:
      return initializer.scale;
    case Initializer::Kind::kNormal:
      return initializer.scale * stream.Normal(static_cast<uint64_t>(global_index));
    case Initializer::Kind::kUniform:
      return initializer.scale * (2.0 * stream.Uniform(static_cast<uint64_t>(global_index)) - 1.0);
    case Initializer::Kind::kFunction:
      return initializer.function(global_index);
  }
  return 0;
}

}  // namespace

const char* FamilyName(Family family) { return family == Family::kDense ? "dense" : "expert"; }

absl::Status ValidateParameterSpec(const ParameterSpec& spec) {
  if (spec.name.empty()) return Bad(spec, "a parameter has no name");
  if (!IsFloating(spec.dtype)) {
    return Bad(spec, absl::StrCat("dtype ", DTypeName(spec.dtype), " is not one of f32, bf16, f16, f64"));
  }
  const int rank = spec.shape.rank();
  if (spec.global_shape.size() != spec.global_offset.size() ||
      (!spec.global_shape.empty() && static_cast<int>(spec.global_shape.size()) != rank)) {
    return Bad(spec, absl::StrCat("shape ", spec.shape.ToString(), " has ", rank, " dimensions, global_shape ",
                                  spec.global_shape.size(), ", global_offset ", spec.global_offset.size()));
  }
  for (size_t d = 0; d < spec.global_shape.size(); ++d) {
    const int64_t begin = spec.global_offset[d];
    const int64_t extent = spec.shape.dim(static_cast<int>(d));
    if (begin < 0 || spec.global_shape[d] < 0 || extent > spec.global_shape[d] ||
        begin > spec.global_shape[d] - extent) {
      return Bad(spec, absl::StrCat("dimension ", d, ": slice [", begin, ", ", begin + extent, ") is outside [0, ",
                                    spec.global_shape[d], ")"));
    }
  }
  if (spec.expert_dim < -1 || spec.expert_dim >= rank) {
    return Bad(spec, absl::StrCat("expert_dim ", spec.expert_dim, " is outside shape ", spec.shape.ToString()));
  }
  if (spec.initializer.kind == Initializer::Kind::kFunction && !spec.initializer.function) {
    return Bad(spec, "the initializer has no function");
  }
  return absl::OkStatus();
}

int64_t GlobalIndex(const ParameterSpec& spec, int64_t local_index) {
  if (spec.global_shape.empty()) return local_index;
  int64_t index = 0;
  int64_t stride = 1;
  for (int d = spec.shape.rank() - 1; d >= 0; --d) {
    const int64_t extent = spec.shape.dim(d);
    const size_t i = static_cast<size_t>(d);
    index += (spec.global_offset[i] + local_index % extent) * stride;
    local_index /= extent;
    stride *= spec.global_shape[i];
  }
  return index;
}

double InitialValue(const ParameterSpec& spec, uint64_t seed, int64_t local_index) {
  return ValueAt(spec.initializer, StreamOf(spec, seed), GlobalIndex(spec, local_index));
}

void FillInitialValues(const ParameterSpec& spec, uint64_t seed, int64_t begin, int64_t count, double* values) {
  const PhiloxStream stream = StreamOf(spec, seed);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = ValueAt(spec.initializer, stream, GlobalIndex(spec, begin + i));
  }
}

}  // namespace evenkeel::zero3
