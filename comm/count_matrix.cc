#include "evenkeel/comm/count_matrix.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::comm {
namespace {

constexpr size_t kMaxListedPairs = 8;

}  // namespace

absl::StatusOr<std::vector<int64_t>> OffsetsOf(absl::Span<const int64_t> counts) {
  std::vector<int64_t> offsets(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] < 0) return absl::InvalidArgumentError(absl::StrCat("counts[", i, "] is ", counts[i]));
    if (__builtin_add_overflow(offsets[i], counts[i], &offsets[i + 1])) {
      return absl::InvalidArgumentError(
          absl::StrCat("overflow: the sum of counts up to index ", i, " is ", offsets[i], " + ", counts[i]));
    }
  }
  return offsets;
}

std::optional<Disagreement> FindCountMismatch(absl::Span<const int64_t> rows, int size) {
  Disagreement found{.what = "send and receive counts differ"};
  for (int from = 0; from < size; ++from) {
    const int64_t* const sends = rows.data() + int64_t{from} * 2 * size;
    for (int to = 0; to < size; ++to) {
      const int64_t sent = sends[to];
      const int64_t expected = rows[int64_t{to} * 2 * size + size + from];
      if (sent == expected || found.findings.size() >= 2 * kMaxListedPairs) continue;
      found.findings.push_back({from, absl::StrCat("sends ", sent, " elements to rank ", to)});
      found.findings.push_back({to, absl::StrCat("expects ", expected, " elements from rank ", from)});
    }
  }
  if (found.findings.empty()) return std::nullopt;
  return found;
}

std::optional<Disagreement> FindCountsDifference(absl::Span<const int64_t> rows, int stride, int size) {
  for (int i = 0; i < size; ++i) {
    for (int rank = 1; rank < size; ++rank) {
      if (rows[int64_t{rank} * stride + i] == rows[i]) continue;
      Disagreement found{.what = absl::StrCat("counts vectors differ at index ", i)};
      for (int r = 0; r < size; ++r) {
        found.findings.push_back({r, absl::StrCat("has counts[", i, "] = ", rows[int64_t{r} * stride + i])});
      }
      return found;
    }
  }
  return std::nullopt;
}

}  // namespace evenkeel::comm
