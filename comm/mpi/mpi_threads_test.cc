// Processes against threads: every operation gives the same bits, whatever the size of messages.
#include <memory>
#include <thread>
#include <vector>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/runtime/base/status_matchers.h"

namespace evenkeel::comm {
namespace {

const std::vector<DType>& AllTypes() {
  static const auto* types = new std::vector<DType>(std::begin(kAllDTypes), std::end(kAllDTypes));
  return *types;
}

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

TEST(MpiThreadsTest, C18_SameBitsAsThreads) {
  const std::vector<int64_t> sizes = {0, 1, 17, 1000, 4099};
  auto mine = DigestAllOperations(MpiTestWorld(), AllTypes(), sizes);
  ASSERT_OK(mine);
  const auto threads = OnThreads(MpiTestWorld().size(), AllTypes(), sizes);
  ASSERT_OK(threads[MpiTestWorld().rank()]);
  ASSERT_EQ(mine->size(), threads[MpiTestWorld().rank()]->size());
  ASSERT_GT(mine->size(), 300u);
  for (size_t i = 0; i < mine->size(); ++i) EXPECT_EQ((*mine)[i], (*threads[MpiTestWorld().rank()])[i]);
}

TEST(MpiThreadsTest, C18_SameBitsAsThreadsWhenLarge) {
  const std::vector<int64_t> sizes = {300'007};
  auto mine = DigestAllOperations(MpiTestWorld(), {DType::kF32}, sizes);
  ASSERT_OK(mine);
  const auto threads = OnThreads(MpiTestWorld().size(), {DType::kF32}, sizes);
  ASSERT_OK(threads[MpiTestWorld().rank()]);
  EXPECT_EQ(*mine, *threads[MpiTestWorld().rank()]);
}

}  // namespace
}  // namespace evenkeel::comm
