// Sums of squares without rounding: the same bits however the elements are cut into shards, buckets or layouts.
//
// Every square of a finite f32 or f64 is an integer multiple of 2^-2148. The accumulator is that integer, in 32-bit
// limbs kept in 64-bit words, so that two accumulators are added word by word, and an integer all-reduce of the words
// adds those of many ranks. Only the last step, the square root, rounds.
//
//   ExactSumOfSquares sum;
//   sum.Add(gradient_shard.data<float>(), count);
//   // all-reduce sum.words() over the ranks
//   double norm = sum.Norm();
//
// The idea of one long integer for all exponents is U. Kulisch's ("Computer arithmetic and validity", 2008).
#ifndef EVENKEEL_ZERO3_EXACT_SUM_H_
#define EVENKEEL_ZERO3_EXACT_SUM_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace evenkeel::zero3 {

// Not thread-safe. Up to 2^31 accumulators may be added word by word after Normalize.
class ExactSumOfSquares {
 public:
  // 2148 bits below the point, 2048 above, 64 for the number of terms.
  static constexpr int kWords = 134;

  // Adds x[i]^2. Returns the number of non-finite elements, which are not added.
  int64_t Add(const float* x, int64_t count);
  int64_t Add(const double* x, int64_t count);

  // Brings every word into [0, 2^32), so that sums over ranks cannot overflow.
  void Normalize();
  // The words, least significant first; to be summed over ranks after Normalize.
  absl::Span<int64_t> words() { return absl::MakeSpan(words_); }
  absl::Span<const int64_t> words() const { return words_; }

  // The square root of the sum, rounded from the leading 64 bits. 0 for an empty sum; never overflows.
  double Norm() const;
  bool is_zero() const;

 private:
  void AddShifted(unsigned __int128 value, int shift);

  std::array<int64_t, kWords> words_ = {};
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_EXACT_SUM_H_
