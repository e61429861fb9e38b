#include "evenkeel/comm/scratch_memory.h"

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace evenkeel::comm {
namespace {

class HeapMemory final : public ScratchMemory {
 public:
  std::byte* TryAllocate(int64_t bytes) override {
    return static_cast<std::byte*>(std::malloc(static_cast<size_t>(bytes)));
  }
  void Free(std::byte* data) override { std::free(data); }
};

}  // namespace

ScratchMemory* ScratchMemory::Heap() {
  static HeapMemory heap;
  return &heap;
}

absl::StatusOr<ScratchBlock> AllocateScratch(ScratchMemory* memory, int64_t bytes, absl::string_view purpose) {
  std::byte* const data = memory->TryAllocate(std::max<int64_t>(bytes, 1));
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes (", purpose, ")"));
  }
  return ScratchBlock(data, ScratchDeleter{memory});
}

}  // namespace evenkeel::comm
