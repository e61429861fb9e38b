// Calls that belong together, run as one.
//
//   CallGroup group;
//   group.AllGather(weights.view(), gathered_weights.view());
//   group.AllGather(biases.view(), gathered_biases.view());
//   group.Send(mine.view(), (rank + 1) % size);
//   group.Recv(theirs.view(), (rank + size - 1) % size);
//   EK_RETURN_IF_ERROR(group.Run(*communicator, *stream));
//
// Collectives: one agreement for all of them, so that either every call of the group moves its bytes or no buffer of
// any has changed; and one message to each peer for all that is small, so that many small calls cost about as much as
// one. All ranks add equal collectives in the same order. Results have the bits of the calls made one by one. The
// calls of a group may run in any order: none may write memory that another reads or writes.
//
// Sends and receives: in any order, and only ranks that have something to do with one another take part. They run after
// the collectives, pair by pair, pairs in one order that is the same on all ranks and inside a pair the lower rank's
// sends first, so that no pattern of them can deadlock. The n-th send of rank i to rank j meets the n-th receive of j
// from i.
#ifndef EVENKEEL_COMM_CALL_GROUP_H_
#define EVENKEEL_COMM_CALL_GROUP_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// A value; may be run again and again. The views stay valid until the work is done. Not thread-safe.
class CallGroup {
 public:
  // As the methods of Communicator, which say what is allowed.
  void AllReduce(ConstTensorView send, TensorView recv, ReduceOp op);
  void AllGather(ConstTensorView send, TensorView recv);
  void AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts);
  void ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op);
  void ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts, ReduceOp op);
  void AllToAll(ConstTensorView send, TensorView recv);
  void AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                 absl::Span<const int64_t> recv_counts);
  void Broadcast(TensorView buffer, int root);
  // `peer` is another rank inside the group.
  void Send(ConstTensorView send, int peer) { pair_calls_.push_back({peer, true, send, TensorView()}); }
  void Recv(TensorView recv, int peer) { pair_calls_.push_back({peer, false, ConstTensorView(), recv}); }

  // The collectives, in the order in which they were added.
  absl::Span<const GroupedCall> collectives() const { return collectives_; }

  // Enqueues everything. InvalidArgument when a peer is out of range or the own rank, before anything is sent; else the
  // errors of RunGrouped, which name the call by its number, then those of Send and Recv. A group without collectives
  // makes none.
  absl::Status Run(Communicator& communicator, Stream& stream) const;

 private:
  struct PairCall {
    int peer = 0;
    bool is_send = false;
    ConstTensorView send;
    TensorView recv;
  };
  absl::Status RunPairCalls(Communicator& communicator, Stream& stream) const;

  std::vector<GroupedCall> collectives_;
  std::vector<PairCall> pair_calls_;
};

// Makes one call of a group by itself: how a Communicator without a better way runs them.
absl::Status RunOne(const GroupedCall& call, Communicator& communicator, Stream& stream);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_CALL_GROUP_H_
