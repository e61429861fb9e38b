// A buffer between two guard patterns, and data that is unique by rank and position.
//
//   GuardedBuffer recv(bytes);          // filled with a pattern that no data has by chance
//   ... collective into recv.data() ...
//   EK_RETURN_IF_ERROR(recv.CheckGuards("recv"));
#ifndef EVENKEEL_COMM_TESTING_GUARDED_BUFFER_H_
#define EVENKEEL_COMM_TESTING_GUARDED_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// Not thread-safe.
class GuardedBuffer {
 public:
  // `skew` shifts the data by so many bytes from its alignment.
  explicit GuardedBuffer(int64_t bytes, int skew = 0);
  std::byte* data() { return storage_.data() + begin_; }
  int64_t bytes() const { return bytes_; }
  void Write(absl::Span<const std::byte> bytes, int64_t at = 0);
  TensorView View(DType dtype, int64_t begin, int64_t elements);
  // The whole buffer. A buffer of 0 bytes gives a null pointer.
  TensorView View(DType dtype);

  // DataLoss naming `what` and the byte when something was written around the data.
  absl::Status CheckGuards(absl::string_view what) const;
  // ... when any byte, data and guards, differs from what Remember saw.
  void Remember() { remembered_ = storage_; }
  absl::Status CheckUntouched(absl::string_view what) const;
  // ... when the data are not `expected`, naming the first element of `dtype` that differs.
  absl::Status CheckData(absl::string_view what, DType dtype, absl::Span<const std::byte> expected) const;

 private:
  int64_t bytes_;
  int64_t begin_;
  std::vector<std::byte> storage_;
  std::vector<std::byte> remembered_;
};

// `n` elements that depend on (rank, salt, position): finite, of both signs, of many magnitudes (so that the order of
// additions shows in the last bits), any bits for integers.
std::vector<std::byte> UniqueData(DType dtype, int rank, uint64_t salt, int64_t n);

// op over the ranks' data, one element at a time along the canonical tree, written from its rule alone: shares nothing
// with reduction.cc. Floating sums are also held against a sum in double; the text of a violation lands in `complaint`.
std::vector<std::byte> ReductionOracle(DType dtype, ReduceOp op, const std::vector<std::vector<std::byte>>& inputs,
                                       std::string* complaint);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_GUARDED_BUFFER_H_
