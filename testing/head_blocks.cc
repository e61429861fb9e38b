#include "evenkeel/testing/head_blocks.h"

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/layout.h"

namespace evenkeel::testutil {

absl::StatusOr<std::unique_ptr<HeadBlocks>> HeadBlocks::Create(const HeadBlockSizes& sizes, Device* device,
                                                               Stream* stream) {
  std::unique_ptr<HeadBlocks> blocks(new HeadBlocks(sizes, stream));
  EK_RETURN_IF_ERROR(blocks->Allocate(device));
  return blocks;
}

int64_t HeadBlocks::ScratchBytes(const HeadBlockSizes& sizes) {
  const int64_t own = SizeOf(sizes.dtype), wide = SizeOf(WideDType(sizes.dtype));
  int64_t sums = 1;  // an addend, and one that waits on each level of the tree over heads
  for (int64_t heads = 1; heads < sizes.heads; heads *= 2) ++sums;
  return (sizes.rows + sizes.hidden) * sizes.head_dim * own + sizes.hidden * sizes.head_dim * wide +
         sums * sizes.rows * sizes.hidden * wide;
}

absl::Status HeadBlocks::Allocate(Device* device) {
  const DType wide = WideDType(sizes_.dtype);
  const Shape sums({sizes_.rows, sizes_.hidden});
  EK_ASSIGN_OR_RETURN(rows_block_, Tensor::Create(device, sizes_.dtype, Shape({sizes_.rows, sizes_.head_dim})));
  EK_ASSIGN_OR_RETURN(weight_block_, Tensor::Create(device, sizes_.dtype, Shape({sizes_.hidden, sizes_.head_dim})));
  EK_ASSIGN_OR_RETURN(gradient_block_, Tensor::Create(device, wide, Shape({sizes_.hidden, sizes_.head_dim})));
  EK_ASSIGN_OR_RETURN(addend_, Tensor::Create(device, wide, sums));
  for (int64_t heads = 1; heads < sizes_.heads; heads *= 2) {
    EK_ASSIGN_OR_RETURN(Tensor waiting, Tensor::Create(device, wide, sums));
    waiting_.push_back(std::move(waiting));
  }
  return absl::OkStatus();
}

absl::Status HeadBlocks::Take(ConstTensorView matrix, int64_t head, TensorView block) {
  const int64_t n = matrix.shape().dim(0), width = sizes_.head_dim;
  return SliceMiddle(matrix.Reshaped(Shape({n, sizes_.heads, width})), head, block.Reshaped(Shape({n, 1, width})),
                     stream_);
}

absl::Status HeadBlocks::Put(ConstTensorView block, int64_t head, TensorView matrix) {
  const int64_t n = matrix.shape().dim(0), width = sizes_.head_dim;
  return PlaceMiddle(block.Reshaped(Shape({n, 1, width})), head, matrix.Reshaped(Shape({n, sizes_.heads, width})),
                     stream_);
}

absl::Status HeadBlocks::Sum(int64_t begin, int64_t end,
                             absl::FunctionRef<absl::Status(int64_t head, TensorView out)> leaf, TensorView out,
                             size_t level) {
  if (end - begin == 1) return leaf(begin, out);
  const int64_t middle = begin + (end - begin) / 2;  // heads of a lane are a power of two
  EK_RETURN_IF_ERROR(Sum(begin, middle, leaf, out, level + 1));
  EK_RETURN_IF_ERROR(Sum(middle, end, leaf, waiting_[level].view(), level + 1));
  return Add(out, waiting_[level].const_view(), out, stream_);
}

absl::Status HeadBlocks::Columns(ConstTensorView x, ConstTensorView w, TensorView y) {
  for (int64_t head = 0; head < sizes_.heads; ++head) {
    EK_RETURN_IF_ERROR(Take(w, head, weight_block_.view()));
    EK_RETURN_IF_ERROR(Gemm(false, false, 1, x, weight_block_.const_view(), 0, rows_block_.view(), stream_));
    EK_RETURN_IF_ERROR(Put(rows_block_.const_view(), head, y));
  }
  return absl::OkStatus();
}

absl::Status HeadBlocks::ColumnsWeightGradient(ConstTensorView x, ConstTensorView dy, TensorView dw) {
  for (int64_t head = 0; head < sizes_.heads; ++head) {
    EK_RETURN_IF_ERROR(Take(dy, head, rows_block_.view()));
    EK_RETURN_IF_ERROR(Take(dw, head, gradient_block_.view()));
    EK_RETURN_IF_ERROR(GemmWeightGradient(x, rows_block_.const_view(), {}, gradient_block_.view(), stream_));
    EK_RETURN_IF_ERROR(Put(gradient_block_.const_view(), head, dw));
  }
  return absl::OkStatus();
}

absl::Status HeadBlocks::ColumnsInputPartial(absl::Span<const std::pair<ConstTensorView, ConstTensorView>> products,
                                             TensorView out) {
  const auto one_head = [&](int64_t head, TensorView sum) -> absl::Status {
    for (size_t i = 0; i < products.size(); ++i) {
      EK_RETURN_IF_ERROR(Take(products[i].first, head, rows_block_.view()));
      EK_RETURN_IF_ERROR(Take(products[i].second, head, weight_block_.view()));
      const TensorView to = i == 0 ? sum : addend_.view();
      EK_RETURN_IF_ERROR(Gemm(false, true, 1, rows_block_.const_view(), weight_block_.const_view(), 0, to, stream_));
      if (i > 0) EK_RETURN_IF_ERROR(Add(sum, addend_.const_view(), sum, stream_));
    }
    return absl::OkStatus();
  };
  return Sum(0, sizes_.heads, one_head, out, 0);
}

absl::Status HeadBlocks::RowsPartial(ConstTensorView x, ConstTensorView w, TensorView out) {
  const auto one_head = [&](int64_t head, TensorView sum) -> absl::Status {
    EK_RETURN_IF_ERROR(Take(x, head, rows_block_.view()));
    const ConstTensorView rows = w.Rows(head * sizes_.head_dim, sizes_.head_dim);
    return Gemm(false, false, 1, rows_block_.const_view(), rows, 0, sum, stream_);
  };
  return Sum(0, sizes_.heads, one_head, out, 0);
}

absl::Status HeadBlocks::RowsWeightGradient(ConstTensorView x, ConstTensorView dy, TensorView dw) {
  for (int64_t head = 0; head < sizes_.heads; ++head) {
    EK_RETURN_IF_ERROR(Take(x, head, rows_block_.view()));
    EK_RETURN_IF_ERROR(GemmWeightGradient(rows_block_.const_view(), dy, {},
                                          dw.Rows(head * sizes_.head_dim, sizes_.head_dim), stream_));
  }
  return absl::OkStatus();
}

absl::Status HeadBlocks::RowsInputGradient(ConstTensorView dy, ConstTensorView w, TensorView dx) {
  for (int64_t head = 0; head < sizes_.heads; ++head) {
    const ConstTensorView rows = w.Rows(head * sizes_.head_dim, sizes_.head_dim);
    EK_RETURN_IF_ERROR(Gemm(false, true, 1, dy, rows, 0, rows_block_.view(), stream_));
    EK_RETURN_IF_ERROR(Put(rows_block_.const_view(), head, dx));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::testutil
