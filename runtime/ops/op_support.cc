#include "evenkeel/runtime/ops/op_support.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::ops_internal {

std::string Describe(const ConstTensorView& view) {
  return absl::StrCat(DTypeName(view.dtype()), " ", view.shape().ToString());
}

absl::Status BadArgument(absl::string_view op, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", what));
}

absl::Status CheckShape(absl::string_view op, absl::string_view name, const ConstTensorView& view,
                        const Shape& wanted) {
  if (view.shape() == wanted) return absl::OkStatus();
  return BadArgument(op, absl::StrCat(name, " is ", Describe(view), ", its shape must be ", wanted.ToString()));
}

absl::Status CheckDType(absl::string_view op, absl::string_view name, const ConstTensorView& view, DType wanted) {
  if (view.dtype() == wanted) return absl::OkStatus();
  return BadArgument(op, absl::StrCat(name, " is ", Describe(view), ", its dtype must be ", DTypeName(wanted)));
}

absl::Status CheckRank(absl::string_view op, absl::string_view name, const ConstTensorView& view, int wanted) {
  if (view.shape().rank() == wanted) return absl::OkStatus();
  return BadArgument(op, absl::StrCat(name, " is ", Describe(view), ", it must have ", wanted, " dimensions"));
}

absl::Status CheckLike(absl::string_view op, absl::string_view name, const ConstTensorView& view,
                       const ConstTensorView& like) {
  if (view.shape() == like.shape() && view.dtype() == like.dtype()) return absl::OkStatus();
  return BadArgument(op, absl::StrCat(name, " is ", Describe(view), ", it must be ", Describe(like)));
}

absl::Status CheckFloat(absl::string_view op, absl::string_view name, const ConstTensorView& view) {
  if (IsFloating(view.dtype())) return absl::OkStatus();
  return BadArgument(op, absl::StrCat(name, " is ", Describe(view), ", its dtype must be f32, f64, bf16 or f16"));
}

}  // namespace evenkeel::ops_internal
