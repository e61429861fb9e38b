#include "evenkeel/runtime/tensor/shape.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {

Shape::Shape(std::initializer_list<int64_t> dims) {
  absl::StatusOr<Shape> shape = Create(absl::MakeConstSpan(dims.begin(), dims.size()));
  EK_CHECK_OK(shape);
  *this = *std::move(shape);
}

absl::StatusOr<Shape> Shape::Create(absl::Span<const int64_t> dims) {
  Shape shape;
  shape.dims_.assign(dims.begin(), dims.end());
  for (int64_t dim : dims) {
    if (dim < 0) return absl::InvalidArgumentError(absl::StrCat("negative extent in shape ", shape.ToString()));
    EK_ASSIGN_OR_RETURN(shape.num_elements_, CheckedMul(shape.num_elements_, dim));
  }
  return shape;
}

std::string Shape::ToString() const { return absl::StrCat("[", absl::StrJoin(dims_, ", "), "]"); }

}  // namespace evenkeel
