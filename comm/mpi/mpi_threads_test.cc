// Processes against threads: every operation gives the same bits, whatever the size of messages.
#include <memory>
#include <thread>
#include <vector>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {
namespace {

// What each rank of a world of threads gets.
std::vector<absl::StatusOr<std::vector<OperationDigest>>> OnThreads(int size, const std::vector<DType>& types,
                                                                    const std::vector<int64_t>& sizes) {
  std::vector<absl::StatusOr<std::vector<OperationDigest>>> results(size);
  auto world = InProcessWorld::Create({.world_size = size});
  if (!world.ok()) return results;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { results[rank] = DigestAllOperations((*world)->backend(rank), types, sizes); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// The digests of all ranks of a world of threads, made once, on process 0, and told to the others.
absl::Status CompareWithThreads(const std::vector<DType>& types, const std::vector<int64_t>& sizes) {
  MpiBackend& world = MpiTestWorld();
  EK_ASSIGN_OR_RETURN(std::vector<OperationDigest> mine, DigestAllOperations(world, types, sizes));
  const auto num_digests = static_cast<int64_t>(mine.size());
  std::vector<int64_t> expected(num_digests * world.size());
  if (world.rank() == 0) {
    const auto threads = OnThreads(world.size(), types, sizes);
    for (int rank = 0; rank < world.size(); ++rank) {
      EK_RETURN_IF_ERROR(threads[rank].status());
      for (int64_t i = 0; i < num_digests; ++i) {
        expected[rank * num_digests + i] = static_cast<int64_t>((*threads[rank])[i].second);
      }
    }
  }
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, device->CreateStream("expected"));
  Group all{.axis = Axis::kWorld, .name = "world", .ranks = {}};
  for (int rank = 0; rank < world.size(); ++rank) all.ranks.push_back(rank);
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> group, world.CreateGroup(all));
  const Shape shape({static_cast<int64_t>(expected.size())});
  EK_RETURN_IF_ERROR(group->Broadcast(TensorView(expected.data(), DType::kI64, shape), 0, *stream));
  for (int64_t i = 0; i < num_digests; ++i) {
    EXPECT_EQ(static_cast<int64_t>(mine[i].second), expected[world.rank() * num_digests + i]) << mine[i].first;
  }
  EXPECT_GT(num_digests, 10);
  return absl::OkStatus();
}

TEST(MpiThreadsTest, C18_SameBitsAsThreads) {
  const std::vector<DType> types(std::begin(kAllDTypes), std::end(kAllDTypes));
  EXPECT_OK(CompareWithThreads(types, {0, 1, 17, 1000, 4099}));
}

TEST(MpiThreadsTest, C18_SameBitsAsThreadsWhenLarge) {
  EXPECT_OK(CompareWithThreads({DType::kF32, DType::kBF16}, {300'007}));
}

}  // namespace
}  // namespace evenkeel::comm
