// Walks a schedule: allocates, runs one action after the other, frees. Nothing here knows an order's name.
//
//   OrderExecutor executor({.program = typed.forward, .schedule = schedules.forward, ...}, device, stream);
//   EK_RETURN_IF_ERROR(executor.Run(x, y));
#ifndef EVENKEEL_MOE_ORDER_EXECUTOR_H_
#define EVENKEEL_MOE_ORDER_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/dedup_plan.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/row_maps.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// Index lists on the heap, so that queued work may read them as long as the tape lives.
class IndexPool {
 public:
  using Index = std::shared_ptr<const std::vector<int32_t>>;
  // The list of that key, made once.
  Index Get(const std::string& key, const std::function<std::vector<int32_t>()>& make);
  // Likewise, of rows to be summed by the tree.
  const RowLists& Sums(const std::string& key, const std::function<RowLists()>& make);

 private:
  std::map<std::string, Index> lists_;
  std::map<std::string, std::unique_ptr<const RowLists>> sums_;
};

// What a run is given. Everything outlives the queued work.
struct ExecutorInput {
  const std::vector<TypedStep>* program = nullptr;
  const Schedule* schedule = nullptr;
  const RowMaps* maps = nullptr;
  comm::Communicator* tp = nullptr;  // null: group of one
  comm::Communicator* ep = nullptr;
  comm::Communicator* control_tp = nullptr;  // for rows of merged lanes
  comm::Communicator* ep_node = nullptr;     // of orders that exchange by level
  comm::Communicator* ep_peers = nullptr;
  // For exchanges and what regroups their rows; null: they go on the executor's stream like everything else.
  Stream* exchange_stream = nullptr;
  std::vector<std::unique_ptr<Event>>* events = nullptr;  // keeps events alive; with exchange_stream
  ExpertShape experts;
  ExpertWeights weights;
  ExpertGradients gradients;         // backward only
  ConstTensorView route_weights;     // [routes] f32, of all tokens
  TensorView route_weight_gradient;  // [routes] f32, zeroed; backward only
  TensorView fold_weight_gradient;   // [entries of the fold's lists] f32; backward of deduplicated orders only
  // Called after each step with the program's index and the value.
  std::function<void(int step, ConstTensorView value)> observer;
};

// One run of one direction. Not thread-safe.
class OrderExecutor {
 public:
  OrderExecutor(ExecutorInput input, Device* device, IndexPool* indices, Stream* stream)
      : in_(std::move(input)), device_(device), indices_(indices), stream_(*stream) {}

  // Hands a buffer of the schedule in (the backward's tape), or takes one out after Run (the forward's).
  void Give(int buffer, Tensor tensor);
  Tensor Take(int buffer) { return std::move(buffers_[buffer]); }

  // Runs all actions on the caller's input and output. On an error, waits for what was queued.
  absl::Status Run(ConstTensorView input, TensorView output);

 private:
  absl::Status RunAll();
  absl::Status RunAction(const Action& action);
  absl::Status Allocate(int buffer);
  absl::Status Release(int buffer, Stream& stream);
  Stream& StreamOf(const Action& action);
  // Edges between the two streams, where there are two.
  absl::Status WaitForExchanges(const Action& action);
  absl::Status BeginExchange();
  absl::Status EndExchange(int buffer);

  absl::Status Dispatch(const Action& action);
  absl::Status DispatchTransposed(const Action& action);
  absl::Status Combine(const Action& action);
  absl::Status CombineTransposed(const Action& action);
  absl::Status Permute(const Action& action);
  absl::Status Regroup(const Action& action);
  absl::Status Expand(const Action& action);
  absl::Status FoldTransposed(const Action& action);
  absl::Status Experts(const Action& action);
  // The backward of all rows of this rank's experts on the lanes of its TP group.
  absl::Status MergedExpertsBackward(const Action& action, const ExpertShape& shape, const ExpertWeights& weights,
                                     const ExpertGradients& gradients, ExpertWork work);
  absl::Status Gather(const Action& action);
  absl::Status ReduceScatter(const Action& action);
  absl::Status Exchange(const Action& action);

  ConstTensorView Read(const RowsRef& ref) const;
  TensorView Write(const RowsRef& ref) const;
  TensorView Work(int buffer) const;
  TensorView ScratchView(int buffer) const;
  // Elements that each lane has of a value, where lanes may differ.
  std::vector<int64_t> LaneCounts(const Action& action) const;
  // The sum of a token's rows in the canonical tree over expert ids.
  absl::Status SumOverExperts(const Action& action, const RowsRef& rows, bool weighted);
  // Routes [first, first + tokens) of combine's own tokens: a window of a per-route array.
  std::pair<int64_t, int64_t> RouteWindow(const ValueType& rows) const;
  ConstTensorView IndexView(absl::string_view map, const ValueType& type, const RowNesting& from, const RowNesting& to,
                            const std::function<std::vector<int32_t>()>& make, Shape shape);

  ExecutorInput in_;
  Device* device_;
  IndexPool* indices_;
  Stream& stream_;
  std::vector<Tensor> buffers_;
  std::vector<std::vector<Event*>> arriving_;  // by buffer: exchanges that still write it
  ConstTensorView input_;
  TensorView output_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_EXECUTOR_H_
