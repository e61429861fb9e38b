// Deadlocks between streams: calls that sleep on worker streams, while what they wait for is queued behind another call
// that sleeps.
//
// A call that sleeps waits for the calls of all ranks that have not come. One of those that has been issued, but has
// not begun, begins only when the call before it on its stream has ended. So a cycle of such waits is for ever,
// whatever the other threads do, and is reported at once. Calls that nobody has issued yet close no cycle.
//
// Internal to in_process.cc.
#ifndef EVENKEEL_COMM_IN_PROCESS_STREAMS_H_
#define EVENKEEL_COMM_IN_PROCESS_STREAMS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/queued_call.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// One per world. Thread-safe.
class StreamDeadlocks final : public QueueWatch {
 public:
  void Issued(const QueuedCall& call, const Stream* stream) override;
  void Began(const QueuedCall& call, const Stream* stream) override;
  void Ended(const QueuedCall& call) override;

  // Sleeps in `phase` of `group`, on the thread of a stream or on any other.
  Rendezvous::Outcome Sleep(InProcessGroup* group, uint64_t phase, const Call& call, int world_rank, int64_t until_ns);

 private:
  // A stream whose call sleeps.
  struct Sleeper {
    InProcessGroup* group = nullptr;
    uint64_t phase = 0;
    Operation operation = Operation::kBarrier;
    int64_t sequence = 0;
    int world_rank = 0;
  };
  struct Edge {
    const Stream* to = nullptr;
    int index = 0;  // of the awaited rank, inside the sleeper's group
  };
  struct Step {
    const Stream* stream = nullptr;
    int index = 0;  // of the rank that it waits for
  };

  // "waits in barrier of group tp [0,1] epoch=3 seq=8 on stream comm"
  std::string TextOf(const Stream* stream) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Edge> EdgesOf(const Sleeper& sleeper) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reports the cycle that `stream` is in, if any.
  void Look(const Stream* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool FindCycle(const Stream* from, const Stream* goal, std::vector<Step>* path,
                 std::vector<const Stream*>* seen) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Report(const std::vector<Step>& cycle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  std::map<QueuedCall, const Stream*> queued_ ABSL_GUARDED_BY(mutex_);  // issued, not begun
  std::map<const Stream*, Sleeper> sleepers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_STREAMS_H_
