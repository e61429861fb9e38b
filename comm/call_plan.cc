#include "evenkeel/comm/call_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/count_matrix.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/two_level.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {
namespace {

// A flat buffer of the caller.
struct Extent {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
};

absl::StatusOr<Extent> CheckedExtent(const char* name, const void* data, int64_t elements, DType dtype) {
  const int64_t element_bytes = SizeOf(dtype);
  if (element_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has unknown dtype ", static_cast<int>(dtype)));
  }
  const absl::StatusOr<int64_t> bytes = CheckedMul(elements, element_bytes);
  if (!bytes.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": overflow: ", elements, " elements of ", element_bytes, " bytes"));
  }
  if (data == nullptr && *bytes > 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is null but has ", elements, " elements"));
  }
  return Extent{static_cast<const std::byte*>(data), *bytes};
}

bool Overlap(const Extent& a, const Extent& b) {
  if (a.bytes == 0 || b.bytes == 0) return false;
  const auto a_begin = reinterpret_cast<uintptr_t>(a.data);
  const auto b_begin = reinterpret_cast<uintptr_t>(b.data);
  return a_begin < b_begin + static_cast<uint64_t>(b.bytes) && b_begin < a_begin + static_cast<uint64_t>(a.bytes);
}

// `inner` must be apart from `outer`, or be exactly its bytes at `offset`, where that is called in place.
absl::Status CheckPlacement(const char* inner_name, const Extent& inner, const char* outer_name, const Extent& outer,
                            int64_t in_place_offset, CallPlan* plan) {
  if (!Overlap(inner, outer)) return absl::OkStatus();
  if (in_place_offset >= 0 && inner.data == outer.data + in_place_offset) {
    plan->in_place = true;
    return absl::OkStatus();
  }
  std::string allowed = in_place_offset < 0 ? std::string("no overlap is allowed")
                                            : absl::StrCat("in place means byte ", in_place_offset, " of ", outer_name);
  return absl::InvalidArgumentError(absl::StrCat(inner_name, " (", inner.bytes, " bytes) starts at byte ",
                                                 inner.data - outer.data, " of ", outer_name, " (", outer.bytes,
                                                 " bytes): they overlap; ", allowed));
}

absl::Status CheckSameDType(const ConstTensorView& send, const TensorView& recv) {
  if (send.dtype() == recv.dtype()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("send is ", DTypeName(send.dtype()), ", recv is ", DTypeName(recv.dtype())));
}

absl::Status CheckElements(const char* name, int64_t actual, int64_t wanted, absl::string_view why) {
  if (actual == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has ", actual, " elements, needs ", wanted, " (", why, ")"));
}

absl::StatusOr<std::vector<int64_t>> CheckedOffsets(const char* name, absl::Span<const int64_t> counts, Place place) {
  if (static_cast<int>(counts.size()) != place.size) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has ", counts.size(), " entries for ", place.size, " ranks"));
  }
  absl::StatusOr<std::vector<int64_t>> offsets = OffsetsOf(counts);
  if (!offsets.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", offsets.status().message()));
  }
  return offsets;
}

absl::StatusOr<std::vector<int64_t>> UniformOffsets(int64_t block, Place place) {
  EK_RETURN_IF_ERROR(CheckedMul(block, place.size).status());
  std::vector<int64_t> offsets(place.size + 1);
  for (int r = 0; r <= place.size; ++r) offsets[r] = block * r;
  return offsets;
}

CallPlan NewPlan(Operation operation, DType dtype) {
  CallPlan plan;
  plan.operation = operation;
  if (SizeOf(dtype) != 0) plan.dtype = static_cast<uint8_t>(dtype);
  return plan;
}

// The plan with `status` as its own bad argument, if it is one.
CallPlan Judged(CallPlan plan, const absl::Status& status) {
  if (status.ok()) return plan;
  plan.bad_argument = status;
  plan.phases.clear();
  plan.scratch.clear();
  return plan;
}

void SetEqualCounts(absl::Span<const int64_t> counts, CallPlan* plan) {
  plan->row.assign(counts.begin(), counts.end());
  plan->counts_digest = Digest64(counts.data(), counts.size() * sizeof(int64_t));
}

// Everybody gets `block` of this rank and lays the others' blocks out at `offsets` bytes of `into`.
PhasePlan GatherPhase(const std::byte* block, std::byte* into, const std::vector<int64_t>& offsets,
                      int64_t element_bytes, Place place) {
  PhasePlan phase = EmptyPhase(place.size);
  const int64_t block_bytes = (offsets[place.rank + 1] - offsets[place.rank]) * element_bytes;
  for (int r = 0; r < place.size; ++r) {
    phase.sends[r] = {block, block_bytes};
    phase.receives[r] = {into + offsets[r] * element_bytes, (offsets[r + 1] - offsets[r]) * element_bytes};
  }
  return phase;
}

// Rank r gets block r of `from`; what arrives here is reduced into `into`.
PhasePlan ReducePhase(const std::byte* from, std::byte* into, const std::vector<int64_t>& offsets,
                      int64_t element_bytes, Place place) {
  PhasePlan phase = EmptyPhase(place.size);
  phase.reduces = true;
  phase.reduce_into = into;
  phase.block_bytes = (offsets[place.rank + 1] - offsets[place.rank]) * element_bytes;
  for (int r = 0; r < place.size; ++r) {
    phase.sends[r] = {from + offsets[r] * element_bytes, (offsets[r + 1] - offsets[r]) * element_bytes};
    phase.receives[r] = {nullptr, phase.block_bytes};
  }
  return phase;
}

absl::Status AppendGather(const std::byte* block, std::byte* into, const std::vector<int64_t>& offsets,
                          int64_t element_bytes, Place place, CallPlan* plan) {
  if (place.grid != nullptr) {
    plan->two_level = true;
    return AppendTwoLevelGather(*place.grid, block, into, offsets, element_bytes, place, plan);
  }
  plan->phases.push_back(GatherPhase(block, into, offsets, element_bytes, place));
  return absl::OkStatus();
}

Reduction ReductionOf(const CallPlan& plan) {
  return {static_cast<DType>(plan.dtype), static_cast<ReduceOp>(plan.reduce_op)};
}

absl::Status AppendReduce(const std::byte* from, std::byte* into, const std::vector<int64_t>& offsets,
                          int64_t element_bytes, Place place, CallPlan* plan) {
  if (place.grid != nullptr && place.grid->nodes_are_subtrees()) {
    plan->two_level = true;
    return AppendTwoLevelReduce(*place.grid, from, into, offsets, element_bytes, place, plan);
  }
  plan->phases.push_back(ReducePhase(from, into, offsets, element_bytes, place));
  plan->phases.back().reduction = ReductionOf(*plan);
  return absl::OkStatus();
}

struct Buffers {
  Extent send;
  Extent recv;
  int64_t element_bytes = 1;

  std::byte* into() const { return const_cast<std::byte*>(recv.data); }
};

absl::StatusOr<Buffers> CheckBuffers(const ConstTensorView& send, const TensorView& recv) {
  EK_RETURN_IF_ERROR(CheckSameDType(send, recv));
  Buffers buffers;
  EK_ASSIGN_OR_RETURN(buffers.send, CheckedExtent("send", send.raw(), send.num_elements(), send.dtype()));
  EK_ASSIGN_OR_RETURN(buffers.recv, CheckedExtent("recv", recv.raw(), recv.num_elements(), recv.dtype()));
  buffers.element_bytes = SizeOf(send.dtype());
  return buffers;
}

absl::Status FillAllReduce(const ConstTensorView& send, const TensorView& recv, ReduceOp op, Place place,
                           CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(const Buffers buffers, CheckBuffers(send, recv));
  EK_RETURN_IF_ERROR(CheckReduction(send.dtype(), op));
  EK_RETURN_IF_ERROR(CheckElements("recv", recv.num_elements(), send.num_elements(), "as send"));
  EK_RETURN_IF_ERROR(CheckPlacement("recv", buffers.recv, "send", buffers.send, 0, plan));
  const std::vector<int64_t> offsets = EvenOffsets(send.num_elements(), place.size);
  std::byte* const own = buffers.into() + offsets[place.rank] * buffers.element_bytes;
  EK_RETURN_IF_ERROR(AppendReduce(buffers.send.data, own, offsets, buffers.element_bytes, place, plan));
  if (place.size == 1) return absl::OkStatus();
  return AppendGather(own, buffers.into(), offsets, buffers.element_bytes, place, plan);
}

// AllGather and AllGatherV once the offsets are known.
absl::Status FillGather(const ConstTensorView& send, const TensorView& recv, const std::vector<int64_t>& offsets,
                        Place place, CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(const Buffers buffers, CheckBuffers(send, recv));
  EK_RETURN_IF_ERROR(
      CheckElements("send", send.num_elements(), offsets[place.rank + 1] - offsets[place.rank], "this rank's count"));
  EK_RETURN_IF_ERROR(CheckElements("recv", recv.num_elements(), offsets.back(), "all ranks' counts"));
  EK_RETURN_IF_ERROR(
      CheckPlacement("send", buffers.send, "recv", buffers.recv, offsets[place.rank] * buffers.element_bytes, plan));
  return AppendGather(buffers.send.data, buffers.into(), offsets, buffers.element_bytes, place, plan);
}

absl::Status FillReduceScatter(const ConstTensorView& send, const TensorView& recv, ReduceOp op,
                               const std::vector<int64_t>& offsets, Place place, CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(const Buffers buffers, CheckBuffers(send, recv));
  EK_RETURN_IF_ERROR(CheckReduction(send.dtype(), op));
  EK_RETURN_IF_ERROR(
      CheckElements("recv", recv.num_elements(), offsets[place.rank + 1] - offsets[place.rank], "this rank's count"));
  EK_RETURN_IF_ERROR(CheckElements("send", send.num_elements(), offsets.back(), "all ranks' counts"));
  EK_RETURN_IF_ERROR(
      CheckPlacement("recv", buffers.recv, "send", buffers.send, offsets[place.rank] * buffers.element_bytes, plan));
  return AppendReduce(buffers.send.data, buffers.into(), offsets, buffers.element_bytes, place, plan);
}

absl::Status FillExchange(const ConstTensorView& send, const std::vector<int64_t>& send_offsets, const TensorView& recv,
                          const std::vector<int64_t>& recv_offsets, Place place, CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(const Buffers buffers, CheckBuffers(send, recv));
  EK_RETURN_IF_ERROR(CheckElements("send", send.num_elements(), send_offsets.back(), "the sum of its counts"));
  EK_RETURN_IF_ERROR(CheckElements("recv", recv.num_elements(), recv_offsets.back(), "the sum of its counts"));
  EK_RETURN_IF_ERROR(CheckPlacement("recv", buffers.recv, "send", buffers.send, -1, plan));
  const int64_t b = buffers.element_bytes;
  if (place.grid != nullptr) {
    plan->two_level = true;
    if (plan->operation == Operation::kAllToAll) {
      const int64_t block = send_offsets[1];
      return AppendTwoLevelExchange(
          *place.grid, buffers.send.data, buffers.into(), [block](int, int) { return block; }, b, place, plan);
    }
    plan->exchange_from = buffers.send.data;
    plan->exchange_into = buffers.into();
    return absl::OkStatus();
  }
  PhasePlan phase = EmptyPhase(place.size);
  for (int r = 0; r < place.size; ++r) {
    phase.sends[r] = {buffers.send.data + send_offsets[r] * b, (send_offsets[r + 1] - send_offsets[r]) * b};
    phase.receives[r] = {buffers.into() + recv_offsets[r] * b, (recv_offsets[r + 1] - recv_offsets[r]) * b};
  }
  plan->phases.push_back(std::move(phase));
  return absl::OkStatus();
}

absl::Status FillAllToAll(const ConstTensorView& send, const TensorView& recv, Place place, CallPlan* plan) {
  EK_RETURN_IF_ERROR(CheckElements("recv", recv.num_elements(), send.num_elements(), "as send"));
  if (send.num_elements() % place.size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("send has ", send.num_elements(), " elements, not a multiple of ", place.size, " ranks"));
  }
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, UniformOffsets(send.num_elements() / place.size, place));
  return FillExchange(send, offsets, recv, offsets, place, plan);
}

absl::Status FillAllToAllV(const ConstTensorView& send, absl::Span<const int64_t> send_counts, const TensorView& recv,
                           absl::Span<const int64_t> recv_counts, Place place, CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> send_offsets, CheckedOffsets("send_counts", send_counts, place));
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> recv_offsets, CheckedOffsets("recv_counts", recv_counts, place));
  plan->row.assign(send_counts.begin(), send_counts.end());
  plan->row.insert(plan->row.end(), recv_counts.begin(), recv_counts.end());
  if (place.size == 1 && send_counts[0] != recv_counts[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank 0 sends ", send_counts[0], " elements to itself and expects ", recv_counts[0]));
  }
  return FillExchange(send, send_offsets, recv, recv_offsets, place, plan);
}

absl::Status FillBroadcast(const TensorView& buffer, int root, Place place, CallPlan* plan) {
  if (root < 0 || root >= place.size) {
    return absl::InvalidArgumentError(absl::StrCat("root ", root, " is outside [0, ", place.size, ")"));
  }
  EK_ASSIGN_OR_RETURN(const Extent extent,
                      CheckedExtent("buffer", buffer.raw(), buffer.num_elements(), buffer.dtype()));
  PhasePlan phase = EmptyPhase(place.size);
  for (int r = 0; r < place.size; ++r) {
    if (r == place.rank) continue;
    if (place.rank == root) phase.sends[r] = {extent.data, extent.bytes};
    if (r == root) phase.receives[r] = {buffer.raw(), extent.bytes};
  }
  plan->phases.push_back(std::move(phase));
  return absl::OkStatus();
}

absl::Status FillPair(const char* name, const void* data, int64_t elements, DType dtype, int peer, Place place,
                      CallPlan* plan) {
  if (peer < 0 || peer >= place.size || peer == place.rank) {
    return absl::InvalidArgumentError(absl::StrCat("peer ", peer, " is not another rank in [0, ", place.size, ")"));
  }
  plan->members = {std::min(place.rank, peer), std::max(place.rank, peer)};
  EK_ASSIGN_OR_RETURN(const Extent extent, CheckedExtent(name, data, elements, dtype));
  PhasePlan phase = EmptyPhase(2);
  const int other = peer < place.rank ? 0 : 1;
  if (plan->operation == Operation::kSend) {
    phase.sends[other] = {extent.data, extent.bytes};
  } else {
    phase.receives[other] = {const_cast<std::byte*>(extent.data), extent.bytes};
  }
  plan->phases.push_back(std::move(phase));
  return absl::OkStatus();
}

}  // namespace

bool CallPlan::combines() const {
  return std::any_of(phases.begin(), phases.end(), [](const PhasePlan& phase) { return phase.reduces; });
}

absl::StatusOr<std::byte*> AddScratch(int64_t bytes, absl::string_view purpose, Place place, CallPlan* plan) {
  EK_ASSIGN_OR_RETURN(ScratchBlock block, AllocateScratch(place.scratch, bytes, purpose));
  plan->scratch.push_back(std::move(block));
  return plan->scratch.back().get();
}

absl::Status CompletePlan(const Agreement& agreement, Place place, CallPlan* plan) {
  const int64_t* const rows = agreement.rows.data();
  const auto count = [rows, place](int from, int to) { return rows[int64_t{from} * 2 * place.size + to]; };
  return AppendTwoLevelExchange(*place.grid, plan->exchange_from, plan->exchange_into, count,
                                SizeOf(static_cast<DType>(plan->dtype)), place, plan);
}

std::vector<int64_t> EvenOffsets(int64_t n, int size) {
  std::vector<int64_t> offsets(size + 1);
  const int64_t base = n / size;
  const int64_t longer = n % size;
  for (int r = 0; r <= size; ++r) offsets[r] = base * r + std::min<int64_t>(r, longer);
  return offsets;
}

CallPlan PlanAllReduce(const ConstTensorView& send, const TensorView& recv, ReduceOp op, Place place) {
  CallPlan plan = NewPlan(Operation::kAllReduce, send.dtype());
  plan.reduce_op = static_cast<uint8_t>(op);
  plan.count = send.num_elements();
  const absl::Status status = FillAllReduce(send, recv, op, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanAllGather(const ConstTensorView& send, const TensorView& recv, Place place) {
  CallPlan plan = NewPlan(Operation::kAllGather, send.dtype());
  plan.count = send.num_elements();
  const absl::StatusOr<std::vector<int64_t>> offsets = UniformOffsets(send.num_elements(), place);
  const absl::Status status = offsets.ok() ? FillGather(send, recv, *offsets, place, &plan) : offsets.status();
  return Judged(std::move(plan), status);
}

CallPlan PlanAllGatherV(const ConstTensorView& send, const TensorView& recv, absl::Span<const int64_t> counts,
                        Place place) {
  CallPlan plan = NewPlan(Operation::kAllGatherV, send.dtype());
  const absl::StatusOr<std::vector<int64_t>> offsets = CheckedOffsets("counts", counts, place);
  if (!offsets.ok()) return Judged(std::move(plan), offsets.status());
  plan.count = offsets->back();
  SetEqualCounts(counts, &plan);
  const absl::Status status = FillGather(send, recv, *offsets, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanReduceScatter(const ConstTensorView& send, const TensorView& recv, ReduceOp op, Place place) {
  CallPlan plan = NewPlan(Operation::kReduceScatter, send.dtype());
  plan.reduce_op = static_cast<uint8_t>(op);
  plan.count = recv.num_elements();
  const absl::StatusOr<std::vector<int64_t>> offsets = UniformOffsets(recv.num_elements(), place);
  const absl::Status status =
      offsets.ok() ? FillReduceScatter(send, recv, op, *offsets, place, &plan) : offsets.status();
  return Judged(std::move(plan), status);
}

CallPlan PlanReduceScatterV(const ConstTensorView& send, const TensorView& recv, absl::Span<const int64_t> counts,
                            ReduceOp op, Place place) {
  CallPlan plan = NewPlan(Operation::kReduceScatterV, send.dtype());
  plan.reduce_op = static_cast<uint8_t>(op);
  const absl::StatusOr<std::vector<int64_t>> offsets = CheckedOffsets("counts", counts, place);
  if (!offsets.ok()) return Judged(std::move(plan), offsets.status());
  plan.count = offsets->back();
  SetEqualCounts(counts, &plan);
  const absl::Status status = FillReduceScatter(send, recv, op, *offsets, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanAllToAll(const ConstTensorView& send, const TensorView& recv, Place place) {
  CallPlan plan = NewPlan(Operation::kAllToAll, send.dtype());
  plan.count = send.num_elements();
  const absl::Status status = FillAllToAll(send, recv, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanAllToAllV(const ConstTensorView& send, absl::Span<const int64_t> send_counts, const TensorView& recv,
                       absl::Span<const int64_t> recv_counts, Place place) {
  CallPlan plan = NewPlan(Operation::kAllToAllV, send.dtype());
  const absl::Status status = FillAllToAllV(send, send_counts, recv, recv_counts, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanBroadcast(const TensorView& buffer, int root, Place place) {
  CallPlan plan = NewPlan(Operation::kBroadcast, buffer.dtype());
  plan.root = root;
  plan.count = buffer.num_elements();
  const absl::Status status = FillBroadcast(buffer, root, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanBarrier() { return CallPlan(); }

CallPlan PlanSend(const ConstTensorView& send, int peer, Place place) {
  CallPlan plan = NewPlan(Operation::kSend, send.dtype());
  plan.count = send.num_elements();
  const absl::Status status = FillPair("send", send.raw(), send.num_elements(), send.dtype(), peer, place, &plan);
  return Judged(std::move(plan), status);
}

CallPlan PlanRecv(const TensorView& recv, int peer, Place place) {
  CallPlan plan = NewPlan(Operation::kRecv, recv.dtype());
  plan.count = recv.num_elements();
  const absl::Status status = FillPair("recv", recv.raw(), recv.num_elements(), recv.dtype(), peer, place, &plan);
  return Judged(std::move(plan), status);
}

}  // namespace evenkeel::comm
