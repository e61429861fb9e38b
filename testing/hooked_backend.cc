#include "evenkeel/testing/hooked_backend.h"

#include <map>
#include <string>
#include <utility>

#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::testutil {
namespace {

using comm::Communicator;
using comm::ReduceOp;

class HookedCommunicator final : public Communicator {
 public:
  HookedCommunicator(std::unique_ptr<Communicator> real, int world_rank, CommHook hook)
      : real_(std::move(real)), world_rank_(world_rank), hook_(std::move(hook)) {}

  const comm::Group& group() const override { return real_->group(); }
  int rank() const override { return real_->rank(); }
  int64_t epoch() const override { return real_->epoch(); }

  absl::Status AllReduce(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->AllReduce(send, recv, op, stream));
    return Hook("all_reduce", recv);
  }
  absl::Status AllGather(ConstTensorView send, TensorView recv, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->AllGather(send, recv, stream));
    return Hook("all_gather", recv);
  }
  absl::Status AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                          Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->AllGatherV(send, recv, counts, stream));
    return Hook("all_gather_v", recv);
  }
  absl::Status ReduceScatter(ConstTensorView send, TensorView recv, ReduceOp op, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->ReduceScatter(send, recv, op, stream));
    return Hook("reduce_scatter", recv);
  }
  absl::Status ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts, ReduceOp op,
                              Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->ReduceScatterV(send, recv, counts, op, stream));
    return Hook("reduce_scatter_v", recv);
  }
  absl::Status AllToAll(ConstTensorView send, TensorView recv, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->AllToAll(send, recv, stream));
    return Hook("all_to_all", recv);
  }
  absl::Status AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                         absl::Span<const int64_t> recv_counts, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->AllToAllV(send, send_counts, recv, recv_counts, stream));
    return Hook("all_to_all_v", recv);
  }
  absl::Status Broadcast(TensorView buffer, int root, Stream& stream) override {
    EK_RETURN_IF_ERROR(real_->Broadcast(buffer, root, stream));
    return Hook("broadcast", buffer);
  }
  absl::Status Barrier(Stream& stream) override { return real_->Barrier(stream); }
  absl::Status Send(ConstTensorView send, int peer, Stream& stream) override { return real_->Send(send, peer, stream); }
  absl::Status Recv(TensorView recv, int peer, Stream& stream) override { return real_->Recv(recv, peer, stream); }
  absl::Status SetDeadline(absl::Duration deadline) override { return real_->SetDeadline(deadline); }
  absl::Status status() const override { return real_->status(); }

 private:
  absl::Status Hook(const char* operation, const TensorView& received) {
    hook_({operation, real_->group(), world_rank_, numbers_[operation]++, received});
    return absl::OkStatus();
  }

  const std::unique_ptr<Communicator> real_;
  const int world_rank_;
  const CommHook hook_;
  std::map<std::string, int64_t> numbers_;
};

}  // namespace

HookedBackend::HookedBackend(comm::Backend& real, CommHook hook) : real_(real), hook_(std::move(hook)) {}

absl::StatusOr<std::unique_ptr<Communicator>> HookedBackend::CreateGroup(const comm::Group& group) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made, real_.CreateGroup(group));
  return std::unique_ptr<Communicator>(new HookedCommunicator(std::move(made), real_.rank(), hook_));
}

}  // namespace evenkeel::testutil
