// Memory that collectives need beside the caller's: staging of sums, and what the two-level form goes through.
//
// A call gets it before its ranks agree, so that a rank that has none refuses the call: every rank returns
// ResourceExhausted naming it, and nothing has moved. The interface is the seam at which tests make memory run out.
//
//   EK_ASSIGN_OR_RETURN(ScratchBlock block, AllocateScratch(memory, bytes, "staging of a sum"));
#ifndef EVENKEEL_COMM_SCRATCH_MEMORY_H_
#define EVENKEEL_COMM_SCRATCH_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// Thread-safe. Outlives what it gave out.
class ScratchMemory {
 public:
  virtual ~ScratchMemory() = default;
  // `bytes` > 0 bytes aligned to 16, or null when there are none.
  virtual std::byte* TryAllocate(int64_t bytes) = 0;
  virtual void Free(std::byte* data) = 0;
  // The heap of the process; never null.
  static ScratchMemory* Heap();
};

struct ScratchDeleter {
  ScratchMemory* memory = nullptr;
  void operator()(std::byte* data) const { memory->Free(data); }
};
using ScratchBlock = std::unique_ptr<std::byte[], ScratchDeleter>;

// At least one byte. ResourceExhausted naming bytes and purpose when there is no memory.
absl::StatusOr<ScratchBlock> AllocateScratch(ScratchMemory* memory, int64_t bytes, absl::string_view purpose);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_SCRATCH_MEMORY_H_
