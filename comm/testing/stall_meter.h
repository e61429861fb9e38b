// How long this machine kept a thread from running: what a test with a time limit allows for.
//
//   StallMeter stalls;
//   ... something that must return within 1 s ...
//   EXPECT_LE(took, absl::Seconds(1) + stalls.Total());
//
// A thread sleeps for 2 ms again and again; whatever its sleeps take longer is added up. On a machine with a core to
// spare the sum stays near 0, and a limit is what it says; where processes queue for the cores, it grows as they do.
#ifndef EVENKEEL_COMM_TESTING_STALL_METER_H_
#define EVENKEEL_COMM_TESTING_STALL_METER_H_

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/time/time.h"

namespace evenkeel::comm {

// Thread-safe.
class StallMeter {
 public:
  StallMeter();
  ~StallMeter();
  StallMeter(const StallMeter&) = delete;

  // Since the construction.
  absl::Duration Total() const { return absl::Nanoseconds(total_ns_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> total_ns_{0};
  std::thread thread_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_STALL_METER_H_
