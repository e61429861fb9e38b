// The attention projections cut by head, for canonical numerics: every product has the shape of one head and sums over
// heads follow the canonical tree, which an all-reduce continues over lanes. So neither q, k, v nor the sums depend on
// how many heads a lane has. Heads per lane and lanes are powers of two.
//
//   EK_ASSIGN_OR_RETURN(auto blocks, HeadBlocks::Create(sizes, &device, &stream));
//   EK_RETURN_IF_ERROR(blocks->Columns(x, wq, q));                        // q = x wq
//   EK_RETURN_IF_ERROR(blocks->RowsPartial(context, wo, partial));        // this lane's addend of context wo
//   EK_RETURN_IF_ERROR(tp.AllReduce(partial, partial, kSum, stream));
//
// Symbols: s rows, h hidden, d = local heads times head_dim. Weights and rows have the model's dtype; partial sums and
// weight gradients its wide dtype (f32 for 16 bits).
#ifndef EVENKEEL_TESTING_HEAD_BLOCKS_H_
#define EVENKEEL_TESTING_HEAD_BLOCKS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::testutil {

struct HeadBlockSizes {
  int64_t rows = 0;
  int64_t hidden = 0;
  int64_t heads = 1;  // of this lane
  int64_t head_dim = 0;
  DType dtype = DType::kF32;
};

// Enqueues on one stream; its scratch is used again by every call in stream order. Not thread-safe.
class HeadBlocks {
 public:
  // Device memory that one of these sizes holds as long as it lives.
  static int64_t ScratchBytes(const HeadBlockSizes& sizes);
  static absl::StatusOr<std::unique_ptr<HeadBlocks>> Create(const HeadBlockSizes& sizes, Device* device,
                                                            Stream* stream);

  // y [s, d] = x [s, h] * w [h, d], and dw += x' * dy.
  absl::Status Columns(ConstTensorView x, ConstTensorView w, TensorView y);
  absl::Status ColumnsWeightGradient(ConstTensorView x, ConstTensorView dy, TensorView dw);
  // The columns' input gradient: out [s, h] (wide) = the sum of dy[i] * w[i]' over `products`, in their order inside a
  // head and then over heads.
  absl::Status ColumnsInputPartial(absl::Span<const std::pair<ConstTensorView, ConstTensorView>> products,
                                   TensorView out);

  // out [s, h] (wide) = x [s, d] * w [d, h]; dw += x' * dy; dx [s, d] = dy [s, h] * w'.
  absl::Status RowsPartial(ConstTensorView x, ConstTensorView w, TensorView out);
  absl::Status RowsWeightGradient(ConstTensorView x, ConstTensorView dy, TensorView dw);
  absl::Status RowsInputGradient(ConstTensorView dy, ConstTensorView w, TensorView dx);

 private:
  HeadBlocks(const HeadBlockSizes& sizes, Stream* stream) : sizes_(sizes), stream_(*stream) {}
  absl::Status Allocate(Device* device);

  // Columns of one head of a [n, d] matrix as a dense [n, head_dim] copy, and back.
  absl::Status Take(ConstTensorView matrix, int64_t head, TensorView block);
  absl::Status Put(ConstTensorView block, int64_t head, TensorView matrix);
  // out = the tree's sum over heads [begin, end); `level` numbers the waiting sum to use.
  absl::Status Sum(int64_t begin, int64_t end, absl::FunctionRef<absl::Status(int64_t head, TensorView out)> leaf,
                   TensorView out, size_t level);

  const HeadBlockSizes sizes_;
  Stream& stream_;
  Tensor rows_block_;            // [s, head_dim]
  Tensor weight_block_;          // [h, head_dim]
  Tensor gradient_block_;        // [h, head_dim], wide
  Tensor addend_;                // [s, h], wide
  std::vector<Tensor> waiting_;  // [s, h], wide, by level of the tree
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_HEAD_BLOCKS_H_
