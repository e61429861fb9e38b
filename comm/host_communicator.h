// The Communicator of every host backend, written once above Transport.
//
// Checks arguments, takes part with a refusing fingerprint when they are bad (so that peers learn at once), judges the
// fingerprints and count rows, splits, reduces in the canonical tree, books bytes, keeps the first cause.
//
//   return HostCommunicator::Create({.group = group, .rank = group.IndexOf(world_rank), .epoch = epoch,
//                                    .ledger = &ledger, .topology = &topology, .deadline = deadline},
//                                   std::move(transport));
#ifndef EVENKEEL_COMM_HOST_COMMUNICATOR_H_
#define EVENKEEL_COMM_HOST_COMMUNICATOR_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/queued_call.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

class HostCommunicator {
 public:
  struct Options {
    Group group;
    int rank = 0;  // inside the group
    int64_t epoch = 0;
    ByteLedger* ledger = nullptr;        // outlives the communicator
    const Topology* topology = nullptr;  // of the world; outlives the communicator
    absl::Duration deadline = absl::Seconds(30);
    // Exchange between nodes through one rank per node and peer index, where the group covers several nodes with
    // equally many ranks each. Same bits, other bytes by link class. Must be equal on all ranks.
    bool two_level = false;
    ScratchMemory* scratch = ScratchMemory::Heap();  // outlives the communicator
    StragglerOptions stragglers = {};
    QueueWatch* watch = nullptr;  // hears of calls on streams that run them later; outlives the communicator
  };

  // `transport` may be null for a group of one rank, which never uses it.
  static std::unique_ptr<Communicator> Create(Options options, std::unique_ptr<Transport> transport);
};

// Checks a group given to Backend::CreateGroup: InvalidArgument when it is empty, when `world_rank` is not a member, or
// a rank is outside [0, world_size) or listed twice.
absl::Status CheckGroup(const Group& group, int world_rank, int world_size);

// InvalidArgument unless positive and at most a day: there is no infinite deadline.
absl::Status CheckDeadline(absl::Duration deadline);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_HOST_COMMUNICATOR_H_
