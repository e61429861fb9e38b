// One rank's end of an in-process group: agreement by posting, payload by one copy out of the peers' memory.
//
// Internal to in_process.cc. Every wait ends by the call's limit, also those after the agreement: memory that others
// lend is read piece by piece, each piece between BeginReading and EndReading of the group, and a lender whose limit
// has passed breaks the group, waits for pieces that are being read, and takes its memory back. A piece is one memcpy
// or one reduction of at most 256 KiB a source, which waits for nothing but its thread's turn on a processor.
#ifndef EVENKEEL_COMM_IN_PROCESS_TRANSPORT_H_
#define EVENKEEL_COMM_IN_PROCESS_TRANSPORT_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "evenkeel/comm/in_process_group.h"
#include "evenkeel/comm/rendezvous.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// What a transport needs of its world. Thread-safe.
class InProcessHost {
 public:
  virtual ~InProcessHost() = default;
  // Sleeps in `phase` of `group`, as one of the ranks that a deadlock is made of.
  virtual Rendezvous::Outcome Sleep(InProcessGroup* group, uint64_t phase, const Call& call, int rank,
                                    int64_t until_ns) = 0;
  // Gives up one reference.
  virtual void Release(std::shared_ptr<InProcessGroup> group) = 0;
};

// See InProcessOptions::before_copy.
using BeforeCopy = std::function<void(int world_rank)>;

// `host` outlives the transport.
std::unique_ptr<Transport> CreateInProcessTransport(InProcessHost* host, std::shared_ptr<InProcessGroup> shared,
                                                    int rank, int world_rank, BeforeCopy before_copy);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_IN_PROCESS_TRANSPORT_H_
