#include "evenkeel/comm/scratch_memory.h"

#include <cstdint>
#include <memory>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// The sanitizers' allocators return null, as malloc does, instead of ending the process.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

TEST(ScratchMemoryTest, BlocksAreUsable) {
  for (const int64_t bytes : {0, 1, 4096}) {
    ASSERT_OK_AND_ASSIGN(const ScratchBlock block, AllocateScratch(ScratchMemory::Heap(), bytes, "a test"));
    for (int64_t i = 0; i < bytes; ++i) block[i] = std::byte{1};
  }
}

TEST(ScratchMemoryTest, NoMemoryIsAnErrorWithTheNumber) {
  EXPECT_THAT(AllocateScratch(ScratchMemory::Heap(), int64_t{1} << 60, "a test"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no memory for 1152921504606846976 bytes")));
}

// A gather over two nodes whose scratch is larger than the address space. Its buffers are addresses that nobody may
// touch: nothing moves before all have the memory.
TEST(ScratchMemoryTest, C31_AddressSpaceExhausted) {
  constexpr int kRanks = 4;
  constexpr int64_t kBytes = int64_t{1} << 58;
  ASSERT_OK_AND_ASSIGN(
      const auto world,
      InProcessWorld::Create({.world_size = kRanks, .topology = *Topology::Blocks(kRanks, 2), .two_level = true}));
  const auto statuses = RunRanks(*world, [](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(kRanks)));
    void* const recv = reinterpret_cast<void*>(uintptr_t{1} << 12);
    const void* const send = reinterpret_cast<void*>(uintptr_t{1} << 61);
    const absl::Status status = group->AllGather(ConstTensorView(send, DType::kU8, Shape({kBytes})),
                                                 TensorView(recv, DType::kU8, Shape({kBytes * kRanks})), *stream);
    EK_ASSIGN_OR_RETURN(const auto next, backend.CreateGroup(WorldGroup(kRanks)));
    EK_ASSIGN_OR_RETURN(const auto fresh, device->CreateStream("next"));
    EK_RETURN_IF_ERROR(next->Barrier(*fresh));
    return status;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("comm all_gather group=world")));
  }
}

}  // namespace
}  // namespace evenkeel::comm
