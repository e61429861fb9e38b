// Counts of what a device was asked to do. Tests assert them; reports print
// them beside the prediction.
#ifndef EVENKEEL_RUNTIME_DEVICE_WORK_COUNTERS_H_
#define EVENKEEL_RUNTIME_DEVICE_WORK_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace evenkeel {

// A plain snapshot; subtract two to get the work between them.
struct WorkCounts {
  // Every call that the host issues: launches, copies, fills, event records and
  // waits, allocations, frees, collectives, and view manipulations that a
  // caller books with WorkCounters::AddHostOperations.
  int64_t host_operations = 0;
  int64_t launches = 0;
  int64_t copies = 0;
  int64_t copied_bytes = 0;
  int64_t fills = 0;
  int64_t allocations = 0;
  int64_t allocated_bytes = 0;
  int64_t frees = 0;
  int64_t event_records = 0;
  int64_t event_waits = 0;
  int64_t collectives = 0;
  int64_t live_bytes = 0;       // allocated and not yet freed
  int64_t peak_live_bytes = 0;  // high water since the last ResetPeak

  friend WorkCounts operator-(WorkCounts a, const WorkCounts& b) {
    a.host_operations -= b.host_operations;
    a.launches -= b.launches;
    a.copies -= b.copies;
    a.copied_bytes -= b.copied_bytes;
    a.fills -= b.fills;
    a.allocations -= b.allocations;
    a.allocated_bytes -= b.allocated_bytes;
    a.frees -= b.frees;
    a.event_records -= b.event_records;
    a.event_waits -= b.event_waits;
    a.collectives -= b.collectives;
    a.live_bytes -= b.live_bytes;
    return a;  // peak_live_bytes stays the later snapshot's
  }
};

// The live counters of one device. Thread-safe (relaxed atomics: totals, not an
// order).
class WorkCounters {
 public:
  WorkCounts Snapshot() const;
  void ResetPeak();

  // Work that is no device call of its own, such as narrowing a view; counts
  // host operations only.
  void AddHostOperations(int64_t count);
  // Host operations that the calling thread has issued so far, on any device: the work of a piece of code is the
  // difference around it, whatever other threads do with the device meanwhile.
  static int64_t HostOperationsOfThisThread();

  void AddLaunch();
  void AddCopy(int64_t bytes);
  void AddFill();
  // Takes `bytes` into the live bytes and returns their new sum, or -1 (and takes nothing) where that would pass
  // `limit`. Followed by AddAllocation, or by CancelLive where there was no memory after all.
  int64_t ReserveLive(int64_t bytes, int64_t limit);
  void CancelLive(int64_t bytes);
  // `live_bytes` is what ReserveLive returned.
  void AddAllocation(int64_t bytes, int64_t live_bytes);
  void AddFree(int64_t bytes);
  void AddEventRecord();
  void AddEventWait();
  void AddCollective();

 private:
  std::atomic<int64_t> host_operations_{0}, launches_{0}, copies_{0}, copied_bytes_{0}, fills_{0}, allocations_{0},
      allocated_bytes_{0}, frees_{0}, event_records_{0}, event_waits_{0}, collectives_{0}, live_bytes_{0},
      peak_live_bytes_{0};
};

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_DEVICE_WORK_COUNTERS_H_
