#include "evenkeel/runtime/base/clock.h"

#include <chrono>

#include "absl/time/clock.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

class RealClock final : public Clock {
 public:
  absl::Duration Now() override { return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch()); }
  void Sleep(absl::Duration duration) override { absl::SleepFor(duration); }
};

}  // namespace

Clock* Clock::Real() {
  static Clock* const clock = new RealClock;
  return clock;
}

absl::Duration VirtualClock::Now() {
  absl::MutexLock lock(&mutex_);
  return now_;
}

void VirtualClock::Sleep(absl::Duration duration) { Advance(duration); }

void VirtualClock::Advance(absl::Duration duration) {
  EK_CHECK(duration >= absl::ZeroDuration());
  absl::MutexLock lock(&mutex_);
  now_ += duration;
}

}  // namespace evenkeel
