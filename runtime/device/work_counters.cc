#include "evenkeel/runtime/device/work_counters.h"

namespace evenkeel {
namespace {

void Add(std::atomic<int64_t>& counter, int64_t amount) { counter.fetch_add(amount, std::memory_order_relaxed); }
thread_local int64_t host_operations_of_this_thread = 0;

int64_t Get(const std::atomic<int64_t>& counter) { return counter.load(std::memory_order_relaxed); }

}  // namespace

WorkCounts WorkCounters::Snapshot() const {
  WorkCounts counts;
  counts.host_operations = Get(host_operations_);
  counts.launches = Get(launches_);
  counts.copies = Get(copies_);
  counts.copied_bytes = Get(copied_bytes_);
  counts.fills = Get(fills_);
  counts.allocations = Get(allocations_);
  counts.allocated_bytes = Get(allocated_bytes_);
  counts.frees = Get(frees_);
  counts.event_records = Get(event_records_);
  counts.event_waits = Get(event_waits_);
  counts.collectives = Get(collectives_);
  counts.live_bytes = Get(live_bytes_);
  counts.peak_live_bytes = Get(peak_live_bytes_);
  return counts;
}

void WorkCounters::ResetPeak() { peak_live_bytes_.store(Get(live_bytes_), std::memory_order_relaxed); }

void WorkCounters::AddHostOperations(int64_t count) {
  Add(host_operations_, count);
  host_operations_of_this_thread += count;
}

int64_t WorkCounters::HostOperationsOfThisThread() { return host_operations_of_this_thread; }

void WorkCounters::AddLaunch() {
  AddHostOperations(1);
  Add(launches_, 1);
}

void WorkCounters::AddCopy(int64_t bytes) {
  AddHostOperations(1);
  Add(copies_, 1);
  Add(copied_bytes_, bytes);
}

void WorkCounters::AddFill() {
  AddHostOperations(1);
  Add(fills_, 1);
}

int64_t WorkCounters::ReserveLive(int64_t bytes, int64_t limit) {
  int64_t live = Get(live_bytes_);
  do {
    if (bytes > limit - live) return -1;
  } while (!live_bytes_.compare_exchange_weak(live, live + bytes, std::memory_order_relaxed));
  return live + bytes;
}

void WorkCounters::CancelLive(int64_t bytes) { Add(live_bytes_, -bytes); }

void WorkCounters::AddAllocation(int64_t bytes, int64_t live_bytes) {
  AddHostOperations(1);
  Add(allocations_, 1);
  Add(allocated_bytes_, bytes);
  int64_t peak = Get(peak_live_bytes_);
  while (peak < live_bytes && !peak_live_bytes_.compare_exchange_weak(peak, live_bytes, std::memory_order_relaxed)) {
  }
}

void WorkCounters::AddFree(int64_t bytes) {
  AddHostOperations(1);
  Add(frees_, 1);
  Add(live_bytes_, -bytes);
}

void WorkCounters::AddEventRecord() {
  AddHostOperations(1);
  Add(event_records_, 1);
}

void WorkCounters::AddEventWait() {
  AddHostOperations(1);
  Add(event_waits_, 1);
}

void WorkCounters::AddCollective() {
  AddHostOperations(1);
  Add(collectives_, 1);
}

}  // namespace evenkeel
