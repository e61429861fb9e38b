// Integer arithmetic that reports overflow instead of wrapping. Every size that
// comes from a caller, a file or a peer passes through here before memory is
// asked for.
//
//   EK_ASSIGN_OR_RETURN(int64_t bytes, CheckedMul(count, SizeOf(dtype)));
#ifndef EVENKEEL_RUNTIME_BASE_CHECKED_MATH_H_
#define EVENKEEL_RUNTIME_BASE_CHECKED_MATH_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {

// a + b, or InvalidArgument "overflow" with both numbers.
inline absl::StatusOr<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    return absl::InvalidArgumentError(absl::StrCat("overflow: ", a, " + ", b));
  }
  return result;
}

// a * b, or InvalidArgument "overflow" with both numbers.
inline absl::StatusOr<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    return absl::InvalidArgumentError(absl::StrCat("overflow: ", a, " * ", b));
  }
  return result;
}

// The least multiple of `unit` that is not below `value`; value >= 0, unit
// >= 1.
inline absl::StatusOr<int64_t> CheckedRoundUp(int64_t value, int64_t unit) {
  if (value < 0 || unit < 1) {
    return absl::InvalidArgumentError(absl::StrCat("cannot round ", value, " up to a multiple of ", unit));
  }
  const int64_t remainder = value % unit;
  return remainder == 0 ? absl::StatusOr<int64_t>(value) : CheckedAdd(value, unit - remainder);
}

// ceil(a / b) for a >= 0, b >= 1.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_CHECKED_MATH_H_
