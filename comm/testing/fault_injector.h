// Faults at chosen calls of one rank: late, missing, refused, or with a flipped bit.
//
//   FaultInjector faults;
//   faults.At(5, {.kind = Fault::Kind::kDelay, .delay = absl::Milliseconds(20)});
//   auto faulty = ObserveBackend(&world->backend(rank), &faults);
#ifndef EVENKEEL_COMM_TESTING_FAULT_INJECTOR_H_
#define EVENKEEL_COMM_TESTING_FAULT_INJECTOR_H_

#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/runtime/base/clock.h"

namespace evenkeel::comm {

struct Fault {
  enum class Kind {
    kDelay,    // the call is made after `delay`
    kSkip,     // the call is not made, the caller sees OK: a rank that has lost a step
    kFail,     // the call is not made, the caller sees `status`
    kFlipBit,  // bit `bit` of what the call wrote is flipped afterwards (of grouped calls: all of it, one after
               // another)
  };
  Kind kind = Kind::kDelay;
  absl::Duration delay = absl::ZeroDuration();
  absl::Status status = absl::InternalError("injected");
  int64_t bit = 0;
};

// Thread-safe.
class FaultInjector final : public CallObserver {
 public:
  explicit FaultInjector(Clock* clock = Clock::Real()) : clock_(clock) {}

  // `fault` happens at this rank's call number `index` (from 0, over all of its groups).
  void At(int64_t index, Fault fault);
  int64_t num_calls() const;
  // How many faults have happened.
  int64_t num_injected() const;

  absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override;

 private:
  Clock* const clock_;
  mutable absl::Mutex mutex_;
  std::map<int64_t, Fault> faults_ ABSL_GUARDED_BY(mutex_);
  int64_t num_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_injected_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_FAULT_INJECTOR_H_
