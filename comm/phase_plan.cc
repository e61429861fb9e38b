#include "evenkeel/comm/phase_plan.h"

#include <algorithm>
#include <cstring>

#include "evenkeel/comm/reduction.h"

namespace evenkeel::comm {

PhasePlan EmptyPhase(int size) {
  PhasePlan phase;
  phase.sends.resize(size);
  phase.receives.resize(size);
  return phase;
}

void AddCopy(void* to, const void* from, int64_t bytes, std::vector<LocalStep>* steps) {
  if (bytes == 0 || to == from) return;
  steps->push_back({.to = static_cast<std::byte*>(to), .from = static_cast<const std::byte*>(from), .bytes = bytes});
}

// In pieces: glibc copies those with string instructions, which need not read what they overwrite, and long spans with
// vector stores, which do; from a few MiB on that is a third of the time.
void CopyBytes(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kPiece = 256 << 10;
  for (int64_t begin = 0; begin < bytes; begin += kPiece) {
    std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                static_cast<size_t>(std::min(kPiece, bytes - begin)));
  }
}

void RunLocalSteps(absl::Span<const LocalStep> steps, int num_ranks) {
  for (const LocalStep& step : steps) {
    const auto [dtype, op] = step.reduction;
    switch (step.kind) {
      case LocalStep::Kind::kCopy:
        CopyBytes(step.to, step.from, step.bytes);
        break;
      case LocalStep::Kind::kReduceCanonical:
        ReduceCanonical(dtype, op, step.sources, step.to, step.elements);
        break;
      case LocalStep::Kind::kReduceToPartial:
        ReduceToPartial(dtype, op, step.sources, step.to, step.elements);
        break;
      case LocalStep::Kind::kReducePartials:
        ReducePartials(dtype, op, step.sources, num_ranks, step.to, step.elements);
        break;
    }
  }
}

void CombineBlocks(const PhasePlan& phase, int64_t begin, int64_t length, absl::Span<const void* const> sources) {
  ReduceCanonical(phase.reduction.dtype, phase.reduction.op, sources, phase.reduce_into + begin,
                  length / SizeOf(phase.reduction.dtype));
}

}  // namespace evenkeel::comm
