// Sends and receives that belong together: run as one, in an order in which no pattern of them can deadlock.
//
// Send and Recv of a communicator meet in the order of calls, so two ranks that both send first are an error. A group
// takes them in any order and runs them pair by pair, pairs in one order that is the same on all ranks, and inside a
// pair the lower rank's sends first. The n-th send of rank i to rank j meets the n-th receive of j from i.
//
//   SendRecvGroup group;
//   group.Send(mine.view(), (rank + 1) % size);                  // a ring: everybody sends and receives
//   group.Recv(theirs.view(), (rank + size - 1) % size);
//   EK_RETURN_IF_ERROR(group.Run(*communicator, *stream));
//
// Only ranks that have something to do with one another take part. Ranks that disagree (another number of calls,
// counts, dtypes) get the errors of Send and Recv.
#ifndef EVENKEEL_COMM_SEND_RECV_GROUP_H_
#define EVENKEEL_COMM_SEND_RECV_GROUP_H_

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// A value; may be run again and again. Not thread-safe.
class SendRecvGroup {
 public:
  // `peer` is a rank inside the group; to oneself is refused by Run. The views stay valid until the work is done.
  void Send(ConstTensorView send, int peer) { calls_.push_back({peer, true, send, TensorView()}); }
  void Recv(TensorView recv, int peer) { calls_.push_back({peer, false, ConstTensorView(), recv}); }

  // Enqueues everything. InvalidArgument when a peer is out of range or the own rank, before anything is sent; else the
  // first error of Send or Recv.
  absl::Status Run(Communicator& communicator, Stream& stream) const;

 private:
  struct Call {
    int peer = 0;
    bool is_send = false;
    ConstTensorView send;
    TensorView recv;
  };
  std::vector<Call> calls_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_SEND_RECV_GROUP_H_
