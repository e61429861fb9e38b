#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {
namespace {

// The shape of `count` outermost rows, and the byte offset of row `begin`.
std::pair<Shape, int64_t> RowRange(const Shape& shape, DType dtype, int64_t begin, int64_t count) {
  EK_CHECK(shape.rank() >= 1 && begin >= 0 && count >= 0 && begin + count <= shape.dim(0));
  absl::InlinedVector<int64_t, 4> dims(shape.dims().begin(), shape.dims().end());
  int64_t row_elements = 1;
  for (int i = 1; i < shape.rank(); ++i) row_elements *= dims[i];
  dims[0] = count;
  absl::StatusOr<Shape> rows = Shape::Create(dims);
  EK_CHECK_OK(rows);
  return {*std::move(rows), begin * row_elements * SizeOf(dtype)};
}

}  // namespace

TensorView TensorView::Rows(int64_t begin, int64_t count) const {
  auto [shape, offset] = RowRange(shape_, dtype_, begin, count);
  return TensorView(static_cast<std::byte*>(data_) + offset, dtype_, std::move(shape));
}

ConstTensorView ConstTensorView::Rows(int64_t begin, int64_t count) const {
  auto [shape, offset] = RowRange(shape_, dtype_, begin, count);
  return ConstTensorView(static_cast<const std::byte*>(data_) + offset, dtype_, std::move(shape));
}

}  // namespace evenkeel
