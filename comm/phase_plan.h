// One movement of a call as data: the spans of a Phase (transport.h), the work on this rank's own memory before it, and
// how that work is done.
#ifndef EVENKEEL_COMM_PHASE_PLAN_H_
#define EVENKEEL_COMM_PHASE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

// How values are combined.
struct Reduction {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
};

// Work on this rank's own memory before a phase.
struct LocalStep {
  enum class Kind { kCopy, kReduceCanonical, kReduceToPartial, kReducePartials };  // see reduction.h
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  // of a copy
  int64_t bytes = 0;                // of a copy
  int64_t elements = 0;             // of a reduction
  std::vector<const void*> sources = {};
  Kind kind = Kind::kCopy;
  Reduction reduction = {};
};

// One Phase of the transport, with the memory of its spans.
struct PhasePlan {
  // By group rank. What a small group needs lies in the plan itself: small calls should not wait for memory.
  absl::InlinedVector<SendSpan, 4> sends;
  absl::InlinedVector<ReceiveSpan, 4> receives;
  // When `reduces`, what arrives is combined into it: block_bytes bytes.
  std::byte* reduce_into = nullptr;
  int64_t block_bytes = 0;
  bool reduces = false;
  Reduction reduction = {};
  std::vector<LocalStep> before = {};
  bool is_local = false;    // only the local steps: no exchange
  bool is_control = false;  // it moves counts that the ranks compare: not booked as payload
};

// Adds a copy to `steps`, unless there is nothing to copy.
void AddCopy(void* to, const void* from, int64_t bytes, std::vector<LocalStep>* steps);

// Without spans, for a group of `size` ranks.
PhasePlan EmptyPhase(int size);

// Carries out local steps; `num_ranks` in the group.
void RunLocalSteps(absl::Span<const LocalStep> steps, int num_ranks);
// What a phase that reduces does with `length` bytes from `begin` of everybody's block: see Phase::combine.
void CombineBlocks(const PhasePlan& phase, int64_t begin, int64_t length, absl::Span<const void* const> sources);
// memcpy, in the pieces that are fastest for long spans.
void CopyBytes(void* to, const void* from, int64_t bytes);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_PHASE_PLAN_H_
