// Non-owning views of dense row-major tensors. Strided data cannot be
// expressed: pack it first.
//
//   ConstTensorView x(data, DType::kF32, {tokens, hidden});
//   const float* row = x.data<float>() + 3 * hidden;
#ifndef EVENKEEL_RUNTIME_TENSOR_TENSOR_VIEW_H_
#define EVENKEEL_RUNTIME_TENSOR_TENSOR_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"

namespace evenkeel {
namespace tensor_internal {

template <typename VoidPtr>
class BasicView {
 public:
  BasicView() = default;
  // By reference: g++ 12 warns of uninitialised memory when it inlines the move of a temporary shape.
  BasicView(VoidPtr data, DType dtype, const Shape& shape) : data_(data), dtype_(dtype), shape_(shape) {}

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int64_t num_elements() const { return shape_.num_elements(); }
  int64_t num_bytes() const { return shape_.num_elements() * SizeOf(dtype_); }
  VoidPtr raw() const { return data_; }

 protected:
  VoidPtr data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_ = Shape({0});
};

}  // namespace tensor_internal

// A view that may be written through. The owner of the memory must outlive it.
// A value.
class TensorView : public tensor_internal::BasicView<void*> {
 public:
  using BasicView::BasicView;
  // The elements; dies when T is not the dtype.
  template <typename T>
  T* data() const {
    EK_CHECK(DTypeOf<T> == dtype_);
    return static_cast<T*>(data_);
  }
  // The same bytes with another shape of equally many elements.
  TensorView Reshaped(Shape shape) const {
    EK_CHECK(shape.num_elements() == num_elements());
    return TensorView(data_, dtype_, std::move(shape));
  }
  // Rows [begin, begin + count) of the outermost dimension.
  TensorView Rows(int64_t begin, int64_t count) const;
};

// A read-only view. Any TensorView converts to it.
class ConstTensorView : public tensor_internal::BasicView<const void*> {
 public:
  using BasicView::BasicView;
  ConstTensorView(const TensorView& view)  // NOLINT(runtime/explicit): a view
                                           // of the same thing
      : BasicView(view.raw(), view.dtype(), view.shape()) {}
  template <typename T>
  const T* data() const {
    EK_CHECK(DTypeOf<T> == dtype_);
    return static_cast<const T*>(data_);
  }
  ConstTensorView Reshaped(Shape shape) const {
    EK_CHECK(shape.num_elements() == num_elements());
    return ConstTensorView(data_, dtype_, std::move(shape));
  }
  ConstTensorView Rows(int64_t begin, int64_t count) const;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_TENSOR_TENSOR_VIEW_H_
