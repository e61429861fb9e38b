#include "evenkeel/runtime/ops/canonical_sum.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::ops_internal {

absl::Status CheckPositions(absl::string_view op, absl::Span<const int64_t> positions, int64_t rows) {
  if (positions.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(positions.size()) != rows) {
    return BadArgument(op, absl::StrCat(positions.size(), " positions for ", rows, " rows"));
  }
  for (int64_t i = 0; i < rows; ++i) {
    if (positions[i] < 0) return BadArgument(op, absl::StrCat("position ", i, " is ", positions[i]));
    if (i > 0 && positions[i] <= positions[i - 1]) {
      return BadArgument(op, absl::StrCat("positions must rise: position ", i - 1, " is ", positions[i - 1],
                                          ", position ", i, " is ", positions[i]));
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::ops_internal
