// The seam for time: monotonic now and bounded sleeping, so that simulation can
// supply a virtual clock.
#ifndef EVENKEEL_RUNTIME_BASE_CLOCK_H_
#define EVENKEEL_RUNTIME_BASE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace evenkeel {

// Time since an arbitrary fixed start. Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic: never goes back.
  virtual absl::Duration Now() = 0;
  // Blocks the calling thread for `duration` of this clock's time.
  virtual void Sleep(absl::Duration duration) = 0;
  // The machine's steady clock. Never destroyed.
  static Clock* Real();
};

// A clock that moves only when told: Sleep() advances it. Thread-safe.
class VirtualClock final : public Clock {
 public:
  absl::Duration Now() override;
  void Sleep(absl::Duration duration) override;
  // Moves time on by `duration` (>= 0).
  void Advance(absl::Duration duration);

 private:
  absl::Mutex mutex_;
  absl::Duration now_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_CLOCK_H_
