// The extents of a dense row-major tensor.
#ifndef EVENKEEL_RUNTIME_TENSOR_SHAPE_H_
#define EVENKEEL_RUNTIME_TENSOR_SHAPE_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace evenkeel {

// Extents, outermost first. A shape of rank 0 is a scalar (1 element). Extents
// may be 0, never negative. A value; as thread-safe as an int.
class Shape {
 public:
  Shape() = default;
  // For extents that are known to be good: dies on a negative one or on
  // overflow.
  Shape(std::initializer_list<int64_t> dims);
  // For extents from a caller or a file: InvalidArgument on a negative extent
  // or when the product overflows.
  static absl::StatusOr<Shape> Create(absl::Span<const int64_t> dims);

  int rank() const { return static_cast<int>(dims_.size()); }
  int64_t dim(int i) const { return dims_[i]; }
  absl::Span<const int64_t> dims() const { return dims_; }
  int64_t num_elements() const { return num_elements_; }
  // "[4, 8, 64]".
  std::string ToString() const;

  friend bool operator==(const Shape& a, const Shape& b) { return a.dims_ == b.dims_; }
  friend bool operator!=(const Shape& a, const Shape& b) { return !(a == b); }

 private:
  absl::InlinedVector<int64_t, 4> dims_;
  int64_t num_elements_ = 1;
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_TENSOR_SHAPE_H_
