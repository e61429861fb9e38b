// What one rank of a group can do with its peers: the small interface under every host backend.
//
// HostCommunicator (host_communicator.h) checks arguments, makes fingerprints, judges them, reduces and books bytes.
// A Transport only moves bytes and knows about time and absence. One collective call is
//
//   Reserve(combines)                     the transport's own memory for the call, or why this rank must refuse it
//   Agree(call, posting, &agreement)      everybody's fingerprint and count row, or who is absent
//   ... HostCommunicator compares: when the ranks disagree, all stop here, no payload has moved ...
//   Exchange(call, phase)                 0, 1 or more times; all ranks do equally many
//
// so an implementation that can post memory (threads) does it in Agree and copies in Exchange, and one that sends
// messages (MPI, simulation) gathers the records in Agree and sends the payload in Exchange.
//
// Rules for implementers
//   * All ranks of the group make the same calls in the same order; one thread at a time.
//   * Every wait ends by `call.limit`, counted from the call of Agree and covering the Exchanges that follow it.
//   * Failures are returned through TransportError(): code DeadlineExceeded (peers absent, alive or unknown),
//     Unavailable (a peer is known to be dead or gone), Aborted (a peer gave the group up earlier: with the first
//     cause), DataLoss (payload damaged), Internal; with a finding for each odd rank saying what it did last, if known.
//   * After a failure, or after Abort(), the transport only fails: later calls return Aborted with the first cause.
//     A failure inside Agree leaves every caller's buffer untouched.
//   * The destructor never waits for peers longer than the limit; a peer that later waits for this rank learns
//     Unavailable, as soon as the transport can know.
//   * Zero-byte spans may have null pointers and cause no message.
//   * Booking of payload bytes is HostCommunicator's work, from the spans it passes.
#ifndef EVENKEEL_COMM_TRANSPORT_H_
#define EVENKEEL_COMM_TRANSPORT_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// Which operation a wait belongs to: for the limit and for messages.
struct Call {
  Operation operation = Operation::kBarrier;
  int64_t sequence = 0;
  absl::Duration limit = absl::ZeroDuration();  // positive and finite
  // Agree notes who has not come after so long.
  absl::Duration late_after = absl::InfiniteDuration();
};

struct SendSpan {
  const void* data = nullptr;
  int64_t bytes = 0;
};
struct ReceiveSpan {
  void* data = nullptr;
  int64_t bytes = 0;
};

// sources[i] points at byte `begin` of rank i's block and is readable for `length` bytes, until the callback returns.
using CombineFn = absl::FunctionRef<void(int64_t begin, int64_t length, absl::Span<const void* const> sources)>;

// One movement of payload: every rank sends one span to every other and receives one from every other.
// Entries at the own rank are ignored (HostCommunicator copies its own block, in `meanwhile`), except that a combine
// finds sends[rank].data as sources[rank].
struct Phase {
  absl::Span<const SendSpan> sends = {};        // size() entries, to group rank j
  absl::Span<const ReceiveSpan> receives = {};  // size() entries, from group rank i, as long as rank i's sends[rank()]
  // When set, nothing is stored into receives: all receives[i].bytes (and sends[rank].bytes) are equal to `block_bytes`
  // and `combine` is called for consecutive ranges that cover [0, block_bytes), each a multiple of 64 bytes long but
  // the last. `combine` may write the caller's memory, including the own send block at [begin, begin + length), but no
  // block that a peer reads in this phase. It is called on the thread that called Exchange. Not called for 0 bytes.
  const CombineFn* combine = nullptr;
  int64_t block_bytes = 0;
  // Work of the caller that needs no peer and touches nothing of what is sent and received here. When set, it is called
  // exactly once before Exchange returns OK, at a moment that suits the transport: best while peers take what this rank
  // sends.
  const absl::FunctionRef<void()>* meanwhile = nullptr;
  // Another Exchange of the same call follows at once, and until its payload arrives this rank writes nothing that it
  // sends here: a transport that lends memory may let the two share a rendezvous.
  bool more_follows = false;
};

// What Agree tells the peers.
struct Posting {
  Fingerprint fingerprint = {};
  // Up to 2 * size() numbers. Ranks may pass different lengths when they disagree; nobody reads rows then.
  absl::Span<const int64_t> row = {};
  // The first Phase that Exchange will get if the ranks agree, or null when there is none or it is not known yet. Its
  // sends may be read (copied, posted) already; its receives must not be touched before Exchange.
  const Phase* first = nullptr;
};

// What Agree learned. The spans stay readable until the next call of Agree.
struct Agreement {
  absl::Span<const Fingerprint> fingerprints = {};  // by group rank; unchecked bytes of the peers
  absl::Span<const int64_t> rows = {};  // size() rows of 2 * size() numbers; beyond what a rank posted: unspecified
  // Group ranks that had not come when this rank had waited call.late_after, and how long it waited for the last.
  absl::Span<const int> late = {};
  absl::Duration waited = absl::ZeroDuration();
};

// One rank's end of one group (or of one pair of its ranks). Not thread-safe, except Abort.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual const Group& group() const = 0;
  virtual int rank() const = 0;  // inside the group
  int size() const { return group().size(); }
  virtual int64_t epoch() const = 0;

  // Gets what the Exchanges of the next call need, with `combines` also those that combine. ResourceExhausted when
  // there is no memory for it; the transport stays usable. Local.
  virtual absl::Status Reserve(bool combines) = 0;

  // Gathers the postings of all ranks. Returns when every rank has called it. Zero Exchanges may follow, or another
  // Agree of the same call (equal sequence, within the same limit), when only the first could tell whether it can be
  // made.
  virtual absl::Status Agree(const Call& call, const Posting& posting, Agreement* agreement) = 0;

  // Moves the payload of one phase. On return this rank's receives are complete and its sends may be overwritten.
  // The first Exchange after Agree gets a phase with the spans of posting.first when that was set.
  virtual absl::Status Exchange(const Call& call, const Phase& phase) = 0;

  // The transport of this rank and group rank `peer` alone, with an order of calls of its own: a group of two, the
  // lower rank first, so its rank() is 0 or 1. Made on first use, owned by this transport. `peer` is another rank. Its
  // errors name ranks of the pair's own numbering translated to those of the parent group.
  virtual absl::StatusOr<Transport*> Pair(int peer) = 0;

  // Tells the peers, as far as and as early as the transport can, that this rank has given the group up because of
  // `cause`. Peers that wait fail at once with the cause. Never blocks. Thread-safe, idempotent.
  virtual void Abort(const absl::Status& cause) = 0;
};

// The group's identity in fingerprints.
uint64_t GroupDigest(const Group& group);

// Where a call of `transport` failed, with all fields but findings and times filled in.
ErrorContext CallContext(const Group& group, int64_t epoch, int rank, const Call& call);

// The status of a failed call in the fixed shape. `context` from CallContext, findings and times added.
absl::Status TransportError(absl::StatusCode code, ErrorContext context, absl::string_view what);

// The status for a call on a group that `first_cause` has broken: Aborted, text and findings of the cause kept.
absl::Status BrokenGroupError(ErrorContext context, const absl::Status& first_cause);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TRANSPORT_H_
