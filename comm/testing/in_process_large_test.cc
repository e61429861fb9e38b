// Calls beyond 2^31 bytes between ranks that are threads.
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/large_calls.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(InProcessLargeTest, C12_BlocksBeyond31BitsAreMovedByThreads) {
  ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 2, .deadline = absl::Minutes(5)}));
  for (const absl::Status& status : RunRanks(*world, RunLargeCalls)) EXPECT_OK(status);
}

}  // namespace
}  // namespace evenkeel::comm
