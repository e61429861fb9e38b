// What an order in chunks gains where links take time: two ranks as threads, worker streams, and links of a given
// speed.
//
// exchange rows: wall time of one forward and backward. `link_ms` is the time that exchanges spend on the link on one
// rank: its stream sleeps for latency and bytes over bandwidth behind each, as a network would take it without the
// processor. Of that time an order in chunks hides what passes beside the experts of another chunk.
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"

extern "C" void omp_set_num_threads(int);

namespace evenkeel::moe {
namespace {

constexpr int kRanks = 2, kExperts = 8, kTopK = 2;
constexpr int64_t kTokens = 512, kHidden = 256, kFfn = 1024;
constexpr absl::Duration kLatency = absl::Microseconds(50);

// A group whose exchanges take the time of a link. Everything else passes through.
class LinkedGroup final : public comm::Communicator {
 public:
  LinkedGroup(std::unique_ptr<comm::Communicator> group, double bytes_per_second)
      : group_(std::move(group)), bytes_per_second_(bytes_per_second) {}

  absl::Duration on_link() const { return absl::Nanoseconds(nanoseconds_.load()); }

  const comm::Group& group() const override { return group_->group(); }
  int rank() const override { return group_->rank(); }
  int64_t epoch() const override { return group_->epoch(); }
  absl::Status AllToAll(ConstTensorView send, TensorView recv, Stream& stream) override {
    EK_RETURN_IF_ERROR(group_->AllToAll(send, recv, stream));
    return Pass(send.num_bytes() / size() * (size() - 1), stream);
  }
  absl::Status AllToAllV(ConstTensorView send, absl::Span<const int64_t> send_counts, TensorView recv,
                         absl::Span<const int64_t> recv_counts, Stream& stream) override {
    EK_RETURN_IF_ERROR(group_->AllToAllV(send, send_counts, recv, recv_counts, stream));
    int64_t elements = 0;
    for (int r = 0; r < size(); ++r) elements += r == rank() ? 0 : send_counts[r];
    return Pass(elements * SizeOf(send.dtype()), stream);
  }
  absl::Status AllReduce(ConstTensorView send, TensorView recv, comm::ReduceOp op, Stream& stream) override {
    return group_->AllReduce(send, recv, op, stream);
  }
  absl::Status AllGather(ConstTensorView send, TensorView recv, Stream& stream) override {
    return group_->AllGather(send, recv, stream);
  }
  absl::Status AllGatherV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                          Stream& stream) override {
    return group_->AllGatherV(send, recv, counts, stream);
  }
  absl::Status ReduceScatter(ConstTensorView send, TensorView recv, comm::ReduceOp op, Stream& stream) override {
    return group_->ReduceScatter(send, recv, op, stream);
  }
  absl::Status ReduceScatterV(ConstTensorView send, TensorView recv, absl::Span<const int64_t> counts,
                              comm::ReduceOp op, Stream& stream) override {
    return group_->ReduceScatterV(send, recv, counts, op, stream);
  }
  absl::Status Broadcast(TensorView buffer, int root, Stream& stream) override {
    return group_->Broadcast(buffer, root, stream);
  }
  absl::Status Barrier(Stream& stream) override { return group_->Barrier(stream); }
  absl::Status Send(ConstTensorView send, int peer, Stream& stream) override {
    return group_->Send(send, peer, stream);
  }
  absl::Status Recv(TensorView recv, int peer, Stream& stream) override { return group_->Recv(recv, peer, stream); }
  absl::Status RunGrouped(absl::Span<const comm::GroupedCall> calls, Stream& stream) override {
    for (const comm::GroupedCall& call : calls) EK_RETURN_IF_ERROR(comm::RunOne(call, *this, stream));
    return absl::OkStatus();
  }
  absl::Status SetDeadline(absl::Duration deadline) override { return group_->SetDeadline(deadline); }
  absl::Status status() const override { return group_->status(); }
  std::vector<comm::StragglerCount> stragglers() const override { return group_->stragglers(); }

 private:
  absl::Status Pass(int64_t bytes, Stream& stream) {
    const absl::Duration time = kLatency + absl::Seconds(static_cast<double>(bytes) / bytes_per_second_);
    return stream.Launch([this, time] {
      const absl::Time begin = absl::Now();
      absl::SleepFor(time);
      nanoseconds_ += absl::ToInt64Nanoseconds(absl::Now() - begin);
      return absl::OkStatus();
    });
  }

  const std::unique_ptr<comm::Communicator> group_;
  const double bytes_per_second_;
  std::atomic<int64_t> nanoseconds_{0};
};

// One rank's layer and tensors.
class Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Create(comm::Backend& backend, const Order& order,
                                                      double bytes_per_second) {
    auto rank = std::make_unique<Rank>();
    rank->device_ = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
    EK_ASSIGN_OR_RETURN(rank->stream_, rank->device_->CreateStream("compute"));
    EK_RETURN_IF_ERROR(rank->stream_->Launch([] {
      omp_set_num_threads(1);  // one thread per rank, as in training; a setting of the thread that computes
      return absl::OkStatus();
    }));
    const comm::Mesh mesh = *comm::Mesh::Create({.tp = 1, .ep = kRanks, .dp = kRanks, .etp = 1});
    comm::Group group = mesh.GroupOf(comm::Axis::kEp, backend.rank());
    EK_ASSIGN_OR_RETURN(auto ep, backend.CreateGroup(group));
    rank->ep_ = std::make_unique<LinkedGroup>(std::move(ep), bytes_per_second);
    group.name = "control";
    group.axis = comm::Axis::kOther;
    EK_ASSIGN_OR_RETURN(rank->control_, backend.CreateGroup(group));
    EK_RETURN_IF_ERROR(rank->Fill(order));
    return rank;
  }

  absl::Status Step() {
    MoeWeights weights;
    weights.router = router_.const_view();
    weights.experts.w_in = w_in_.const_view();
    weights.experts.w_out = w_out_.const_view();
    MoeGradients gradients;
    gradients.router = drouter_.view();
    gradients.experts.w_in = g_in_.view();
    gradients.experts.w_out = g_out_.view();
    EK_RETURN_IF_ERROR(layer_->Forward(weights, x_.const_view(), y_.view(), {}, &tape_, *stream_));
    EK_RETURN_IF_ERROR(layer_->Backward(weights, tape_, dy_.const_view(), dx_.view(), gradients, *stream_));
    return stream_->Synchronize();
  }

  absl::Status Barrier() {
    EK_RETURN_IF_ERROR(control_->Barrier(*stream_));
    return stream_->Synchronize();
  }

  absl::Duration on_link() const { return ep_->on_link(); }

 private:
  absl::Status Fill(const Order& order) {
    MoeConfig config;
    config.router.layer = "overlap";
    config.router.hidden = kHidden;
    config.router.experts = kExperts;
    config.router.top_k = kTopK;
    config.router.capacity.mode = CapacityMode::kFactor;
    config.ffn = kFfn;
    const MoeGroups groups = {.ep = ep_.get(), .control_ep = control_.get()};
    EK_ASSIGN_OR_RETURN(layer_, MoeLayer::Create(config, order, groups, device_.get()));
    const int64_t local = kExperts / kRanks;
    const std::pair<Tensor*, Shape> tensors[] = {{&x_, {kTokens, kHidden}},         {&dy_, {kTokens, kHidden}},
                                                 {&y_, {kTokens, kHidden}},         {&dx_, {kTokens, kHidden}},
                                                 {&router_, {kExperts, kHidden}},   {&drouter_, {kExperts, kHidden}},
                                                 {&w_in_, {local, kHidden, kFfn}},  {&g_in_, {local, kHidden, kFfn}},
                                                 {&w_out_, {local, kFfn, kHidden}}, {&g_out_, {local, kFfn, kHidden}}};
    uint64_t key = static_cast<uint64_t>(ep_->rank()) << 8;
    for (const auto& [tensor, shape] : tensors) {
      EK_ASSIGN_OR_RETURN(*tensor, Tensor::Zeros(device_.get(), DType::kF32, shape));
      const PhiloxStream random(PhiloxKey(1).Add(++key));
      float* data = tensor->data<float>();
      for (int64_t i = 0; i < shape.num_elements(); ++i) data[i] = 0.05f * (random.Uniform(i % 4093) - 0.5f);
    }
    // The same router on both ranks: they agree on routes only by their own tokens.
    const PhiloxStream random(PhiloxKey(2));
    for (int64_t i = 0; i < kExperts * kHidden; ++i) router_.data<float>()[i] = random.Uniform(i) - 0.5f;
    return absl::OkStatus();
  }

  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<LinkedGroup> ep_;
  std::unique_ptr<comm::Communicator> control_;
  std::unique_ptr<MoeLayer> layer_;
  MoeTape tape_;
  Tensor x_, dy_, y_, dx_, router_, drouter_, w_in_, g_in_, w_out_, g_out_;
};

void Exchange(benchmark::State& state, const std::string& name, double bytes_per_second) {
  const absl::StatusOr<Order> order = FindOrder(name);
  EK_CHECK_OK(order);
  auto world = comm::InProcessWorld::Create({.world_size = kRanks});
  EK_CHECK_OK(world);
  constexpr int kSteps = 30;
  absl::Duration best = absl::InfiniteDuration(), on_link;
  for (auto unused : state) {
    (void)unused;
    const std::vector<absl::Status> statuses = comm::RunRanks(**world, [&](comm::Backend& backend) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const std::unique_ptr<Rank> rank, Rank::Create(backend, *order, bytes_per_second));
      EK_RETURN_IF_ERROR(rank->Step());  // first touch
      for (int step = 0; step < kSteps; ++step) {
        EK_RETURN_IF_ERROR(rank->Barrier());
        const absl::Duration before = rank->on_link();
        const absl::Time begin = absl::Now();
        EK_RETURN_IF_ERROR(rank->Step());
        if (backend.rank() != 0 || absl::Now() - begin >= best) continue;
        best = absl::Now() - begin;
        on_link = rank->on_link() - before;
      }
      return absl::OkStatus();
    });
    EK_CHECK_OK(comm::FirstFailure(statuses));
    (*world)->AdmitAll();
    state.SetIterationTime(absl::ToDoubleSeconds(best));  // of the best step so far
  }
  state.counters["link_ms"] = absl::ToDoubleMilliseconds(on_link);
}

[[maybe_unused]] const bool registered = [] {
  for (const char* inner : {"reference", "token_sliced"}) {
    for (double megabytes_per_second : {50, 100, 200}) {
      for (const std::string& name :
           {std::string(inner), absl::StrCat("overlapped(", inner, ":2)"), absl::StrCat("overlapped(", inner, ":4)")}) {
        benchmark::RegisterBenchmark(absl::StrCat("exchange/", name, "/MBps:", megabytes_per_second).c_str(), Exchange,
                                     name, megabytes_per_second * 1e6)
            ->UseManualTime()
            ->Iterations(2)
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace evenkeel::moe
