// Calls that wait in streams: what a world hears of them that wants to know whether one can ever begin.
#ifndef EVENKEEL_COMM_QUEUED_CALL_H_
#define EVENKEEL_COMM_QUEUED_CALL_H_

#include <compare>
#include <cstdint>

#include "evenkeel/runtime/device/device.h"

namespace evenkeel::comm {

// One rank's part of one call. `low` and `high` are the group ranks of a pair; -1 of a call of the whole group.
struct QueuedCall {
  int64_t epoch = 0;
  int rank = 0;  // inside the group
  int low = -1;
  int high = -1;
  int64_t sequence = 0;
  friend auto operator<=>(const QueuedCall&, const QueuedCall&) = default;
};

// Hears of every call that does not run at once. Thread-safe.
class QueueWatch {
 public:
  virtual ~QueueWatch() = default;
  // The call follows all earlier calls of `stream`. Heard by the thread that issues it, before the stream has it.
  virtual void Issued(const QueuedCall& call, const Stream* stream) = 0;
  // On the stream's thread. A call that its stream drops ends without having begun, on any thread.
  virtual void Began(const QueuedCall& call, const Stream* stream) = 0;
  virtual void Ended(const QueuedCall& call) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_QUEUED_CALL_H_
