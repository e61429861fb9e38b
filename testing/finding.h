// What one judge has found so far on one rank: the earliest difference and how far the worst one goes.
#ifndef EVENKEEL_TESTING_FINDING_H_
#define EVENKEEL_TESTING_FINDING_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "evenkeel/testing/parity_result.h"

namespace evenkeel::testutil {

// A value; merged over ranks by the parity run.
struct Finding {
  // Where inside a step the first difference was seen: orders differences of one step.
  int64_t place = 0;
  std::optional<FirstDifference> first;
  double max_abs_diff = 0;
  double bound_used = 0;  // largest difference / bound
  std::string worst;      // the tensor with that ratio
  int64_t values_compared = 0;
  int64_t routing_differences = 0;

  // Keeps the earlier of what is known and `difference`: by step, then place, then rank.
  void Add(int64_t at, FirstDifference difference) {
    const auto key = [](int64_t p, const FirstDifference& d) { return std::make_tuple(d.step, p, d.rank); };
    if (first.has_value() && key(place, *first) <= key(at, difference)) return;
    place = at;
    first = std::move(difference);
  }
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_FINDING_H_
