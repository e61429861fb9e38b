#include "evenkeel/runtime/ops/layout.h"

#include <cstddef>
#include <cstring>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/op_support.h"

namespace evenkeel {
namespace {

using ops_internal::BadArgument;
using ops_internal::CheckDType;
using ops_internal::Describe;

// Bytes of one element of the two outermost dimensions.
int64_t BlockBytes(const ConstTensorView& x) {
  int64_t bytes = SizeOf(x.dtype());
  for (int i = 2; i < x.shape().rank(); ++i) bytes *= x.shape().dim(i);
  return bytes;
}

// `part` is rows [begin, begin + its second extent) of every outer row of `whole`.
absl::Status CheckSlice(absl::string_view op, const ConstTensorView& whole, int64_t begin,
                        const ConstTensorView& part) {
  EK_RETURN_IF_ERROR(CheckDType(op, "the slice", part, whole.dtype()));
  bool fits = whole.shape().rank() >= 2 && whole.shape().rank() == part.shape().rank();
  for (int i = 0; fits && i < whole.shape().rank(); ++i) {
    fits = i == 1 || whole.shape().dim(i) == part.shape().dim(i);
  }
  if (fits) fits = begin >= 0 && begin <= whole.shape().dim(1) - part.shape().dim(1);
  if (fits) return absl::OkStatus();
  return BadArgument(
      op, absl::StrCat(Describe(part), " is no slice of ", Describe(whole), " from ", begin, " along dimension 1"));
}

// Copies `count` runs of `bytes` bytes.
void CopyRuns(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t count,
              int64_t bytes) {
  if (bytes == 0) return;
  for (int64_t i = 0; i < count; ++i, from += from_stride, to += to_stride) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

}  // namespace

absl::Status SliceMiddle(ConstTensorView x, int64_t begin, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckSlice("SliceMiddle", x, begin, out));
  const int64_t block = BlockBytes(x);
  return stream.Launch([from = static_cast<const std::byte*>(x.raw()), from_stride = x.shape().dim(1) * block,
                        offset = begin * block, to = static_cast<std::byte*>(out.raw()),
                        bytes = out.shape().dim(1) * block, count = x.shape().dim(0)] {
    if (bytes > 0 && count > 0) CopyRuns(from + offset, from_stride, to, bytes, count, bytes);
    return absl::OkStatus();
  });
}

absl::Status PlaceMiddle(ConstTensorView x, int64_t begin, TensorView out, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckSlice("PlaceMiddle", out, begin, x));
  const int64_t block = BlockBytes(x);
  return stream.Launch([from = static_cast<const std::byte*>(x.raw()), bytes = x.shape().dim(1) * block,
                        to = static_cast<std::byte*>(out.raw()), to_stride = out.shape().dim(1) * block,
                        offset = begin * block, count = x.shape().dim(0)] {
    if (bytes > 0 && count > 0) CopyRuns(from, bytes, to + offset, to_stride, count, bytes);
    return absl::OkStatus();
  });
}

absl::Status SwapOuter(ConstTensorView x, TensorView out, Stream& stream) {
  static constexpr char kOp[] = "SwapOuter";
  if (x.shape().rank() < 2) return BadArgument(kOp, absl::StrCat("x is ", Describe(x), ", it needs 2 dimensions"));
  EK_RETURN_IF_ERROR(CheckDType(kOp, "out", out, x.dtype()));
  if (out.num_elements() != x.num_elements()) {
    return BadArgument(kOp, absl::StrCat("out is ", Describe(out), ", x is ", Describe(x), ": unequal numbers"));
  }
  return stream.Launch([from = static_cast<const std::byte*>(x.raw()), to = static_cast<std::byte*>(out.raw()),
                        n = x.shape().dim(0), m = x.shape().dim(1), block = BlockBytes(x)] {
    if (n * m * block == 0) return absl::OkStatus();
    for (int64_t a = 0; a < n; ++a) CopyRuns(from + a * m * block, block, to + a * block, n * block, m, block);
    return absl::OkStatus();
  });
}

}  // namespace evenkeel
