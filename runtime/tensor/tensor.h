// A tensor that owns its memory on a device.
#ifndef EVENKEEL_RUNTIME_TENSOR_TENSOR_H_
#define EVENKEEL_RUNTIME_TENSOR_TENSOR_H_

#include <utility>

#include "absl/status/statusor.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// Owns one Buffer. Movable, not copyable. Not thread-safe; views of it may be
// read from many threads.
class Tensor {
 public:
  Tensor() = default;
  // Uninitialised elements (debug builds: NaN pattern). `device` must outlive
  // the tensor. InvalidArgument when the byte count overflows,
  // ResourceExhausted when the device has no memory.
  static absl::StatusOr<Tensor> Create(Device* device, DType dtype, const Shape& shape);
  // All bytes zero, written before it returns (no stream needed).
  static absl::StatusOr<Tensor> Zeros(Device* device, DType dtype, const Shape& shape);

  const TensorView& view() const { return view_; }
  ConstTensorView const_view() const { return view_; }
  const Shape& shape() const { return view_.shape(); }
  DType dtype() const { return view_.dtype(); }
  template <typename T>
  T* data() const {
    return view_.data<T>();
  }

 private:
  Tensor(Buffer buffer, TensorView view) : buffer_(std::move(buffer)), view_(std::move(view)) {}

  Buffer buffer_;
  TensorView view_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_TENSOR_TENSOR_H_
