// Who came late to collective calls of a whole world, in how many and how long the others waited.
//
//   LateRanks late(world_size);
//   options.stragglers = late.Options();                 // of a world that `late` outlives
//   ... on every rank, at the end:
//   EK_ASSIGN_OR_RETURN(result.late_ranks, late.Gather(backend));
#ifndef EVENKEEL_TOOLS_LATE_RANKS_H_
#define EVENKEEL_TOOLS_LATE_RANKS_H_

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/testing/parity_result.h"

namespace evenkeel::tools {

// The counts of the ranks that live in this process. Thread-safe.
class LateRanks {
 public:
  explicit LateRanks(int world_size) : counts_(world_size) {}

  // For the world: who is late, and the usual line on stderr, are as by default. This object outlives the world.
  comm::StragglerOptions Options();

  // The counts of all processes of the world. All its ranks call it, once each, and get the same: the ranks that were
  // late in any call, in order.
  absl::StatusOr<std::vector<testutil::LateRank>> Gather(comm::Backend& backend);

 private:
  void Count(const comm::StragglerReport& report);

  absl::Mutex mutex_;
  bool gathered_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<comm::StragglerCount> counts_ ABSL_GUARDED_BY(mutex_);  // by world rank
};

// "rank 2 was late in 3 calls (4.1s in all, 2s at most)", several with "; "; "" for none.
std::string DescribeLateRanks(absl::Span<const testutil::LateRank> late_ranks);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_LATE_RANKS_H_
