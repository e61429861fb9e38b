// What a rank needs from a system that carries messages: the seam under MPI and the simulation.
//
// Everything above it (agreement, payload in pieces, notices, absence, limits: message_transport.h, message_backend.h)
// is the same code on both. All calls start something or look at something; nothing blocks but Pause.
//
//   Transfer in, out;
//   wire.StartReceive(peer, tag, buffer, capacity, &in);
//   wire.StartSend(peer, tag, data, bytes, &out);
//   for (int attempt = 0; !(in.done && out.done); ++attempt) {
//     wire.Test({&in, &out});
//     wire.Pause({.attempt = attempt, .until = deadline});
//   }
//
// A message is matched by (sender, tag), in the order of sending for equal tags. Messages with different tags are
// independent: a wire may deliver them in any order. A wire may lose, double or damage messages (the simulation does);
// what is above it must then fail with the right error, never with a wrong bit or a hang.
#ifndef EVENKEEL_COMM_MESSAGE_WIRE_H_
#define EVENKEEL_COMM_MESSAGE_WIRE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace evenkeel::comm {

// Tags are in [0, kMaxTag]; one is for control messages between ranks (mailroom.h).
inline constexpr int kMaxTag = (1 << 30) - 1;
inline constexpr int kControlTag = 1;
// The most bytes a wire sends without the receiver's help, so that a send of that size never waits for the peer.
inline constexpr int64_t kEagerMessageBytes = 3840;

// A message under way. The owner keeps it and the message's memory in place until it is done or cancelled.
struct Transfer {
  bool done = true;         // also: never started
  int64_t bytes = 0;        // of the message received, once done
  void* request = nullptr;  // the wire's own
};

struct PeerHealth {
  enum class State : uint8_t { kUnknown, kAlive, kDead };
  State state = State::kUnknown;
  std::string text = {};  // "process 4711 is stopped"; may be empty
};

struct PauseHint {
  int attempt = 0;                                 // polls since `since`
  absl::Duration until = absl::ZeroDuration();     // in terms of Now(); Pause never sleeps past it
  absl::Duration since = absl::ZeroDuration();     // when the wait began, or something last moved
  absl::Duration busy_for = absl::ZeroDuration();  // payload is moving: stay awake at least so long after `since`
};

// One rank's end of the world. Thread-safe: calls of several threads are serialised.
class Wire {
 public:
  virtual ~Wire() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The wire's monotonic time.
  virtual absl::Duration Now() = 0;

  // Starts sending `bytes` bytes to world rank `peer`.
  virtual absl::Status StartSend(int peer, int tag, const void* data, int64_t bytes, Transfer* transfer) = 0;
  // Starts receiving a message of at most `capacity` bytes from world rank `peer`.
  virtual absl::Status StartReceive(int peer, int tag, void* data, int64_t capacity, Transfer* transfer) = 0;
  // Marks the transfers that have finished. Entries that are done already are skipped.
  virtual absl::Status Test(absl::Span<Transfer* const> transfers) = 0;
  // Takes a transfer back: afterwards it is done and its memory is not touched. False when that cannot be promised (a
  // send that the peer has begun to take): the owner then calls Condemn and leaves the memory alone.
  virtual bool Cancel(Transfer* transfer) = 0;

  // Gives time away. True from time to time, when a look at notices and at the peers' health is worth its cost.
  virtual bool Pause(const PauseHint& hint) = 0;
  // Whether the process behind `peer` lives. `describe`: also say how it is, which costs more.
  virtual PeerHealth Health(int peer, bool describe) = 0;

  // OK, or why this wire carries nothing any more.
  virtual absl::Status status() const = 0;
  // Ends all traffic of this rank: the first cause stays.
  virtual void Condemn(const absl::Status& cause) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_WIRE_H_
