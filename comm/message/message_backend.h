// A Backend over a Wire: groups are agreed on by small messages, never by a collective of the messaging system.
//
// CreateGroup sends a proposal (the group's fingerprint and the first epoch that this rank has free) to every member
// and waits for theirs. When all proposals are for the same group, its epoch is the largest proposed one; every member
// then moves its own first free epoch past it. So two groups that share a rank never share an epoch, and nothing that
// was sent in one group can be taken for a message of another.
//
// Proposals also tell which tag channels a rank has in use (tag_channels.h): the epoch is the first at or after the
// largest proposed one whose channel is free on all members. InvalidArgument when there is none.
#ifndef EVENKEEL_COMM_MESSAGE_MESSAGE_BACKEND_H_
#define EVENKEEL_COMM_MESSAGE_MESSAGE_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/message_transport.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/stragglers.h"

namespace evenkeel::comm {

class MessageBackend final : public Backend {
 public:
  struct Options {
    std::string name;
    Topology topology = Topology::SingleNode(1);
    absl::Duration deadline = absl::Seconds(30);  // of CreateGroup, and of calls until SetDeadline
    bool two_level = false;                       // see HostCommunicator::Options
    MessageOptions message;
    ScratchMemory* scratch = ScratchMemory::Heap();
    StragglerOptions stragglers = {};
  };

  // `wire` outlives the backend; options are checked by the caller.
  MessageBackend(Wire* wire, Options options);

  // Tells all ranks that this one makes no more calls. After the last communicator of this rank is gone.
  void SayGoodbye();
  // Tells all ranks that this one has given up waiting for them to leave, and ends on its own.
  void SayLeftAlone();
  // Whether a rank has said so.
  bool AnyLeftAlone();

  absl::string_view name() const override { return options_.name; }
  int rank() const override { return wire_->rank(); }
  int size() const override { return wire_->size(); }
  const Topology& topology() const override { return options_.topology; }
  ByteLedger& ledger() override { return ledger_; }
  absl::StatusOr<std::unique_ptr<Communicator>> CreateGroup(const Group& group) override;

  Mailroom& mailroom() { return mailroom_; }

 private:
  struct Meeting;

  void PostGoodbye(bool alone);
  absl::Status Meet(Meeting& meeting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  absl::Status LookAtProposals(Meeting& meeting, bool* complete) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  absl::Status TooLate(const Meeting& meeting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  absl::Status GiveUp(const Meeting& meeting, absl::Status cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(create_mutex_);
  std::unique_ptr<Communicator> MakeCommunicator(const Group& group, int64_t epoch,
                                                 std::unique_ptr<Transport> transport);

  Wire* const wire_;
  const Options options_;
  ByteLedger ledger_;
  Mailroom mailroom_;
  absl::Mutex create_mutex_;
  int64_t next_epoch_ ABSL_GUARDED_BY(create_mutex_) = 0;
  int64_t next_proposal_ ABSL_GUARDED_BY(create_mutex_) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_MESSAGE_BACKEND_H_
