// Ranks as processes of an MPI job: threads and processes give the same bits.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<MpiBackend> world, MpiBackend::Create({.config = config.SerializeAsString()}));
//   EK_ASSIGN_OR_RETURN(auto tp, world->CreateGroup(mesh.GroupOf(Axis::kTp, world->rank())));
//
// What it asks of MPI is little: MPI_Isend, MPI_Irecv and tests on a communicator of its own. Reductions are the
// canonical tree of comm/reduction.h, groups are agreed on by messages, counts are 64 bit and cut into pieces. Every
// wait polls against a limit and sleeps between polls.
//
// Threads: MPI runs as MPI_THREAD_SERIALIZED; the calls of different groups may come from different threads, the
// backend serialises them poll by poll. The program must make no MPI calls of its own meanwhile.
//
// Faults. A dead process of the same host is seen within milliseconds (Unavailable), any other absence by the deadline
// (DeadlineExceeded). mpirun ends a job in which a process died: it sends SIGTERM to the others at once and SIGKILL a
// second later. With `catch_sigterm` the first SIGTERM only marks the job as ending, so that waiting calls return with
// the dead rank's name and the program can report; SIGTERM a second later ends the process.
// After an error with payload under way the whole rank carries no more traffic, because MPI cannot take a send back.
//
// The end. The destructor (after the communicators') waits for all ranks, at most the deadline, then finalizes MPI.
// When anything failed before, or a rank is missing, MPI is left as it is and the launcher ends the job. It never
// hangs: an MPI_Finalize that does not return ends the process with exit code 86 after `finalize_limit`.
#ifndef EVENKEEL_COMM_MPI_MPI_BACKEND_H_
#define EVENKEEL_COMM_MPI_MPI_BACKEND_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

struct MpiOptions {
  absl::Duration deadline = absl::Seconds(30);        // of every call until SetDeadline, and of CreateGroup
  absl::Duration start_deadline = absl::Seconds(30);  // of Create
  absl::Duration finalize_limit = absl::Seconds(2);   // of MPI_Finalize, once all ranks are there
  std::optional<Topology> topology;                   // default: a node per host
  bool two_level = false;                             // see HostCommunicator::Options
  std::string config;                                 // any text that must be equal on all ranks; compared at the start
  uint64_t build = 0;                                 // compared at the start; 0: of the running program
  bool catch_sigterm = true;
  ScratchMemory* scratch = ScratchMemory::Heap();  // outlives the backend; not compared
  StragglerOptions stragglers = {};                // not compared

  int64_t eager_bytes = 2048;                     // payload to one peer up to this goes with the fingerprint
  int64_t piece_bytes = 4 << 20;                  // the most bytes of one MPI message, below 2^31
  bool payload_digest = false;                    // compare a digest of all payload on arrival
  absl::Duration spin = absl::Microseconds(100);  // of yielding before a wait sleeps
};

// One per process. The program is started by mpirun (or is a world of one). Thread-safe like every Backend.
class MpiBackend : public Backend {
 public:
  // All ranks of the job call it. FailedPrecondition on every rank when build, protocol, options or config differ, with
  // what each rank has; DeadlineExceeded when not all ranks came, naming them if MPI_Init returned (if it did not, the
  // process can only be ended with EndProcess); InvalidArgument for options out of range.
  static absl::StatusOr<std::unique_ptr<MpiBackend>> Create(const MpiOptions& options);

  // Messages that belonged to groups that no longer exist, or were doubled.
  virtual int64_t num_dropped_messages() = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_MPI_BACKEND_H_
