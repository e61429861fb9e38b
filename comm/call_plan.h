// From the arguments of one collective to what it tells the peers and which spans move. Pure: no peers, no time.
//
// Bad arguments give a plan too, with `bad_argument` set and no phases, because a rank whose arguments are bad still
// takes part, with a fingerprint that says so.
#ifndef EVENKEEL_COMM_CALL_PLAN_H_
#define EVENKEEL_COMM_CALL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/operation.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

class NodeGrid;

// This rank in its group.
struct Place {
  int rank = 0;
  int size = 1;
  const NodeGrid* grid = nullptr;  // set: use the two-level form where there is one
  ScratchMemory* scratch = ScratchMemory::Heap();
};

// Of grouped calls with all_to_all_v among them: everybody's counts, which the first phase brings.
struct GroupedCounts {
  std::vector<int> parts = {};                 // the all_to_all_v among CallPlan::parts
  std::vector<const std::byte*> rows_of = {};  // by rank: its row of each of them, 2 * size numbers
  // The phases of their blocks, which only the counts tell to be needed: that of what is packed, unless other calls
  // need it anyway (then -1), and for each of `parts` that of its larger blocks (-1 in the two-level form).
  int packed_phase = -1;
  std::vector<int> own_phases = {};
};

struct CallPlan {
  Operation operation = Operation::kBarrier;
  uint8_t dtype = kNoDType;
  uint8_t reduce_op = kNoReduceOp;
  int32_t root = kNoRoot;
  int64_t count = 0;           // see Fingerprint
  uint64_t counts_digest = 0;  // see Fingerprint
  std::vector<int64_t> row;    // see Posting
  bool in_place = false;
  absl::Status bad_argument;
  absl::InlinedVector<PhasePlan, 2> phases;
  bool two_level = false;
  std::vector<ScratchBlock> scratch;  // what the phases of two-level and grouped calls go through
  // The two-level all_to_all_v depends on everybody's counts: its phases are made by CompletePlan.
  bool needs_completion() const { return two_level && operation == Operation::kAllToAllV && bad_argument.ok(); }
  // Whether what arrives in some phase is combined.
  bool combines() const;
  const std::byte* exchange_from = nullptr;
  std::byte* exchange_into = nullptr;
  // Of grouped calls (grouped_plan.h): each call's own plan, its phases moved into this one.
  std::vector<CallPlan> parts;
  std::optional<GroupedCounts> grouped_counts;
  std::vector<int> members;  // of a pair: the group ranks behind its ranks 0 and 1; else empty
};

// One for each method of Communicator; the argument rules are stated there.
CallPlan PlanAllReduce(const ConstTensorView& send, const TensorView& recv, ReduceOp op, Place place);
CallPlan PlanAllGather(const ConstTensorView& send, const TensorView& recv, Place place);
CallPlan PlanAllGatherV(const ConstTensorView& send, const TensorView& recv, absl::Span<const int64_t> counts,
                        Place place);
CallPlan PlanReduceScatter(const ConstTensorView& send, const TensorView& recv, ReduceOp op, Place place);
CallPlan PlanReduceScatterV(const ConstTensorView& send, const TensorView& recv, absl::Span<const int64_t> counts,
                            ReduceOp op, Place place);
CallPlan PlanAllToAll(const ConstTensorView& send, const TensorView& recv, Place place);
CallPlan PlanAllToAllV(const ConstTensorView& send, absl::Span<const int64_t> send_counts, const TensorView& recv,
                       absl::Span<const int64_t> recv_counts, Place place);
CallPlan PlanBroadcast(const TensorView& buffer, int root, Place place);
CallPlan PlanBarrier();
CallPlan PlanSend(const ConstTensorView& send, int peer, Place place);
CallPlan PlanRecv(const TensorView& recv, int peer, Place place);

// Gets memory that the plan keeps. ResourceExhausted naming `purpose` when there is none.
absl::StatusOr<std::byte*> AddScratch(int64_t bytes, absl::string_view purpose, Place place, CallPlan* plan);

// Adds the phases that depend on what the ranks agreed on, to a plan that needs them. ResourceExhausted when there is
// no memory for them.
absl::Status CompletePlan(const Agreement& agreement, Place place, CallPlan* plan);

// n elements cut into `size` blocks whose lengths differ by at most one, longer ones first: the size + 1 offsets.
std::vector<int64_t> EvenOffsets(int64_t n, int size);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_CALL_PLAN_H_
