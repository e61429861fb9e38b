#include "evenkeel/comm/grouped_overlap.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {
namespace {

// Memory of one call.
struct Interval {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int call = 0;
  bool is_written = false;
};

// The two furthest ends of what came before, of two different calls.
class FurthestEnds {
 public:
  // A call other than `call` that reaches beyond `begin`, or -1.
  int Reaching(uintptr_t begin, int call) const {
    const Interval& other = first_.call == call ? second_ : first_;
    return other.end > begin ? other.call : -1;
  }
  void Add(const Interval& interval) {
    if (interval.call == first_.call) {
      first_.end = std::max(first_.end, interval.end);
    } else if (interval.end > first_.end) {
      second_ = std::exchange(first_, interval);
    } else if (interval.end > second_.end) {
      second_ = interval;
    }
  }

 private:
  Interval first_{.call = -1};
  Interval second_{.call = -1};
};

}  // namespace

absl::Status CheckApart(absl::Span<const GroupedCall> calls) {
  std::vector<Interval> intervals;
  const auto add = [&intervals](const ConstTensorView& view, int call, bool is_written) {
    const auto begin = reinterpret_cast<uintptr_t>(view.raw());
    if (view.num_bytes() > 0) {
      intervals.push_back({begin, begin + static_cast<uint64_t>(view.num_bytes()), call, is_written});
    }
  };
  for (int i = 0; i < static_cast<int>(calls.size()); ++i) {
    add(calls[i].send, i, false);
    add(ConstTensorView(calls[i].recv.raw(), calls[i].recv.dtype(), calls[i].recv.shape()), i, true);
  }
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  FurthestEnds all, written;
  for (const Interval& interval : intervals) {
    const int other = (interval.is_written ? all : written).Reaching(interval.begin, interval.call);
    if (other >= 0) {
      return absl::InvalidArgumentError(absl::StrCat("call ", std::min(other, interval.call), " and call ",
                                                     std::max(other, interval.call),
                                                     " of the group overlap in memory that one of them writes"));
    }
    all.Add(interval);
    if (interval.is_written) written.Add(interval);
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
