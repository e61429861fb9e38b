// The collectives over leaves that a rank has issued, in order: what must be the same on all ranks.
//
// Two units of equal size that one rank takes in another order are mixed up without any collective noticing. So every
// rank keeps a digest of its order, the step compares the digests, and where they differ the lists are exchanged
// (lengths first: they need not be equally long) and shown side by side.
#ifndef EVENKEEL_ZERO3_ORDER_LOG_H_
#define EVENKEEL_ZERO3_ORDER_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::zero3 {

// Not thread-safe.
class OrderLog {
 public:
  enum class Call : uint8_t { kGather, kReduce };

  void Add(Call call, int unit);
  // Of all calls since the log was made.
  uint64_t digest() const { return digest_; }
  // The calls since the last Forget, as words: 2 * unit + call.
  absl::Span<const int64_t> calls() const { return calls_; }
  void Forget() { calls_.clear(); }

 private:
  uint64_t digest_ = 0;
  std::vector<int64_t> calls_;
};

// What every rank that differs from the most common list has done, against that list: both lengths, the first
// difference, and the calls around it on both sides. `lists`: one per rank. `unit_names`: of this rank.
std::vector<RankFinding> CompareOrders(const std::vector<std::vector<int64_t>>& lists,
                                       absl::Span<const std::string> unit_names);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_ORDER_LOG_H_
