// One collective as data: an element of what Communicator::RunGrouped runs as one. Built by CallGroup (call_group.h).
#ifndef EVENKEEL_COMM_GROUPED_CALL_H_
#define EVENKEEL_COMM_GROUPED_CALL_H_

#include <cstdint>
#include <vector>

#include "evenkeel/comm/operation.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// The arguments of the method of Communicator that `operation` names; the others are left alone. Any collective that
// moves data: not a barrier, send or recv.
struct GroupedCall {
  Operation operation = Operation::kAllReduce;
  ConstTensorView send = {};
  TensorView recv = {};  // of a broadcast: its buffer
  ReduceOp reduce_op = ReduceOp::kSum;
  int root = 0;
  std::vector<int64_t> counts = {};       // of v-calls; of all_to_all_v the send counts
  std::vector<int64_t> recv_counts = {};  // of all_to_all_v
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_GROUPED_CALL_H_
