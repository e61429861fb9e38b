#include "evenkeel/runtime/tensor/tensor.h"

#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {

absl::StatusOr<Tensor> Tensor::Create(Device* device, DType dtype, const Shape& shape) {
  EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(shape.num_elements(), SizeOf(dtype)));
  EK_ASSIGN_OR_RETURN(Buffer buffer, device->Allocate(bytes));
  TensorView view(buffer.data(), dtype, shape);
  return Tensor(std::move(buffer), std::move(view));
}

absl::StatusOr<Tensor> Tensor::Zeros(Device* device, DType dtype, const Shape& shape) {
  EK_ASSIGN_OR_RETURN(Tensor tensor, Create(device, dtype, shape));
  EK_RETURN_IF_ERROR(device->FillNow(tensor.view().raw(), 0, tensor.view().num_bytes()));
  return tensor;
}

}  // namespace evenkeel
