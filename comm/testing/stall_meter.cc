#include "evenkeel/comm/testing/stall_meter.h"

#include <algorithm>

#include "evenkeel/runtime/base/clock.h"

namespace evenkeel::comm {
namespace {

constexpr absl::Duration kNap = absl::Milliseconds(2);
// What a timer is late by on an idle machine.
constexpr absl::Duration kUsual = absl::Milliseconds(1);

}  // namespace

StallMeter::StallMeter()
    : thread_([this] {
        while (!stop_.load(std::memory_order_relaxed)) {
          const absl::Duration begin = Clock::Real()->Now();
          Clock::Real()->Sleep(kNap);
          const absl::Duration late = Clock::Real()->Now() - begin - kNap - kUsual;
          total_ns_.fetch_add(std::max<int64_t>(0, absl::ToInt64Nanoseconds(late)), std::memory_order_relaxed);
        }
      }) {}

StallMeter::~StallMeter() {
  stop_.store(true, std::memory_order_relaxed);
  thread_.join();
}

}  // namespace evenkeel::comm
