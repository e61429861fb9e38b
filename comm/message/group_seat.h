// One rank's seat in a group of MessageTransport: who the peers are, which tags are the group's, what is known of each
// peer, and why the group was given up.
//
// Shared by the parts of the transport: records (record_exchange.h), payload (payload_flows.h) and absence
// (absence.h). A group and the pairs inside it have seats of their own with the same epoch.
#ifndef EVENKEEL_COMM_MESSAGE_GROUP_SEAT_H_
#define EVENKEEL_COMM_MESSAGE_GROUP_SEAT_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/message_options.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// The serial of the proposal by which each group rank entered the group: a later kVoid of it is an abort.
using ProposalSerials = std::vector<int64_t>;

// Thread-safe are Abort, TellPeers and status; the rest belongs to the thread that makes the calls.
class GroupSeat {
 public:
  struct Identity {
    Group group = {};
    int rank = 0;  // inside the group
    int64_t epoch = 0;
    ProposalSerials serials = {};
    bool is_pair = false;
    // Of a pair: the group ranks behind 0 and 1, and the size of that group. Errors speak of these.
    std::vector<int> outer_ranks = {};
    int outer_size = 0;
  };
  enum class TagKind : uint8_t { kRecord = 0, kPayload = 1 };

  // What is known of one peer.
  struct Peer {
    int world_rank = -1;
    bool knows_last = false;
    Fingerprint last;  // of its newest record
    // Payload pieces over the life of the group, to it and from it.
    int64_t sends_started = 0;
    int64_t receives_started = 0;
    // Whose sending has ended, so that they arrive without this rank's help: notices tell it.
    std::atomic<int64_t> pieces_sent{0};
  };

  GroupSeat(Wire* wire, Mailroom* mailroom, const MessageOptions& options, Identity identity);

  Wire& wire() const { return *wire_; }
  Mailroom& mailroom() const { return *mailroom_; }
  const MessageOptions& options() const { return options_; }
  const Identity& identity() const { return identity_; }
  const Group& group() const { return identity_.group; }
  int rank() const { return identity_.rank; }
  int size() const { return identity_.group.size(); }
  int64_t epoch() const { return identity_.epoch; }
  bool is_pair() const { return identity_.is_pair; }
  // The rank as errors name it.
  int OuterRank(int rank) const { return identity_.outer_ranks.empty() ? rank : identity_.outer_ranks[rank]; }
  Peer& peer(int i) { return peers_[i]; }
  const Peer& peer(int i) const { return peers_[i]; }

  // The tag of the group's message number `counter` of a kind, to or from one peer.
  int Tag(TagKind kind, int64_t counter) const;

  // Where a call failed, with all fields but findings and times filled in.
  ErrorContext Context(const Call& call) const;
  // "its last call: ..."
  std::string LastOf(int i) const;

  // The calls of Agree so far, and whether one is under way: notices tell them.
  int64_t records_sent() const { return records_sent_.load(std::memory_order_relaxed); }
  void CountRecord() { records_sent_.fetch_add(1, std::memory_order_relaxed); }
  void SetInAgree(bool in_agree) { in_agree_.store(in_agree, std::memory_order_relaxed); }

  // OK, or why the group was given up.
  absl::Status status() const;
  // Gives the group up: keeps the first cause and tells the peers. Does nothing when it was given up before.
  void Abort(const absl::Status& cause);
  // Posts a notice to every peer. Never blocks.
  void TellPeers(ControlMessage::Kind kind, const absl::Status& cause);

 private:
  Wire* const wire_;
  Mailroom* const mailroom_;
  const MessageOptions options_;
  const Identity identity_;
  std::vector<Peer> peers_;
  std::atomic<int64_t> records_sent_{0};
  std::atomic<bool> in_agree_{false};
  mutable absl::Mutex mutex_;
  absl::Status first_cause_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_GROUP_SEAT_H_
