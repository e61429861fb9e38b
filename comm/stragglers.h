// Ranks that come late to calls, inside their limits: no error, but worth a line.
//
// A rank that has waited `after` in the agreement of a call (or a quarter of the call's limit, when that is less) notes
// who has not come yet. When the call goes on, it counts them, and the lowest rank that waited reports: at the first,
// second, fourth, eighth ... time that a rank of the group was the late one.
//
//   comm all_reduce group=ep epoch=3 seq=8812 rank=0/4: waited 1.2s of 30s for rank 2
#ifndef EVENKEEL_COMM_STRAGGLERS_H_
#define EVENKEEL_COMM_STRAGGLERS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// How often and how long this rank waited for one other.
struct StragglerCount {
  int64_t calls = 0;
  absl::Duration total = absl::ZeroDuration();
  absl::Duration longest = absl::ZeroDuration();
};

struct StragglerReport {
  ErrorContext where;           // of this rank's call; limit is set
  std::vector<int> late;        // group ranks
  std::vector<int> late_world;  // the same as ranks of the world
  absl::Duration waited;
};
// The line above.
std::string DescribeStragglers(const StragglerReport& report);

struct StragglerOptions {
  absl::Duration after = absl::Seconds(1);  // infinite: nobody is late
  // Called on the thread of the call. Default: a line on stderr.
  std::function<void(const StragglerReport&)> report = nullptr;
  // Called in every late call, also on the thread of the call, and on one rank only: the lowest that was in time.
  std::function<void(const StragglerReport&)> count = nullptr;
};

// The counts of one rank's end of one group. Thread-safe.
class Stragglers {
 public:
  // `world_ranks`: of the group's ranks.
  Stragglers(std::vector<int> world_ranks, StragglerOptions options);

  // How long a call of that limit waits before it takes note.
  absl::Duration After(absl::Duration limit) const;
  // A call went on after `late` had come. `where` is of this rank.
  void Note(const ErrorContext& where, absl::Span<const int> late, absl::Duration waited);
  // By group rank.
  std::vector<StragglerCount> counts() const;

 private:
  const std::vector<int> world_ranks_;
  const StragglerOptions options_;
  mutable absl::Mutex mutex_;
  std::vector<StragglerCount> counts_ ABSL_GUARDED_BY(mutex_);
};

// "rank 2 was late in 3 calls (4.1s in all, 2s at most)", several with "; "; "" when nobody was.
std::string DescribeStragglerCounts(absl::Span<const StragglerCount> counts);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_STRAGGLERS_H_
