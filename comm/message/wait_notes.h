// Who waits for whom, as far as ranks have told each other: what turns "rank 1 is absent" into "rank 1 is absent, for
// it waits for this rank in another group".
//
// A rank that has waited a quarter of its limit tells those it waits for, and again when it learns more: its own wait,
// and those that it was told. So what a rank knows grows along the waits, and in a cycle comes to all of its ranks.
// Notes are words for errors, never a reason for one: a note may be old, and a rank may have threads that wait for
// nobody.
#ifndef EVENKEEL_COMM_MESSAGE_WAIT_NOTES_H_
#define EVENKEEL_COMM_MESSAGE_WAIT_NOTES_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/message/mailroom.h"

namespace evenkeel::comm {

// Ranks are those of the world.
struct WaitNote {
  int rank = -1;
  std::vector<int> waits_for = {};
  std::string text = {};  // "waits in barrier of group ep epoch=2 seq=0"

  friend bool operator==(const WaitNote&, const WaitNote&) = default;
};

// By the rank that waits; one note each.
using WaitNotes = std::map<int, WaitNote>;

// For a control message: cut to what fits one, the note of `first` before all others.
std::string EncodeWaitNotes(const WaitNotes& notes, int first);
// Nothing when the bytes are not what EncodeWaitNotes made for a world of that size.
std::optional<WaitNotes> DecodeWaitNotes(absl::string_view bytes, int world_size);

// What the peers of `rank` have told it, and that they wait for it to make a group. Not about `rank` itself.
WaitNotes KnownWaits(Mailroom& mailroom, int rank, int world_size);

// "; it waits in barrier of group ep epoch=2 seq=0 for world rank 0", or "" when nothing is known of `rank`.
std::string DescribeWaitOf(int rank, const WaitNotes& notes);
// ", they wait for each other: world rank 0 waits in barrier of group ep epoch=2 seq=0 for world rank 1, world rank 1
// waits in ... for world rank 0": a cycle to which the waits of `start` lead, or "" when none is known.
std::string DescribeCycle(int start, const WaitNotes& notes);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_WAIT_NOTES_H_
