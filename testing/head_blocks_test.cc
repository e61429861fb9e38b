// The memory of the blocks by head; what they compute is in canonical_training_test.
#include "evenkeel/testing/head_blocks.h"

#include <memory>

#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

TEST(HeadBlocksTest, CountedMemoryIsThePredictedOne) {
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    for (const int64_t heads : {1, 2, 4, 8}) {
      const HeadBlockSizes sizes = {.rows = 24, .hidden = 32, .heads = heads, .head_dim = 4, .dtype = dtype};
      const std::unique_ptr<HostDevice> device = HostDevice::Create();
      ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, device->CreateStream("compute"));
      const int64_t base = device->counters().Snapshot().live_bytes;
      ASSERT_OK_AND_ASSIGN(const auto blocks, HeadBlocks::Create(sizes, device.get(), stream.get()));
      EXPECT_EQ(device->counters().Snapshot().live_bytes - base, HeadBlocks::ScratchBytes(sizes))
          << DTypeName(dtype) << " " << heads;
    }
  }
}

}  // namespace
}  // namespace evenkeel::testutil
