#include "evenkeel/moe/capacity.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
// Also the least that a sane factor needs: no capacity factor has an exponent near it.
constexpr int kMaxDecimalExponent = 40;

using Wide = unsigned __int128;

absl::Status BadDecimal(absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("\"", text, "\" is not a plain non-negative decimal number: ", why));
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// Digits and exponent of a decimal: value = digits * 10^exponent.
struct Decimal {
  int64_t digits = 0;
  int exponent = 0;
};

absl::StatusOr<Decimal> ParseMantissa(absl::string_view text, size_t* at) {
  Decimal decimal;
  bool seen_point = false;
  bool seen_digit = false;
  int pending_zeros = 0;  // not multiplied in until a later digit needs them
  for (; *at < text.size(); ++*at) {
    const char c = text[*at];
    if (c == '.' && !seen_point) {
      seen_point = true;
      continue;
    }
    if (!IsDigit(c)) break;
    seen_digit = true;
    if (seen_point) --decimal.exponent;
    if (c == '0') {
      ++pending_zeros;
      continue;
    }
    if (decimal.digits == 0) pending_zeros = 0;
    for (; pending_zeros >= 0; --pending_zeros) {
      if (__builtin_mul_overflow(decimal.digits, int64_t{10}, &decimal.digits)) return BadDecimal(text, "too long");
    }
    pending_zeros = 0;
    if (__builtin_add_overflow(decimal.digits, int64_t{c - '0'}, &decimal.digits)) return BadDecimal(text, "too long");
  }
  if (!seen_digit) return BadDecimal(text, "no digit");
  decimal.exponent += decimal.digits == 0 ? 0 : pending_zeros;
  return decimal;
}

absl::StatusOr<int> ParseExponent(absl::string_view text, size_t* at) {
  if (*at == text.size() || (text[*at] != 'e' && text[*at] != 'E')) return 0;
  ++*at;
  bool negative = false;
  if (*at < text.size() && (text[*at] == '-' || text[*at] == '+')) negative = text[(*at)++] == '-';
  if (*at == text.size()) return BadDecimal(text, "no digit in the exponent");
  int exponent = 0;
  for (; *at < text.size() && IsDigit(text[*at]); ++*at) {
    exponent = exponent * 10 + (text[*at] - '0');
    if (exponent > kMaxDecimalExponent) return BadDecimal(text, "exponent out of range");
  }
  return negative ? -exponent : exponent;
}

absl::StatusOr<int64_t> ToInt64(Wide value, const CapacityInput& input) {
  if (value > static_cast<Wide>(kMaxInt64)) {
    return absl::InvalidArgumentError(absl::StrCat("capacity overflows for ", input.tokens, " tokens, k ", input.top_k,
                                                   ", ", input.experts, " experts"));
  }
  return static_cast<int64_t>(value);
}

absl::Status CheckInput(const CapacityOptions& options, const CapacityInput& input) {
  if (input.tokens < 0 || input.experts < 1 || input.top_k < 1 || input.top_k > input.experts ||
      input.fullest_expert < 0 || options.min_capacity < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("capacity needs tokens >= 0, 1 <= k <= experts and no negative count, got tokens ", input.tokens,
                     ", experts ", input.experts, ", k ", input.top_k, ", fullest expert ", input.fullest_expert,
                     ", minimum ", options.min_capacity));
  }
  if (options.mode == CapacityMode::kFactor && options.factor.is_zero()) {
    return absl::InvalidArgumentError("a capacity factor of 0 has no slots; choose dropless or no-drop instead");
  }
  return absl::OkStatus();
}

// ceil(tokens * k * numerator / (experts * denominator)), exactly.
absl::StatusOr<int64_t> FactorNeed(const Rational& factor, const CapacityInput& input) {
  EK_ASSIGN_OR_RETURN(const int64_t routes, CheckedMul(input.tokens, input.top_k));
  const Wide numerator = static_cast<Wide>(routes) * static_cast<Wide>(factor.numerator());
  const Wide denominator = static_cast<Wide>(input.experts) * static_cast<Wide>(factor.denominator());
  return ToInt64(numerator / denominator + (numerator % denominator != 0 ? 1 : 0), input);
}

}  // namespace

absl::StatusOr<Rational> Rational::Create(int64_t numerator, int64_t denominator) {
  if (numerator < 0 || denominator < 1) {
    return absl::InvalidArgumentError(absl::StrCat("not a non-negative fraction: ", numerator, "/", denominator));
  }
  const int64_t divisor = std::gcd(numerator, denominator);
  return Rational(numerator / divisor, denominator / divisor);
}

absl::StatusOr<Rational> Rational::Parse(absl::string_view decimal) {
  size_t at = 0;
  EK_ASSIGN_OR_RETURN(Decimal value, ParseMantissa(decimal, &at));
  EK_ASSIGN_OR_RETURN(const int exponent, ParseExponent(decimal, &at));
  if (at != decimal.size()) return BadDecimal(decimal, "unexpected characters");
  if (value.digits == 0) return Rational();
  int64_t numerator = value.digits;
  int64_t denominator = 1;
  for (int64_t power = int64_t{value.exponent} + exponent; power != 0; power += power > 0 ? -1 : 1) {
    int64_t& part = power > 0 ? numerator : denominator;
    // Cancels as it goes, so that "0.50000000000000000000" fits too.
    if (power < 0 && numerator % 10 == 0) {
      numerator /= 10;
    } else if (__builtin_mul_overflow(part, int64_t{10}, &part)) {
      return BadDecimal(decimal, "needs more than 64 bits");
    }
  }
  return Create(numerator, denominator);
}

absl::StatusOr<Rational> Rational::FromDouble(double value) {
  if (!std::isfinite(value) || std::signbit(value)) {
    return absl::InvalidArgumentError(absl::StrCat("not a non-negative finite number: ", value));
  }
  char text[64];
  const std::to_chars_result end = std::to_chars(text, text + sizeof(text), value);
  EK_CHECK(end.ec == std::errc());
  return Parse(absl::string_view(text, end.ptr - text));
}

std::string Rational::ToString() const { return absl::StrCat(numerator_, "/", denominator_); }

absl::StatusOr<int64_t> LocalCapacityNeed(const CapacityOptions& options, const CapacityInput& input) {
  EK_RETURN_IF_ERROR(CheckInput(options, input));
  switch (options.mode) {
    case CapacityMode::kDropless:
      return 0;
    case CapacityMode::kNoDrop:
      return input.fullest_expert;
    case CapacityMode::kFactor: {
      EK_ASSIGN_OR_RETURN(const int64_t need, FactorNeed(options.factor, input));
      return std::max(need, options.min_capacity);
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown capacity mode ", static_cast<int>(options.mode)));
}

bool CapacityNeedsAgreement(const CapacityOptions& options) {
  return options.mode == CapacityMode::kNoDrop || (options.mode == CapacityMode::kFactor && !options.equal_tokens);
}

absl::StatusOr<int64_t> ComputeCapacity(const CapacityOptions& options, const CapacityInput& input, int multiple_of,
                                        absl::FunctionRef<absl::StatusOr<int64_t>(int64_t)> max_over_sources) {
  if (multiple_of < 1 || options.multiple < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("capacity cannot be a multiple of ", multiple_of, " and ", options.multiple));
  }
  EK_ASSIGN_OR_RETURN(int64_t capacity, LocalCapacityNeed(options, input));
  if (CapacityNeedsAgreement(options)) {
    const int64_t local = capacity;
    EK_ASSIGN_OR_RETURN(capacity, max_over_sources(local));
    if (capacity < local) {
      return absl::FailedPreconditionError(
          absl::StrCat("the agreed capacity ", capacity, " is below this source's need ", local));
    }
  }
  return CheckedRoundUp(capacity, std::lcm(int64_t{multiple_of}, int64_t{options.multiple}));
}

}  // namespace evenkeel::moe
