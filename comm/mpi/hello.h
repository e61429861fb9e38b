// What a rank tells all others when the job starts, and why a job must not start. Pure.
#ifndef EVENKEEL_COMM_MPI_HELLO_H_
#define EVENKEEL_COMM_MPI_HELLO_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/mpi/process_watch.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::comm {

// Plain bytes: travels between ranks.
struct Hello {
  uint32_t magic = 0x6f6c4b45;  // "EKlo"
  uint32_t protocol = 0;        // of fingerprints
  uint64_t build = 0;
  uint64_t config = 0;   // digest of what the program wants to be equal
  uint64_t options = 0;  // digest of the backend's own options
  int32_t rank = -1;
  int32_t size = 0;
  ProcessIdentity process;
};

// FailedPrecondition with what each odd rank has when protocol, build, configuration, options or world size differ, or
// when a rank's hello is not one; AlreadyExists with host and process of both when two say that they are the same rank.
// The same on every rank. `hellos` by rank.
absl::Status CompareHellos(absl::Span<const Hello> hellos, int own_rank);

// Ranks of one host are on one node; nodes are numbered in the order of their first rank.
Topology TopologyOfHosts(absl::Span<const Hello> hellos);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_HELLO_H_
