// What a small call between threads must not do: allocate for more than its plan.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "gtest/gtest.h"

namespace {

thread_local int64_t t_allocations = 0;

void* Allocate(std::size_t bytes, std::size_t alignment) {
  ++t_allocations;
  void* const data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) std::abort();
  return data;
}

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes == 0 ? 1 : bytes, 16); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes == 0 ? 1 : bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

namespace evenkeel::comm {
namespace {

constexpr int kCalls = 100;

enum class Kind { kBarrier, kAllGather, kAllToAll, kReduceScatter, kAllReduce };

absl::Status CallOnce(Kind kind, Communicator& group, std::vector<float>& in, std::vector<float>& out, Stream& stream) {
  const int64_t n = 64, all = n * group.size();
  const auto view = [](std::vector<float>& data, int64_t count) {
    return TensorView(data.data(), DType::kF32, Shape({count}));
  };
  switch (kind) {
    case Kind::kBarrier:
      return group.Barrier(stream);
    case Kind::kAllGather:
      return group.AllGather(view(in, n), view(out, all), stream);
    case Kind::kAllToAll:
      return group.AllToAll(view(in, all), view(out, all), stream);
    case Kind::kReduceScatter:
      return group.ReduceScatter(view(in, all), view(out, n), ReduceOp::kSum, stream);
    case Kind::kAllReduce:
      return group.AllReduce(view(in, n), view(out, n), ReduceOp::kSum, stream);
  }
  return absl::OkStatus();
}

// The most that any rank allocated in one call, once the group is warm. The threads do not enter their ranks: who falls
// asleep last would look for a deadlock, and allocate for that.
int64_t AllocationsPerCall(Kind kind, int ranks) {
  auto world = InProcessWorld::Create({.world_size = ranks, .stragglers = {.after = absl::InfiniteDuration()}});
  EK_CHECK_OK(world);
  std::vector<std::unique_ptr<Communicator>> groups(static_cast<size_t>(ranks));  // nobody leaves before all are done
  std::vector<absl::StatusOr<int64_t>> most(static_cast<size_t>(ranks), 0);
  const auto body = [&](int rank) -> absl::StatusOr<int64_t> {
    EK_ASSIGN_OR_RETURN(groups[rank], (*world)->backend(rank).CreateGroup(WorldGroup(ranks)));
    std::unique_ptr<HostDevice> device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream("test"));
    std::vector<float> in(64 * static_cast<size_t>(ranks)), out(64 * static_cast<size_t>(ranks));
    for (int i = 0; i < 3; ++i) EK_RETURN_IF_ERROR(CallOnce(kind, *groups[rank], in, out, *stream));
    int64_t allocations = 0;
    for (int i = 0; i < kCalls; ++i) {
      const int64_t before = t_allocations;
      EK_RETURN_IF_ERROR(CallOnce(kind, *groups[rank], in, out, *stream));
      allocations = std::max(allocations, t_allocations - before);
    }
    return allocations;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back([&, rank] { most[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  int64_t result = 0;
  for (const absl::StatusOr<int64_t>& one : most) {
    EXPECT_OK(one.status());
    if (one.ok()) result = std::max(result, *one);
  }
  return result;
}

TEST(SmallCallTest, AllocatesOnlyForOffsets) {
  for (const int ranks : {2, 4}) {
    EXPECT_EQ(AllocationsPerCall(Kind::kBarrier, ranks), 0) << ranks;
    EXPECT_EQ(AllocationsPerCall(Kind::kAllGather, ranks), 1) << ranks;
    EXPECT_EQ(AllocationsPerCall(Kind::kAllToAll, ranks), 1) << ranks;
    EXPECT_EQ(AllocationsPerCall(Kind::kReduceScatter, ranks), 1) << ranks;
    EXPECT_EQ(AllocationsPerCall(Kind::kAllReduce, ranks), 1) << ranks;
  }
}

}  // namespace
}  // namespace evenkeel::comm
