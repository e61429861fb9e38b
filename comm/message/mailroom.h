// Small messages between any two ranks of a world, beside the payload: proposals for new groups, and notices that a
// rank has given a group up or left it.
//
//   Mailroom mailroom(&wire);
//   mailroom.Post(peer, {.kind = ControlMessage::Kind::kAbort, .id = epoch, .body = EncodeStatus(cause)});
//   mailroom.Poll();
//   std::optional<ControlMessage> notice = mailroom.FindNotice(peer, epoch, /*pair=*/false);
#ifndef EVENKEEL_COMM_MESSAGE_MAILROOM_H_
#define EVENKEEL_COMM_MESSAGE_MAILROOM_H_

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/message/tag_channels.h"
#include "evenkeel/comm/message/wire.h"

namespace evenkeel::comm {

struct ControlMessage {
  enum class Kind : uint32_t {
    kProposal = 1,  // a new group: id = serial, a = proposed epoch, body = fingerprint
    kVoid =
        2,  // the proposal `id` was given up, body = cause, a = the reader's proposal that it was matched with or -1
    kAbort = 3,    // the group of epoch `id` was given up, body = cause; a, b as for kLeft
    kLeft = 4,     // the group of epoch `id` was destroyed; a = records sent, b = payload pieces that the reader has or
                   // will get
    kGoodbye = 5,  // the rank leaves the world in good order; a = 1: but has given up waiting for all to leave
    kWaiting = 6,  // the sender waits for the reader in the group of epoch `id`: body = its wait_notes.h, empty when it
                   // waits no more; a = counts up
  };
  Kind kind = Kind::kLeft;
  bool pair = false;      // about the pair of sender and reader inside the group
  bool in_agree = false;  // kAbort: given up inside Agree
  int64_t id = 0;
  int64_t a = 0;
  int64_t b = 0;
  std::string body = {};
};

std::string EncodeControl(const ControlMessage& message, int64_t serial);
// InvalidArgument when the bytes are not what EncodeControl made (cut, extended, damaged).
absl::StatusOr<ControlMessage> DecodeControl(absl::string_view bytes, int64_t* serial);

// A status as bytes, its text and payload cut so that the whole fits a control message.
std::string EncodeStatus(const absl::Status& status);
// Never OK: bytes that cannot be read give an Internal status that says so.
absl::Status DecodeStatus(absl::string_view bytes);

// Thread-safe.
class Mailroom {
 public:
  explicit Mailroom(Wire* wire);
  ~Mailroom();
  Mailroom(const Mailroom&) = delete;

  // Sends and forgets. Never blocks.
  void Post(int peer, const ControlMessage& message);
  // Takes in what has arrived.
  void Poll();
  // Waits until everything posted is on its way to ranks that live, at most `limit`. The world ranks in `absent` are
  // not waited for.
  void Flush(absl::Duration limit, absl::Span<const int> absent);

  // The next proposal from `peer` that has not been taken and is not void.
  std::optional<ControlMessage> PeekProposal(int peer);
  void TakeProposal(int peer);
  // The cause, when `peer` has given its proposal `serial` up.
  std::optional<absl::Status> FindVoid(int peer, int64_t serial);
  // The cause, when `peer` has given up a group in answer to this rank's proposal `serial`.
  std::optional<absl::Status> FindAnswer(int peer, int64_t serial);
  std::optional<ControlMessage> FindNotice(int peer, int64_t epoch, bool pair);
  // The newest kWaiting of each peer and group that was not empty: sender and body.
  std::vector<std::pair<int, std::string>> WaitNotes();
  // Not before everything that `peer` had posted before its goodbye is here.
  bool SaidGoodbye(int peer);
  // `peer` does not wait any more for all ranks to leave: it ends, or has ended, on its own.
  bool LeftAlone(int peer);

  // The group of `epoch` begins or ends here: notices about epochs that ended are dropped.
  void OpenEpoch(int64_t epoch);
  void CloseEpoch(int64_t epoch);
  // The group of `epoch` broke with messages under way: its channel stays out of use.
  void DoubtEpoch(int64_t epoch);
  BusyChannels busy_channels();
  // Messages that were damaged, doubled, or about a group that no longer exists.
  int64_t num_dropped();

 private:
  struct Inbox {
    std::array<char, kEagerMessageBytes> buffer;
    Transfer transfer;
    int64_t floor = 0;       // all serials below have been seen
    std::set<int64_t> seen;  // and these above
    std::deque<ControlMessage> proposals;
    std::map<int64_t, absl::Status> voids;    // by the peer's proposal
    std::map<int64_t, absl::Status> answers;  // by this rank's proposal
    std::optional<int64_t> goodbye;           // its serial
    bool left_alone = false;
  };
  struct Outgoing {
    int peer = -1;
    std::string bytes;
    Transfer transfer;
  };

  bool IsNew(Inbox& inbox, int64_t serial) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Receive(int peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Sort(int peer, absl::string_view bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Wire* const wire_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Inbox>> inboxes_ ABSL_GUARDED_BY(mutex_);  // null at the own rank
  std::vector<int64_t> serials_ ABSL_GUARDED_BY(mutex_);                 // sent to each peer
  std::list<Outgoing> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<int, int64_t, bool>, ControlMessage> notices_ ABSL_GUARDED_BY(mutex_);
  std::map<std::tuple<int, int64_t, bool>, ControlMessage> waits_ ABSL_GUARDED_BY(mutex_);
  std::set<int64_t> open_epochs_ ABSL_GUARDED_BY(mutex_);
  int64_t newest_epoch_ ABSL_GUARDED_BY(mutex_) = -1;
  BusyChannels doubtful_ ABSL_GUARDED_BY(mutex_);
  int64_t num_dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_MAILROOM_H_
