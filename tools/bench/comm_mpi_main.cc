// One MPI rank of the comm benchmark: does what //tools/bench:comm tells it, and sleeps in between.
//
//   mpirun -n 4 comm_mpi NAME     (started by the benchmark, see mpi_ranks.h)
#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <memory>
#include <utility>

#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/tools/bench/comm_rows.h"

namespace evenkeel::bench {
namespace {

class RankOfJob {
 public:
  explicit RankOfJob(comm::Backend& world) : device_(HostDevice::Create()) {
    stream_ = *device_->CreateStream("bench");
    group_ = *world.CreateGroup(comm::WorldGroup(world.size()));
    MPI_Comm_dup(MPI_COMM_WORLD, &raw_);
  }

  // Returns the seconds of the slowest rank, on rank 0.
  double Run(const WindowOrder& order) {
    const int64_t n = order.bytes / 4;
    Reserve(BufferElements(order.op, order.bytes, group_->size()));
    Call(order, n);
    MPI_Barrier(raw_);
    const double begin = MPI_Wtime();
    for (int64_t i = 0; i < order.calls; ++i) Call(order, n);
    const double seconds = MPI_Wtime() - begin;
    double slowest = 0;
    MPI_Reduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, raw_);
    return slowest;
  }

 private:
  void Reserve(int64_t elements) {
    for (Tensor* buffer : {&send_, &recv_}) {
      if (buffer->view().raw() != nullptr && buffer->view().num_elements() >= elements) continue;
      auto larger = Tensor::Zeros(device_.get(), DType::kF32, Shape({elements}));
      EK_CHECK_OK(larger);
      *buffer = *std::move(larger);
    }
  }

  void Call(const WindowOrder& order, int64_t n) {
    if (order.kind == Kind::kMpi) {
      EK_CHECK_OK(CallOurs(order.op, n));
    } else {
      CallRaw(order.op, static_cast<int>(n));
    }
  }

  absl::Status CallOurs(Op op, int64_t n) {
    const int64_t all = n * group_->size();
    const auto in = [this](int64_t count) { return send_.view().Rows(0, count); };
    const auto out = [this](int64_t count) { return recv_.view().Rows(0, count); };
    switch (op) {
      case Op::kAllGather:
        return group_->AllGather(in(n), out(all), *stream_);
      case Op::kAllToAll:
        return group_->AllToAll(in(all), out(all), *stream_);
      case Op::kReduceScatter:
        return group_->ReduceScatter(in(all), out(n), comm::ReduceOp::kSum, *stream_);
      case Op::kAllReduce:
        return group_->AllReduce(in(n), out(n), comm::ReduceOp::kSum, *stream_);
      case Op::kBarrier:
        return group_->Barrier(*stream_);
      case Op::kAllGatherX16:
        for (int i = 0; i < kX16; ++i) {
          EK_RETURN_IF_ERROR(group_->AllGather(send_.view().Rows(i * n, n), recv_.view().Rows(i * all, all), *stream_));
        }
        return absl::OkStatus();
      case Op::kGroupedX16: {
        comm::CallGroup calls;
        for (int i = 0; i < kX16; ++i) {
          calls.AllGather(send_.view().Rows(i * n, n), recv_.view().Rows(i * all, all));
        }
        return calls.Run(*group_, *stream_);
      }
    }
    return absl::OkStatus();
  }

  // The blocking calls of MPI, its own reductions included, on the same memory.
  void CallRaw(Op op, int n) {
    const float* send = send_.data<float>();
    float* recv = recv_.data<float>();
    switch (op) {
      case Op::kAllGather:
        MPI_Allgather(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, raw_);
        break;
      case Op::kAllToAll:
        MPI_Alltoall(send, n, MPI_FLOAT, recv, n, MPI_FLOAT, raw_);
        break;
      case Op::kReduceScatter:
        MPI_Reduce_scatter_block(send, recv, n, MPI_FLOAT, MPI_SUM, raw_);
        break;
      case Op::kAllReduce:
        MPI_Allreduce(send, recv, n, MPI_FLOAT, MPI_SUM, raw_);
        break;
      case Op::kBarrier:
        MPI_Barrier(raw_);
        break;
      case Op::kAllGatherX16:
        for (int i = 0; i < kX16; ++i) {
          MPI_Allgather(send + int64_t{i} * n, n, MPI_FLOAT, recv + int64_t{i} * n * group_->size(), n, MPI_FLOAT,
                        raw_);
        }
        break;
      case Op::kGroupedX16:
        break;
    }
  }

  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<comm::Communicator> group_;
  MPI_Comm raw_ = MPI_COMM_NULL;
  Tensor send_, recv_;
};

// `name` is that of a socket without a file.
int Connect(const char* name) {
  const int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const int length = std::snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, "%s", name);
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(length));
  if (length < static_cast<int>(sizeof(address.sun_path)) - 1 &&
      connect(connection, reinterpret_cast<sockaddr*>(&address), bytes) == 0) {
    return connection;
  }
  close(connection);
  return -1;
}

int Main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: mpirun -n RANKS comm_mpi NAME; started by //tools/bench:comm\n");
    return 2;
  }
  auto world = comm::MpiBackend::Create({});
  EK_CHECK_OK(world);
  const int32_t rank = (*world)->rank();
  const int connection = Connect(argv[1]);
  if (connection < 0 || send(connection, &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank)) return 3;
  {
    RankOfJob self(**world);
    WindowOrder order;
    while (recv(connection, &order, sizeof(order), MSG_WAITALL) == sizeof(order)) {
      const double seconds = self.Run(order);
      if (rank == 0 && send(connection, &seconds, sizeof(seconds), MSG_NOSIGNAL) != sizeof(seconds)) break;
    }
  }
  close(connection);
  return 0;
}

}  // namespace
}  // namespace evenkeel::bench

int main(int argc, char** argv) { return evenkeel::bench::Main(argc, argv); }
