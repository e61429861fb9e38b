// The one function that decides how many slots each expert has.
//
// Exact integer and rational arithmetic, one fixed order: local need -> minimum -> MAX over the EP sources -> round up
// to a multiple of T -> final. Nobody changes the result afterwards: padded exchanges rely on it being equal on all EP
// sources and divisible by T.
//
//   CapacityOptions options;                            // factor 1, at least 4 slots
//   EK_ASSIGN_OR_RETURN(options.factor, Rational::Parse("1.25"));
//   EK_ASSIGN_OR_RETURN(int64_t c, ComputeCapacity(options, {.tokens = s, .experts = e, .top_k = k}, T, agree));
#ifndef EVENKEEL_MOE_CAPACITY_H_
#define EVENKEEL_MOE_CAPACITY_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::moe {

// A non-negative fraction in lowest terms. A value.
class Rational {
 public:
  Rational() = default;  // 0
  // numerator >= 0, denominator >= 1; InvalidArgument otherwise.
  static absl::StatusOr<Rational> Create(int64_t numerator, int64_t denominator);
  // Decimal text such as "1.25", "2", ".5", "1e-1": exactly that number. InvalidArgument for anything else (signs,
  // nan, inf, trailing characters) and for numbers that do not fit 64-bit numerator and denominator.
  static absl::StatusOr<Rational> Parse(absl::string_view decimal);
  // What was meant by a double: the shortest decimal that reads back as `value` (0.1 -> 1/10).
  static absl::StatusOr<Rational> FromDouble(double value);

  int64_t numerator() const { return numerator_; }
  int64_t denominator() const { return denominator_; }
  bool is_zero() const { return numerator_ == 0; }
  std::string ToString() const;  // "5/4"
  friend bool operator==(const Rational&, const Rational&) = default;

 private:
  Rational(int64_t numerator, int64_t denominator) : numerator_(numerator), denominator_(denominator) {}
  int64_t numerator_ = 0;
  int64_t denominator_ = 1;
};

enum class CapacityMode : uint8_t {
  kFactor = 0,    // ceil(tokens * k * factor / experts), at least min_capacity; more routes are dropped
  kNoDrop = 1,    // as many slots as the fullest expert of any source needs; nothing is dropped
  kDropless = 2,  // no slots at all: ragged orders only; the capacity is 0
};

struct CapacityOptions {
  CapacityMode mode = CapacityMode::kFactor;
  Rational factor = *Rational::Create(1, 1);
  int64_t min_capacity = 4;
  // The caller promises that all EP sources have equally many active tokens in every step. Then kFactor needs no
  // agreement and no collective. A broken promise is caught by the exchange (counts differ), not here.
  bool equal_tokens = false;
  // Slots are rounded up to a multiple of this as well as of T: with a multiple of every T in question, which routes
  // are dropped does not depend on T.
  int multiple = 1;
};

// The numbers of one EP source. Tokens are active (unmasked) tokens.
struct CapacityInput {
  int64_t tokens = 0;
  int64_t experts = 1;
  int64_t top_k = 1;
  int64_t fullest_expert = 0;  // the largest number of routes that any expert was assigned; for kNoDrop
};

// The first two steps: what this source needs on its own. 0 when dropless. InvalidArgument for extents that make no
// sense (negative tokens, k > experts, a negative minimum) or when the result overflows.
absl::StatusOr<int64_t> LocalCapacityNeed(const CapacityOptions& options, const CapacityInput& input);

// True when the sources have to agree, so `max_over_sources` below is called. Depends on options only, never on data.
bool CapacityNeedsAgreement(const CapacityOptions& options);

// The final capacity. `max_over_sources` returns the maximum of its argument over all EP sources (all of them call it);
// it is called exactly once if CapacityNeedsAgreement, else never. multiple_of: T, at least 1, as is options.multiple.
absl::StatusOr<int64_t> ComputeCapacity(const CapacityOptions& options, const CapacityInput& input, int multiple_of,
                                        absl::FunctionRef<absl::StatusOr<int64_t>(int64_t)> max_over_sources);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_CAPACITY_H_
