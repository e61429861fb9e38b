// Memory of collectives that runs out at a chosen allocation of the calling thread.
//
//   FailingScratch scratch;                      // InProcessOptions::scratch, ...
//   scratch.FailOnThisThread(2);                 // the third one from now on
//   ... a call ...
//   bool happened = scratch.StopFailing();
#ifndef EVENKEEL_COMM_TESTING_FAILING_SCRATCH_H_
#define EVENKEEL_COMM_TESTING_FAILING_SCRATCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "evenkeel/comm/scratch_memory.h"

namespace evenkeel::comm {

// Thread-safe. A thread fails for one FailingScratch at a time.
class FailingScratch final : public ScratchMemory {
 public:
  // Allocation number `n` (from 0) of the calling thread finds no memory; those before and after it do.
  void FailOnThisThread(int64_t n);
  // Ends that; whether the allocation came.
  bool StopFailing();

  std::byte* TryAllocate(int64_t bytes) override;
  void Free(std::byte* data) override;
  // Given out and not freed.
  int64_t num_live() const { return num_live_.load(); }

 private:
  std::atomic<int64_t> num_live_{0};
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_FAILING_SCRATCH_H_
