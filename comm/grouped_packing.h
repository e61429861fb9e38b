// What is small of several calls as one message to and one from each peer.
#ifndef EVENKEEL_COMM_GROUPED_PACKING_H_
#define EVENKEEL_COMM_GROUPED_PACKING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/call_plan.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// Collects blocks, then makes the exchange of them. Not thread-safe.
class GroupedPacking {
 public:
  explicit GroupedPacking(Place place) : place_(place), peers_(place.size) {}

  // Ranks add what passes between two of them in the same order, each on its side.
  void Send(int peer, const void* data, int64_t bytes);
  // `into` null: only ReceivedFrom tells where it is.
  void Receive(int peer, void* into, int64_t bytes);
  // The blocks of all peers are combined with this rank's own, all of `phase.block_bytes`.
  void Combine(const PhasePlan& phase);

  // The exchange, in memory that `plan` keeps, the steps that must run before it, and those that store what came.
  // ResourceExhausted when there is no memory.
  absl::StatusOr<PhasePlan> Finish(std::vector<LocalStep>* before, std::vector<LocalStep>* after, CallPlan* plan);
  // Where what comes from `peer` begins; after Finish.
  const std::byte* ReceivedFrom(int peer) const { return peers_[peer].from; }

 private:
  struct Stored {
    void* into = nullptr;
    int64_t bytes = 0;
    int64_t at = 0;  // in what comes from the peer
  };
  struct Peer {
    std::vector<SendSpan> out = {};
    std::vector<Stored> in = {};
    int64_t out_bytes = 0;
    int64_t in_bytes = 0;
    std::byte* from = nullptr;
  };
  struct Combined {
    PhasePlan phase = {};
    std::vector<int64_t> at = {};
  };
  int64_t Reserve(int peer, int64_t bytes);

  const Place place_;
  std::vector<Peer> peers_;
  std::vector<Combined> combined_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_GROUPED_PACKING_H_
