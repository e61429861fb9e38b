// A Backend that shows every call to an observer: the base of the recording, tracing and faulty decorators.
//
//   OperationLog log;
//   std::unique_ptr<Backend> watched = ObserveBackend(&world->backend(rank), &log);
#ifndef EVENKEEL_COMM_TESTING_OBSERVER_H_
#define EVENKEEL_COMM_TESTING_OBSERVER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/operation.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::comm {

// What a rank asked for.
struct CallInfo {
  Operation operation = Operation::kBarrier;
  const Group* group = nullptr;
  int rank = 0;  // inside the group
  int64_t epoch = 0;
  // As in messages: of the collectives of this group, from 0; of send and recv those between the two ranks.
  int64_t sequence = 0;
  std::optional<DType> dtype = std::nullopt;         // none for a barrier
  std::optional<ReduceOp> reduce_op = std::nullopt;  // of reductions
  int64_t send_elements = 0;
  int64_t recv_elements = 0;
  int peer = -1;              // root of a broadcast, peer of send and recv
  ConstTensorView send = {};  // what the call reads; of a broadcast: its buffer
  TensorView recv = {};       // what the call writes; of a broadcast: its buffer
  // Of grouped calls: each of them; nothing is set above but the operation and where it is made.
  std::vector<CallInfo> grouped = {};
};

// Thread-safety is the observer's own matter: one observer may watch several ranks.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  // Stands in for the call: runs `call` (or not) and returns what the caller is to see.
  virtual absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) = 0;
};

// A backend whose groups pass every call through `observer`. `inner` and `observer` outlive it and its groups. The
// observed backend has the name, ledger and topology of `inner`.
std::unique_ptr<Backend> ObserveBackend(Backend* inner, CallObserver* observer);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_OBSERVER_H_
