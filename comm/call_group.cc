#include "evenkeel/comm/call_group.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

std::vector<int64_t> Copy(absl::Span<const int64_t> counts) { return {counts.begin(), counts.end()}; }

}  // namespace

void CallGroup::AllReduce(ConstTensorView send, TensorView recv, ReduceOp op) {
  collectives_.push_back({.operation = Operation::kAllReduce, .send = send, .recv = recv, .reduce_op = op});
}
void CallGroup::AllGather(ConstTensorView send, TensorView recv) {
  collectives_.push_back({.operation = Operation::kAllGather, .send = send, .recv = recv});
}
void CallGroup::AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts) {
  collectives_.push_back({.operation = Operation::kAllGatherV, .send = send, .recv = recv, .counts = Copy(counts)});
}
void CallGroup::ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op) {
  collectives_.push_back({.operation = Operation::kReduceScatter, .send = send, .recv = recv, .reduce_op = op});
}
void CallGroup::ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts, ReduceOp op) {
  collectives_.push_back(
      {.operation = Operation::kReduceScatterV, .send = send, .recv = recv, .reduce_op = op, .counts = Copy(counts)});
}
void CallGroup::AllToAll(ConstTensorView send, TensorView recv) {
  collectives_.push_back({.operation = Operation::kAllToAll, .send = send, .recv = recv});
}
void CallGroup::AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                          absl::Span<const int64_t> recv_counts) {
  collectives_.push_back({.operation = Operation::kAllToAllV,
                          .send = send,
                          .recv = recv,
                          .counts = Copy(send_counts),
                          .recv_counts = Copy(recv_counts)});
}
void CallGroup::Broadcast(TensorView buffer, int root) {
  collectives_.push_back({.operation = Operation::kBroadcast, .recv = buffer, .root = root});
}

absl::Status CallGroup::Run(Communicator& communicator, Stream& stream) const {
  for (const PairCall& call : pair_calls_) {
    if (call.peer >= 0 && call.peer < communicator.size() && call.peer != communicator.rank()) continue;
    ErrorContext where{.module = "comm", .operation = "grouped", .group = communicator.group().name};
    where.epoch = communicator.epoch();
    where.rank = communicator.rank();
    where.size = communicator.size();
    return MakeError(absl::StatusCode::kInvalidArgument, where, absl::StrCat("peer ", call.peer, " is no other rank"));
  }
  if (!collectives_.empty()) EK_RETURN_IF_ERROR(communicator.RunGrouped(collectives_, stream));
  return RunPairCalls(communicator, stream);
}

// Every rank meets its pairs in the one order (lower rank, higher rank, direction): a wait is always for a call that
// comes earlier in that order, so no cycle of waits can close.
absl::Status CallGroup::RunPairCalls(Communicator& communicator, Stream& stream) const {
  std::vector<const PairCall*> order;
  for (const PairCall& call : pair_calls_) order.push_back(&call);
  const auto key = [rank = communicator.rank()](const PairCall& call) {
    const bool from_lower = (rank < call.peer) == call.is_send;
    return std::tuple(std::min(rank, call.peer), std::max(rank, call.peer), from_lower ? 0 : 1);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&key](const PairCall* a, const PairCall* b) { return key(*a) < key(*b); });
  for (const PairCall* call : order) {
    EK_RETURN_IF_ERROR(call->is_send ? communicator.Send(call->send, call->peer, stream)
                                     : communicator.Recv(call->recv, call->peer, stream));
  }
  return absl::OkStatus();
}

absl::Status RunOne(const GroupedCall& call, Communicator& communicator, Stream& stream) {
  switch (call.operation) {
    case Operation::kAllReduce:
      return communicator.AllReduce(call.send, call.recv, call.reduce_op, stream);
    case Operation::kAllGather:
      return communicator.AllGather(call.send, call.recv, stream);
    case Operation::kAllGatherV:
      return communicator.AllGatherV(call.send, call.recv, call.counts, stream);
    case Operation::kReduceScatter:
      return communicator.ReduceScatter(call.send, call.recv, call.reduce_op, stream);
    case Operation::kReduceScatterV:
      return communicator.ReduceScatterV(call.send, call.recv, call.counts, call.reduce_op, stream);
    case Operation::kAllToAll:
      return communicator.AllToAll(call.send, call.recv, stream);
    case Operation::kAllToAllV:
      return communicator.AllToAllV(call.send, call.counts, call.recv, call.recv_counts, stream);
    case Operation::kBroadcast:
      return communicator.Broadcast(call.recv, call.root, stream);
    default:
      return absl::InvalidArgumentError(absl::StrCat(OperationName(call.operation), " cannot be grouped"));
  }
}

}  // namespace evenkeel::comm
