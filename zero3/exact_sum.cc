#include "evenkeel/zero3/exact_sum.h"

#include <bit>
#include <cmath>

namespace evenkeel::zero3 {
namespace {

constexpr int kPointBits = 2148;  // bit 0 of word 0 stands for 2^-2148
constexpr uint64_t kWordMask = 0xffffffffu;

}  // namespace

void ExactSumOfSquares::AddShifted(unsigned __int128 value, int shift) {
  size_t word = static_cast<size_t>(shift / 32);
  const int bits = shift % 32;
  // Word by word; a word stays far below 2^63 between normalizations (see Add).
  uint64_t carry_in = 0;
  while (value != 0) {
    const uint64_t low = static_cast<uint64_t>(value) & kWordMask;
    const uint64_t moved = low << bits;
    words_[word] += static_cast<int64_t>((moved & kWordMask) + carry_in);
    carry_in = moved >> 32;
    value >>= 32;
    ++word;
  }
  if (carry_in != 0) words_[word] += static_cast<int64_t>(carry_in);
}

// f32: squares of equal exponents are summed as integers first, below 2^48 each, then shifted into place.
int64_t ExactSumOfSquares::Add(const float* x, int64_t count) {
  constexpr int64_t kChunk = int64_t{1} << 15;
  int64_t non_finite = 0;
  std::array<uint64_t, 256> sums = {};
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const int64_t end = begin + kChunk < count ? begin + kChunk : count;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]);
      const uint32_t exponent = (bits >> 23) & 0xffu;
      const uint64_t mantissa = (bits & 0x7fffffu) | (exponent != 0 ? 0x800000u : 0u);
      sums[exponent] += mantissa * mantissa;
    }
    for (int e = 0; e < 255; ++e) {
      const uint64_t sum = sums[static_cast<size_t>(e)];
      // mantissa * 2^(max(e, 1) - 150), squared.
      if (sum != 0) AddShifted(sum, 2 * ((e > 0 ? e : 1) - 150) + kPointBits);
    }
    if (sums[255] != 0) {
      for (int64_t i = begin; i < end; ++i) non_finite += std::isfinite(x[i]) ? 0 : 1;
    }
    sums = {};
  }
  Normalize();
  return non_finite;
}

int64_t ExactSumOfSquares::Add(const double* x, int64_t count) {
  int64_t non_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = std::bit_cast<uint64_t>(x[i]);
    const int exponent = static_cast<int>((bits >> 52) & 0x7ff);
    if (exponent == 0x7ff) {
      ++non_finite;
      continue;
    }
    const uint64_t mantissa = (bits & 0xfffffffffffffu) | (exponent != 0 ? uint64_t{1} << 52 : 0);
    // mantissa * 2^(max(e, 1) - 1075), squared: the smallest shift is -2148 + 2148 = 0.
    const auto wide = static_cast<unsigned __int128>(mantissa);
    AddShifted(wide * wide, 2 * ((exponent > 0 ? exponent : 1) - 1075) + kPointBits);
    if ((i & 0xfffff) == 0xfffff) Normalize();
  }
  Normalize();
  return non_finite;
}

void ExactSumOfSquares::Normalize() {
  uint64_t carry = 0;
  for (int64_t& word : words_) {
    const uint64_t total = static_cast<uint64_t>(word) + carry;
    word = static_cast<int64_t>(total & kWordMask);
    carry = total >> 32;
  }
}

bool ExactSumOfSquares::is_zero() const {
  for (int64_t word : words_) {
    if (word != 0) return false;
  }
  return true;
}

double ExactSumOfSquares::Norm() const {
  ExactSumOfSquares sum = *this;
  sum.Normalize();
  int top = kWords - 1;
  while (top >= 0 && sum.words_[static_cast<size_t>(top)] == 0) --top;
  if (top < 0) return 0;
  // The leading 96 bits hold at least 65 significant ones; two of them fit a double's significand twice over.
  long double leading = 0;
  for (int i = 0; i < 3; ++i) {
    const int word = top - i;
    leading =
        leading * 4294967296.0L + (word >= 0 ? static_cast<long double>(sum.words_[static_cast<size_t>(word)]) : 0);
  }
  // Exponent of the third word, an even power of two for the root.
  int exponent = 32 * (top - 2) - kPointBits;
  if (exponent % 2 != 0) {
    leading *= 2;
    exponent -= 1;
  }
  return static_cast<double>(std::ldexp(std::sqrt(leading), exponent / 2));
}

}  // namespace evenkeel::zero3
