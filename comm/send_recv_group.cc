#include "evenkeel/comm/send_recv_group.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {

absl::Status SendRecvGroup::Run(Communicator& communicator, Stream& stream) const {
  const int rank = communicator.rank();
  for (const Call& call : calls_) {
    if (call.peer >= 0 && call.peer < communicator.size() && call.peer != rank) continue;
    ErrorContext where{.module = "comm", .operation = "send_recv_group", .group = communicator.group().name};
    where.epoch = communicator.epoch();
    where.rank = rank;
    where.size = communicator.size();
    return MakeError(absl::StatusCode::kInvalidArgument, where, absl::StrCat("peer ", call.peer, " is no other rank"));
  }
  // Every rank meets its pairs in the one order (lower rank, higher rank, direction): a wait is always for a call that
  // comes earlier in that order, so no cycle of waits can close.
  std::vector<const Call*> order;
  for (const Call& call : calls_) order.push_back(&call);
  auto key = [rank](const Call& call) {
    const bool from_lower = (rank < call.peer) == call.is_send;
    return std::tuple(std::min(rank, call.peer), std::max(rank, call.peer), from_lower ? 0 : 1);
  };
  std::stable_sort(order.begin(), order.end(), [&key](const Call* a, const Call* b) { return key(*a) < key(*b); });
  for (const Call* call : order) {
    EK_RETURN_IF_ERROR(call->is_send ? communicator.Send(call->send, call->peer, stream)
                                     : communicator.Recv(call->recv, call->peer, stream));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
