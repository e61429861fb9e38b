// A Transport over messages: what MPI and the simulation share.
//
// Agree sends one record to every peer (fingerprint, count row, and small payload with it) and waits for theirs.
// Exchange sends the payload in pieces straight from and into the caller's memory, a few pieces per peer under way at a
// time; pieces to be combined go through two staging blocks. A rank that fails tells its peers why (a notice through
// the mailroom); a rank that waits looks from time to time at notices and at the health of the processes it waits for.
//
// What a waiting rank returns:
//   * the limit has passed: DeadlineExceeded, a finding for each rank it still waits for;
//   * such a rank is dead, or has left the group or the world: Unavailable;
//   * such a rank has given the group up because it misses others: its code and its findings, so that all ranks name
//     the same odd rank; for another reason: Aborted with the cause;
//   * a record or piece is damaged: DataLoss.
#ifndef EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_
#define EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_

#include <cstdint>
#include <memory>

#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/message/group_seat.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/message_options.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// `wire`, `mailroom` and `scratch` outlive the transport. `rank` is the place in the group. The epoch is equal on all
// ranks and used by no other group of any of them.
std::unique_ptr<Transport> CreateMessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options,
                                                  ScratchMemory* scratch, const Group& group, int rank, int64_t epoch,
                                                  const ProposalSerials& serials);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_
