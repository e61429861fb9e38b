// Who is missing, and whether it can still come: the waits of MessageTransport and the errors they end with.
//
//   EK_RETURN_IF_ERROR(absence.Wait(call, start, busy_for,
//                                   [&](Progress* progress) { return TakeWhatHasCome(progress); },
//                                   [&] { return WhatHasNotCome(); }));
//
// A wait ends with what message_transport.h promises: all there; a missing rank is gone (Unavailable); one has given
// the group up (its cause); the limit has passed (DeadlineExceeded, a finding for each rank still missing; what such a
// rank itself waits for, and the cycle, where ranks have told it: wait_notes.h).
#ifndef EVENKEEL_COMM_MESSAGE_ABSENCE_H_
#define EVENKEEL_COMM_MESSAGE_ABSENCE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/message/group_seat.h"
#include "evenkeel/comm/message/wait_notes.h"
#include "evenkeel/comm/transport.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

// What a rank waits for from one peer: a record, pieces, or that the peer takes what was sent.
struct Missing {
  int rank = -1;  // inside the group
  const char* what = "";
  bool record = false;  // its record of this call
  bool piece = false;   // payload piece number `index` of the group's life
  int64_t index = 0;
};

// What one look at the messages of a call found.
struct Progress {
  bool finished = false;  // all is there
  bool moved = false;     // something has come, or was taken, since the last look
};

// Not thread-safe: of the thread that makes the calls.
class Absence {
 public:
  // `seat` outlives it.
  explicit Absence(GroupSeat* seat) : seat_(*seat) {}

  // A call begins: its limit counts from now.
  void BeginCall();

  // Who had not come when the call had waited call.late_after, and when it went on.
  absl::Span<const int> late() const { return late_; }
  absl::Duration waited() const { return waited_; }

  // Polls `advance` until it says that everything is there, or fails. `list_missing` names what is not there yet.
  // `busy_for`: for Wire::Pause; counts anew whenever something moves.
  absl::Status Wait(const Call& call, absl::Duration busy_for, absl::FunctionRef<absl::Status(Progress*)> advance,
                    absl::FunctionRef<std::vector<Missing>()> list_missing);

  // The cause of a peer that has given up this very call of Agree while this rank was on its way: a rank that comes
  // last may come too late.
  absl::Status CheckNobodyGaveUp(const Call& call);

  // The wire carries nothing any more: a rank of the group that is dead is named first, then what a rank said that
  // gave the group up (which came before its own end).
  absl::Status WireError(const Call& call);

 private:
  absl::Status FindGone(const Call& call, const std::vector<Missing>& missing);
  absl::Status JudgeHealth(const Call& call, int i, bool believe_goodbye);
  absl::Status GoneError(const Call& call, int i, absl::string_view what);
  bool IsPromised(const Missing& missing, const ControlMessage& notice) const;
  bool IsPromised(const Missing& missing);
  absl::Status JudgeNotice(const Call& call, const Missing& missing);
  absl::Status Adopt(ErrorContext context, const absl::Status& cause, int from) const;
  absl::Status TooLate(const Call& call, const std::vector<Missing>& missing);
  std::map<int, std::string> OddRanks(const std::vector<Missing>& missing, const WaitNotes& waits);
  WaitNotes AllWaits(const Call& call, const std::vector<Missing>& missing);
  void TellWhatIsKnown(const Call& call, const std::vector<Missing>& missing);
  void PostWaitNotes(const std::string& body);
  std::optional<absl::Status> CauseOf(int i);
  ErrorContext TimedContext(const Call& call);

  GroupSeat& seat_;
  absl::Duration call_start_ = absl::ZeroDuration();
  std::vector<int> late_;
  absl::Duration waited_ = absl::ZeroDuration();
  // Notes of this wait: what was told last, to which group ranks.
  std::string told_;
  std::set<int> told_to_;
  int64_t num_told_ = 0;  // in the group's life
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_ABSENCE_H_
