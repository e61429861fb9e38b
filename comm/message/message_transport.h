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
//   the
//     same odd rank; for another reason: Aborted with the cause;
//   * a record or piece is damaged: DataLoss.
#ifndef EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_
#define EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// How payload travels. Equal on all ranks.
struct MessageOptions {
  // Payload to one peer of at most so many bytes goes with the record.
  int64_t eager_bytes = 2048;
  // The most bytes of one message; below 2^31. Rounded down to a multiple of 64.
  int64_t piece_bytes = 256 << 10;
  // Pieces under way per peer and direction.
  int window = 4;
  // A digest follows the pieces to each peer and is compared before Exchange returns. Records always carry one.
  bool payload_digest = false;
};

// InvalidArgument when a number is out of range.
absl::Status CheckMessageOptions(const MessageOptions& options);
// Of the values, for the comparison between ranks.
uint64_t DigestOfMessageOptions(const MessageOptions& options);

// The serial of the proposal by which each group rank entered the group: a later kVoid of it is an abort.
using ProposalSerials = std::vector<int64_t>;

// `wire` and `mailroom` outlive the transport. `rank` is the place in the group. The epoch is equal on all ranks and
// used by no other group of any of them.
std::unique_ptr<Transport> CreateMessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options,
                                                  const Group& group, int rank, int64_t epoch,
                                                  const ProposalSerials& serials);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_MESSAGE_TRANSPORT_H_
