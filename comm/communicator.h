// Collectives over one group of ranks.
//
// Every call is made by all ranks of the group, in the same order. Before any
// byte moves the ranks compare a 64-byte fingerprint (operation, sequence,
// group, epoch, dtype, operator, root, counts digest, own status); when they
// differ, every rank returns the same error and no buffer has changed. Sums
// follow one fixed binary tree over the group rank (reduction.h), so all
// backends give the same bits; 16-bit inputs accumulate in f32 and round once;
// NaN wins in max and min.
//
//   std::unique_ptr<Communicator> tp =
//   backend->CreateGroup(mesh.GroupOf(Axis::kTp, rank)) ...;
//   tp->AllReduce(partial.view(), sum.view(), ReduceOp::kSum, *stream);
//
// Buffers are flat: only dtype and element count of a view matter. `send` and
// `recv` may be the very same memory where a method says "in place"; any other
// overlap is InvalidArgument. Counts may be 0; a null pointer is fine then.
//
// Errors, returned by the call on an inline stream and by the stream's
// Synchronize() on a worker stream:
//   InvalidArgument     this rank's own arguments (peers get FailedPrecondition naming this rank)
//   FailedPrecondition  the ranks disagree; nothing was transferred
//   ResourceExhausted   a rank has no memory for the call; nothing was transferred
//   DeadlineExceeded    peers absent, alive or unknown
//   Unavailable         a peer is known to be dead
//   Aborted             the group was broken before (carries the first cause)
// After any error the group is broken and stays so; create a new group (it gets
// a new epoch).
#ifndef EVENKEEL_COMM_COMMUNICATOR_H_
#define EVENKEEL_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/grouped_call.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/stragglers.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// One rank's handle on a group. All methods are collective over the group
// unless they say otherwise. Not thread-safe: one thread issues the calls of a
// handle at a time; on worker streams, all calls of one handle go to the same
// stream.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual const Group& group() const = 0;
  virtual int rank() const = 0;  // inside the group
  int size() const { return group().size(); }
  virtual int64_t epoch() const = 0;

  // recv[i] = op over ranks r of send_r[i]; n elements each. In place allowed.
  virtual absl::Status AllReduce(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) = 0;

  // recv = send_0, send_1, ... ; send has n elements on every rank, recv n *
  // size. In place: send is rank's n of recv.
  virtual absl::Status AllGather(ConstTensorView send, TensorView recv, Stream& stream) = 0;

  // As AllGather with counts[r] elements from rank r; counts is equal on all
  // ranks. In place likewise.
  virtual absl::Status AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                                  Stream& stream) = 0;

  // recv = op over ranks r of send_r[rank * n, (rank + 1) * n); send has n *
  // size elements, recv n. In place: recv is rank's n of send.
  virtual absl::Status ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) = 0;

  // As ReduceScatter with counts[r] elements for rank r; counts is equal on all
  // ranks.
  virtual absl::Status ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                                      ReduceOp op, Stream& stream) = 0;

  // Block j of send goes to rank j; block i of recv came from rank i. Both have
  // n * size elements. Not in place.
  virtual absl::Status AllToAll(ConstTensorView send, TensorView recv, Stream& stream) = 0;

  // As AllToAll with send_counts[j] elements to rank j and recv_counts[i]
  // elements from rank i, blocks back to back. Rank i's send_counts[j] must
  // equal rank j's recv_counts[i]: checked before bytes move, naming the pair.
  virtual absl::Status AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                                 absl::Span<const int64_t> recv_counts, Stream& stream) = 0;

  // buffer of rank `root` to all; n elements on every rank.
  virtual absl::Status Broadcast(TensorView buffer, int root, Stream& stream) = 0;

  // Returns when all ranks have called it.
  virtual absl::Status Barrier(Stream& stream) = 0;

  // Point to point, between two ranks of the group, matched in the order of
  // calls per pair. Not collective. Counts and dtypes must agree
  // (FailedPrecondition on both otherwise).
  virtual absl::Status Send(ConstTensorView send, int peer, Stream& stream) = 0;
  virtual absl::Status Recv(TensorView recv, int peer, Stream& stream) = 0;

  // Runs `calls` as one: CallGroup (call_group.h) builds them, and says what a group means. InvalidArgument naming the
  // number of the call when one has bad arguments, or two overlap in memory that one of them writes; FailedPrecondition
  // naming the first call in which the ranks differ. Before any error of this kind no buffer of any call has changed.
  virtual absl::Status RunGrouped(absl::Span<const GroupedCall> calls, Stream& stream) = 0;

  // Limit for every later call of this handle; must be positive and finite. Not
  // collective, but equal values are part of the fingerprint. Default: the
  // backend's.
  virtual absl::Status SetDeadline(absl::Duration deadline) = 0;

  // OK, or the first cause that broke the group. Local.
  virtual absl::Status status() const = 0;

  // By group rank: how often and how long this rank waited for it, inside the limits (stragglers.h). Local.
  // Thread-safe.
  virtual std::vector<StragglerCount> stragglers() const = 0;
};

// One rank's place in a world of ranks: makes groups. Thread-safe.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual absl::string_view name() const = 0;  // "in_process", "mpi", "sim", "nccl"
  virtual int rank() const = 0;                // world rank
  virtual int size() const = 0;                // world size
  virtual const Topology& topology() const = 0;
  virtual ByteLedger& ledger() = 0;

  // A new group with a new epoch; its members, and only they, call this, all
  // with an equal `group` and in an order that does not deadlock (all ranks
  // create their groups axis by axis). A group of one rank needs no peer and
  // never causes traffic. InvalidArgument when this rank is not a member or a
  // rank is out of range or doubled; FailedPrecondition when members disagree;
  // DeadlineExceeded naming the missing ranks.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> CreateGroup(const Group& group) = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_COMMUNICATOR_H_
