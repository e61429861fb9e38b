#include "evenkeel/comm/testing/observer.h"

#include <map>
#include <utility>
#include <vector>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class ObservedCommunicator final : public Communicator {
 public:
  ObservedCommunicator(std::unique_ptr<Communicator> inner, CallObserver* observer)
      : inner_(std::move(inner)), observer_(observer) {}

  const Group& group() const override { return inner_->group(); }
  int rank() const override { return inner_->rank(); }
  int64_t epoch() const override { return inner_->epoch(); }
  absl::Status SetDeadline(absl::Duration deadline) override { return inner_->SetDeadline(deadline); }
  absl::Status status() const override { return inner_->status(); }
  std::vector<StragglerCount> stragglers() const override { return inner_->stragglers(); }

  absl::Status AllReduce(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    CallInfo info = Exchange(Operation::kAllReduce, send, recv);
    info.reduce_op = op;
    return observer_->Around(info, stream, [&] { return inner_->AllReduce(send, recv, op, stream); });
  }
  absl::Status AllGather(ConstTensorView send, TensorView recv, Stream& stream) override {
    const CallInfo info = Exchange(Operation::kAllGather, send, recv);
    return observer_->Around(info, stream, [&] { return inner_->AllGather(send, recv, stream); });
  }
  absl::Status AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                          Stream& stream) override {
    const CallInfo info = Exchange(Operation::kAllGatherV, send, recv);
    return observer_->Around(info, stream, [&] { return inner_->AllGatherV(send, recv, counts, stream); });
  }
  absl::Status ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    CallInfo info = Exchange(Operation::kReduceScatter, send, recv);
    info.reduce_op = op;
    return observer_->Around(info, stream, [&] { return inner_->ReduceScatter(send, recv, op, stream); });
  }
  absl::Status ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts, ReduceOp op,
                              Stream& stream) override {
    CallInfo info = Exchange(Operation::kReduceScatterV, send, recv);
    info.reduce_op = op;
    return observer_->Around(info, stream, [&] { return inner_->ReduceScatterV(send, recv, counts, op, stream); });
  }
  absl::Status AllToAll(ConstTensorView send, TensorView recv, Stream& stream) override {
    const CallInfo info = Exchange(Operation::kAllToAll, send, recv);
    return observer_->Around(info, stream, [&] { return inner_->AllToAll(send, recv, stream); });
  }
  absl::Status AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                         absl::Span<const int64_t> recv_counts, Stream& stream) override {
    const CallInfo info = Exchange(Operation::kAllToAllV, send, recv);
    return observer_->Around(info, stream,
                             [&] { return inner_->AllToAllV(send, send_counts, recv, recv_counts, stream); });
  }
  absl::Status Broadcast(TensorView buffer, int root, Stream& stream) override {
    CallInfo info = Exchange(Operation::kBroadcast, buffer, buffer);
    info.peer = root;
    return observer_->Around(info, stream, [&] { return inner_->Broadcast(buffer, root, stream); });
  }
  absl::Status Barrier(Stream& stream) override {
    return observer_->Around(NewCall(Operation::kBarrier), stream, [&] { return inner_->Barrier(stream); });
  }
  absl::Status Send(ConstTensorView send, int peer, Stream& stream) override {
    const CallInfo info = PairCall(Operation::kSend, peer, send, TensorView(nullptr, send.dtype(), Shape({0})));
    return observer_->Around(info, stream, [&] { return inner_->Send(send, peer, stream); });
  }
  absl::Status Recv(TensorView recv, int peer, Stream& stream) override {
    const CallInfo info = PairCall(Operation::kRecv, peer, ConstTensorView(nullptr, recv.dtype(), Shape({0})), recv);
    return observer_->Around(info, stream, [&] { return inner_->Recv(recv, peer, stream); });
  }
  absl::Status RunGrouped(absl::Span<const GroupedCall> calls, Stream& stream) override {
    CallInfo info = NewCall(Operation::kGrouped);
    for (const GroupedCall& call : calls) info.grouped.push_back(Part(info, call));
    return observer_->Around(info, stream, [&] { return inner_->RunGrouped(calls, stream); });
  }

 private:
  static bool Reduces(Operation operation) {
    return operation == Operation::kAllReduce || operation == Operation::kReduceScatter ||
           operation == Operation::kReduceScatterV;
  }
  // One of grouped calls, as if it were made by itself.
  static CallInfo Part(CallInfo where, const GroupedCall& call) {
    where.grouped.clear();
    where.operation = call.operation;
    const bool is_broadcast = call.operation == Operation::kBroadcast;
    if (is_broadcast) where.peer = call.root;
    if (Reduces(call.operation)) where.reduce_op = call.reduce_op;
    return WithData(std::move(where), is_broadcast ? ConstTensorView(call.recv) : call.send, call.recv);
  }
  CallInfo NewCall(Operation operation) { return NumberedCall(operation, &sequence_); }
  CallInfo NumberedCall(Operation operation, int64_t* sequence) {
    return {.operation = operation, .group = &group(), .rank = rank(), .epoch = epoch(), .sequence = (*sequence)++};
  }
  CallInfo Exchange(Operation operation, const ConstTensorView& send, const TensorView& recv) {
    return WithData(NewCall(operation), send, recv);
  }
  CallInfo PairCall(Operation operation, int peer, const ConstTensorView& send, const TensorView& recv) {
    CallInfo info = WithData(NumberedCall(operation, &pair_sequences_[peer]), send, recv);
    info.peer = peer;
    return info;
  }
  static CallInfo WithData(CallInfo info, const ConstTensorView& send, const TensorView& recv) {
    info.dtype = recv.dtype();
    info.send_elements = send.num_elements();
    info.recv_elements = recv.num_elements();
    info.send = send;
    info.recv = recv;
    return info;
  }

  const std::unique_ptr<Communicator> inner_;
  CallObserver* const observer_;
  int64_t sequence_ = 0;
  std::map<int, int64_t> pair_sequences_;  // by peer, also one that is none
};

class ObservedBackend final : public Backend {
 public:
  ObservedBackend(Backend* inner, CallObserver* observer) : inner_(inner), observer_(observer) {}
  absl::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const Topology& topology() const override { return inner_->topology(); }
  ByteLedger& ledger() override { return inner_->ledger(); }
  absl::StatusOr<std::unique_ptr<Communicator>> CreateGroup(const Group& group) override {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made, inner_->CreateGroup(group));
    return std::make_unique<ObservedCommunicator>(std::move(made), observer_);
  }

 private:
  Backend* const inner_;
  CallObserver* const observer_;
};

}  // namespace

std::unique_ptr<Backend> ObserveBackend(Backend* inner, CallObserver* observer) {
  return std::make_unique<ObservedBackend>(inner, observer);
}

}  // namespace evenkeel::comm
