// Ranks as threads of one process: the backend of tests, of the default parity run, and of one machine.
//
//   EK_ASSIGN_OR_RETURN(auto world, InProcessWorld::Create({.world_size = 4}));
//   // on the thread of rank r:
//   EK_ASSIGN_OR_RETURN(auto tp, world->backend(r).CreateGroup(mesh.GroupOf(Axis::kTp, r)));
//
// Payload is copied once, from the peer's buffer to the destination; up to `eager_bytes` it goes through a small
// buffer of the group, which saves one rendezvous. Ranks sleep while they wait, after microseconds of spinning, or of
// giving their turn to other threads where there are fewer processors than ranks.
#ifndef EVENKEEL_COMM_IN_PROCESS_H_
#define EVENKEEL_COMM_IN_PROCESS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

struct InProcessOptions {
  int world_size = 1;
  std::optional<Topology> topology = std::nullopt;  // default: all ranks on one node
  absl::Duration deadline = absl::Seconds(30);      // of every call until SetDeadline, and of CreateGroup
  absl::Duration spin =
      absl::Microseconds(20);  // before sleeping; turns for others instead, where ranks outnumber processors
  int64_t eager_bytes = 8192;  // per rank and call
  bool two_level = false;      // see HostCommunicator::Options
  ScratchMemory* scratch = ScratchMemory::Heap();  // outlives the world
  StragglerOptions stragglers = {};
  // Called by each rank before every piece that it copies out of a peer's memory. For tests that make a rank stall
  // there.
  std::function<void(int world_rank)> before_copy = nullptr;
};

// Owns the ranks of one world. Outlives its backends and communicators. Thread-safe.
class InProcessWorld {
 public:
  // InvalidArgument when world_size is below 1, a topology of another size is given, or a limit is not positive.
  static absl::StatusOr<std::unique_ptr<InProcessWorld>> Create(const InProcessOptions& options);
  virtual ~InProcessWorld() = default;

  virtual int size() const = 0;
  virtual const Topology& topology() const = 0;
  // The backend of world rank `rank`; dies when out of range.
  virtual Backend& backend(int rank) = 0;

  // Says that from now on only the calling thread makes the calls of `rank`, until it calls LeaveRank(rank). When all
  // ranks that have not left are entered and all are blocked, the deadlock is reported at once, with the cycle. Calls
  // on worker streams that wait for one another in a cycle are reported likewise, entered or not.
  virtual void EnterRank(int rank) = 0;
  // `rank` makes no more calls: peers that wait for it, now or later, get Unavailable at once, naming it.
  virtual void LeaveRank(int rank) = 0;
  // All ranks count as present again, for groups made from now on.
  virtual void AdmitAll() = 0;

  // Admits all, calls `body` once per rank, each on a thread of its own, and returns what each gave, by rank. A rank
  // whose body has returned has left: peers that still wait for it get Unavailable.
  virtual std::vector<absl::Status> Run(const std::function<absl::Status(Backend&)>& body) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_H_
