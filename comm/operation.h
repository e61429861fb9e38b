// What a rank can ask of its group.
#ifndef EVENKEEL_COMM_OPERATION_H_
#define EVENKEEL_COMM_OPERATION_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// The values travel in fingerprints: append only.
enum class Operation : uint8_t {
  kAllReduce = 0,
  kAllGather = 1,
  kAllGatherV = 2,
  kReduceScatter = 3,
  kReduceScatterV = 4,
  kAllToAll = 5,
  kAllToAllV = 6,
  kBroadcast = 7,
  kBarrier = 8,
  kSend = 9,
  kRecv = 10,
  kCreateGroup = 11,
  kGrouped = 12,
};
inline constexpr int kNumOperations = 13;
// "all_reduce", "all_gather", ...
absl::string_view OperationName(Operation operation);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_OPERATION_H_
