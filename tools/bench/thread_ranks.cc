#include "evenkeel/tools/bench/thread_ranks.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "gloo/allgather.h"
#include "gloo/allreduce.h"
#include "gloo/alltoall.h"
#include "gloo/math.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/hash_store.h"
#include "gloo/transport/tcp/device.h"

namespace evenkeel::bench {
namespace {

class Impl final : public ThreadRanks {
 public:
  explicit Impl(int ranks) : ranks_(ranks), send_(ranks), recv_(ranks), groups_(ranks) {
    for (int rank = 0; rank < ranks; ++rank) devices_.push_back(HostDevice::Create());
    auto world = comm::InProcessWorld::Create({.world_size = ranks});
    EK_CHECK_OK(world);
    world_ = *std::move(world);
    OnAllRanks([this](int rank) {
      auto group = world_->backend(rank).CreateGroup(comm::WorldGroup(ranks_));
      EK_CHECK_OK(group);
      groups_[rank] = *std::move(group);
    });
  }

  double Run(Kind kind, Op op, int64_t bytes, int64_t calls) override {
    const int64_t elements = BufferElements(op, bytes, ranks_);
    for (auto* buffers : {&send_, &recv_}) {
      for (int rank = 0; rank < ranks_; ++rank) {
        Tensor& buffer = (*buffers)[rank];
        if (buffer.view().raw() != nullptr && buffer.view().num_elements() >= elements) continue;
        auto larger = Tensor::Zeros(devices_[rank].get(), DType::kF32, Shape({elements}));
        EK_CHECK_OK(larger);
        buffer = *std::move(larger);
      }
    }
    if (kind == Kind::kGloo && gloo_.empty()) ConnectGloo();
    std::barrier start(ranks_);
    std::vector<double> seconds(ranks_);
    OnAllRanks([&](int rank) {
      const std::function<void()> call = MakeCall(kind, op, rank, bytes / 4);
      call();  // first use of memory
      start.arrive_and_wait();
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < calls; ++i) call();
      seconds[rank] = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    });
    return *std::max_element(seconds.begin(), seconds.end());
  }

 private:
  void OnAllRanks(const std::function<void(int)>& body) const {
    std::vector<std::thread> threads;
    for (int rank = 1; rank < ranks_; ++rank) threads.emplace_back(body, rank);
    body(0);
    for (std::thread& thread : threads) thread.join();
  }

  // Gloo's own transport, over the loopback interface.
  void ConnectGloo() {
    gloo_.resize(ranks_);
    gloo::rendezvous::HashStore store;
    OnAllRanks([this, &store](int rank) {
      gloo::transport::tcp::attr address;
      address.hostname = "localhost";
      std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(address);
      auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks_);
      context->connectFullMesh(store, device);
      gloo_[rank] = std::move(context);
    });
  }

  std::function<void()> MakeCall(Kind kind, Op op, int rank, int64_t n) {
    if (kind == Kind::kCopy) return [this, op, rank, n] { Copy(op, rank, n); };
    if (kind == Kind::kGloo) return [this, op, rank, n] { CallGloo(op, rank, static_cast<size_t>(n)); };
    std::shared_ptr<Stream> stream = *devices_[rank]->CreateStream("bench");
    return [this, op, rank, n, stream] { EK_CHECK_OK(CallInProcess(op, rank, n, *stream)); };
  }

  absl::Status CallInProcess(Op op, int rank, int64_t n, Stream& stream) {
    comm::Communicator& group = *groups_[rank];
    const auto in = [&](int64_t count) { return send_[rank].view().Rows(0, count); };
    const auto out = [&](int64_t count) { return recv_[rank].view().Rows(0, count); };
    switch (op) {
      case Op::kAllGather:
        return group.AllGather(in(n), out(n * ranks_), stream);
      case Op::kAllToAll:
        return group.AllToAll(in(n * ranks_), out(n * ranks_), stream);
      case Op::kReduceScatter:
        return group.ReduceScatter(in(n * ranks_), out(n), comm::ReduceOp::kSum, stream);
      case Op::kAllReduce:
        return group.AllReduce(in(n), out(n), comm::ReduceOp::kSum, stream);
      case Op::kBarrier:
        return group.Barrier(stream);
      case Op::kAllGatherX16:
        for (int i = 0; i < kX16; ++i) {
          EK_RETURN_IF_ERROR(group.AllGather(send_[rank].view().Rows(i * n, n),
                                             recv_[rank].view().Rows(i * n * ranks_, n * ranks_), stream));
        }
        return absl::OkStatus();
      case Op::kGroupedX16: {
        comm::CallGroup calls;
        for (int i = 0; i < kX16; ++i) {
          calls.AllGather(send_[rank].view().Rows(i * n, n), recv_[rank].view().Rows(i * n * ranks_, n * ranks_));
        }
        return calls.Run(group, stream);
      }
    }
    return absl::OkStatus();
  }

  void Copy(Op op, int rank, int64_t n) {
    for (int step = 0; step < ranks_; ++step) {  // the own block too: the collective copies it as well
      const int from = (rank + step) % ranks_;
      const float* const source = send_[from].data<float>() + (op == Op::kAllToAll ? rank * n : 0);
      std::memcpy(recv_[rank].data<float>() + from * n, source, static_cast<size_t>(n) * 4);
    }
    benchmark::ClobberMemory();
  }

  void CallGloo(Op op, int rank, size_t n) {
    float* const send = send_[rank].data<float>();
    float* const recv = recv_[rank].data<float>();
    if (op == Op::kAllGather) {
      gloo::AllgatherOptions options(gloo_[rank]);
      options.setInput(send, n);
      options.setOutput(recv, n * ranks_);
      gloo::allgather(options);
    } else if (op == Op::kAllToAll) {
      gloo::AlltoallOptions options(gloo_[rank]);
      options.setInput(send, n * ranks_);
      options.setOutput(recv, n * ranks_);
      gloo::alltoall(options);
    } else {
      gloo::AllreduceOptions options(gloo_[rank]);
      options.setInput(send, n);
      options.setOutput(recv, n);
      options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
      gloo::allreduce(options);
    }
  }

  const int ranks_;
  std::vector<std::unique_ptr<HostDevice>> devices_;  // by rank: a device counts its work in one place
  std::vector<Tensor> send_, recv_;                   // by rank
  std::unique_ptr<comm::InProcessWorld> world_;
  std::vector<std::unique_ptr<comm::Communicator>> groups_;
  std::vector<std::shared_ptr<gloo::rendezvous::Context>> gloo_;
};

}  // namespace

std::unique_ptr<ThreadRanks> ThreadRanks::Create(int ranks) { return std::make_unique<Impl>(ranks); }

}  // namespace evenkeel::bench
