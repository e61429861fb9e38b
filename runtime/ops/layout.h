// Copies that rearrange whole blocks of a dense tensor: slicing and permuting dimensions. Any dtype, no arithmetic.
//
//   // Lane t's share of the slots of [experts, capacity, hidden]:
//   EK_RETURN_IF_ERROR(SliceMiddle(slots, t * capacity / T, share, stream));
//   // What an all-gather of shares delivers, [T, experts, capacity / T, hidden], put in slot order:
//   EK_RETURN_IF_ERROR(SwapOuter(gathered, slots_by_expert, stream));
#ifndef EVENKEEL_RUNTIME_OPS_LAYOUT_H_
#define EVENKEEL_RUNTIME_OPS_LAYOUT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel {

// out[a, i, ..] = x[a, begin + i, ..]. x: [n, m, ..], out: [n, count, ..] with the same trailing extents; rank >= 2.
// InvalidArgument when shapes, dtypes or the range do not fit. No overlap.
absl::Status SliceMiddle(ConstTensorView x, int64_t begin, TensorView out, Stream& stream);

// out[a, begin + i, ..] = x[a, i, ..], the rest of out untouched: the inverse of SliceMiddle.
absl::Status PlaceMiddle(ConstTensorView x, int64_t begin, TensorView out, Stream& stream);

// out[b, a, ..] = x[a, b, ..]: swaps the two outermost dimensions. x: [n, m, ..], out: m * n blocks in that order, of
// any shape with as many elements as x; rank of x >= 2. No overlap.
absl::Status SwapOuter(ConstTensorView x, TensorView out, Stream& stream);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_OPS_LAYOUT_H_
