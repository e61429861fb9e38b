#include "evenkeel/comm/operation.h"

namespace evenkeel::comm {

absl::string_view OperationName(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "all_reduce";
    case Operation::kAllGather:
      return "all_gather";
    case Operation::kAllGatherV:
      return "all_gather_v";
    case Operation::kReduceScatter:
      return "reduce_scatter";
    case Operation::kReduceScatterV:
      return "reduce_scatter_v";
    case Operation::kAllToAll:
      return "all_to_all";
    case Operation::kAllToAllV:
      return "all_to_all_v";
    case Operation::kBroadcast:
      return "broadcast";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kSend:
      return "send";
    case Operation::kRecv:
      return "recv";
    case Operation::kCreateGroup:
      return "create_group";
    case Operation::kGrouped:
      return "grouped";
  }
  return "unknown";
}

}  // namespace evenkeel::comm
