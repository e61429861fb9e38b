// How payload travels over messages. Equal on all ranks.
#ifndef EVENKEEL_COMM_MESSAGE_MESSAGE_OPTIONS_H_
#define EVENKEEL_COMM_MESSAGE_MESSAGE_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"

namespace evenkeel::comm {

struct MessageOptions {
  // Payload to one peer of at most so many bytes goes with the record.
  int64_t eager_bytes = 2048;
  // The most bytes of one message; below 2^31. Rounded down to a multiple of 64. A piece costs a meeting of sender and
  // receiver, and as long as it moves nobody looks at notices. Pieces that are combined on arrival are smaller
  // (payload_flows.h).
  int64_t piece_bytes = 4 << 20;
  // Pieces under way per peer and direction: a rank that takes pieces does not look at what it sends, so that its peer
  // must have enough of them ahead.
  int window = 8;
  // A digest follows the pieces to each peer and is compared before Exchange returns. Records always carry one.
  bool payload_digest = false;
};

// InvalidArgument when a number is out of range.
absl::Status CheckMessageOptions(const MessageOptions& options);
// Of the values, for the comparison between ranks.
uint64_t DigestOfMessageOptions(const MessageOptions& options);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_MESSAGE_OPTIONS_H_
