// Which messages belong to which group: every group of a rank has a channel, a part of its messages' tags.
//
// Epochs go up for ever and channels come round, so a new group gets the first epoch whose channel is free on all its
// members: none of them has it in use, or in doubt because messages of a group that broke may still be under way.
#ifndef EVENKEEL_COMM_MESSAGE_TAG_CHANNELS_H_
#define EVENKEEL_COMM_MESSAGE_TAG_CHANNELS_H_

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// Tags: [channel 12 bits][kind 2 bits][counter 16 bits]; channel 0 is the mailroom's.
inline constexpr int kTagCounterBits = 16;
inline constexpr int kTagKindBits = 2;
inline constexpr int kNumTagChannels = (1 << (30 - kTagCounterBits - kTagKindBits)) - 1;

// In [1, kNumTagChannels].
inline int TagChannel(int64_t epoch) { return static_cast<int>(epoch % kNumTagChannels) + 1; }

// The channels that a rank has in use or in doubt. A value.
class BusyChannels {
 public:
  void Add(int64_t epoch) { busy_.set(static_cast<size_t>(TagChannel(epoch) - 1)); }
  void Add(const BusyChannels& other) { busy_ |= other.busy_; }
  int count() const { return static_cast<int>(busy_.count()); }
  // The first epoch at or after `epoch` whose channel is free; nothing when none is.
  std::optional<int64_t> FirstFree(int64_t epoch) const;

  // As bytes, and back: nothing when the bytes are not what Encode made.
  std::string Encode() const;
  static std::optional<BusyChannels> Decode(absl::string_view bytes);

 private:
  std::bitset<kNumTagChannels> busy_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_TAG_CHANNELS_H_
