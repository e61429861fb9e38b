#include "evenkeel/comm/grouped_packing.h"

#include <utility>

#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {

void GroupedPacking::Send(int peer, const void* data, int64_t bytes) {
  peers_[peer].out.push_back({data, bytes});
  peers_[peer].out_bytes += bytes;
}

void GroupedPacking::Receive(int peer, void* into, int64_t bytes) {
  const int64_t at = Reserve(peer, bytes);
  if (into != nullptr) peers_[peer].in.push_back({into, bytes, at});
}

void GroupedPacking::Combine(const PhasePlan& phase) {
  Combined combined{.phase = phase};
  for (int r = 0; r < place_.size; ++r) {
    combined.at.push_back(r == place_.rank ? 0 : Reserve(r, phase.block_bytes));
  }
  combined_.push_back(std::move(combined));
}

int64_t GroupedPacking::Reserve(int peer, int64_t bytes) {
  return std::exchange(peers_[peer].in_bytes, peers_[peer].in_bytes + bytes);
}

absl::StatusOr<PhasePlan> GroupedPacking::Finish(std::vector<LocalStep>* before, std::vector<LocalStep>* after,
                                                 CallPlan* plan) {
  PhasePlan phase = EmptyPhase(place_.size);
  int64_t bytes = 0;
  for (const Peer& peer : peers_) bytes += peer.out_bytes + peer.in_bytes;
  if (bytes == 0) return phase;
  EK_ASSIGN_OR_RETURN(std::byte * at, AddScratch(bytes, "grouped calls", place_, plan));
  for (int r = 0; r < place_.size; ++r) {
    Peer& peer = peers_[r];
    phase.sends[r] = {at, peer.out_bytes};
    for (const SendSpan& span : peer.out) {
      AddCopy(at, span.data, span.bytes, before);
      at += span.bytes;
    }
    peer.from = at;
    phase.receives[r] = {at, peer.in_bytes};
    for (const Stored& stored : peer.in) AddCopy(stored.into, at + stored.at, stored.bytes, after);
    at += peer.in_bytes;
  }
  for (const Combined& combined : combined_) {
    const PhasePlan& part = combined.phase;
    LocalStep step{.to = part.reduce_into,
                   .elements = part.block_bytes / SizeOf(part.reduction.dtype),
                   .kind = LocalStep::Kind::kReduceCanonical,
                   .reduction = part.reduction};
    for (int r = 0; r < place_.size; ++r) {
      step.sources.push_back(r == place_.rank ? part.sends[r].data : peers_[r].from + combined.at[r]);
    }
    after->push_back(std::move(step));
  }
  return phase;
}

}  // namespace evenkeel::comm
