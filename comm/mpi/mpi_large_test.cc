// Calls beyond 2^31 bytes between ranks that are processes: more than one message of MPI can count.
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/comm/testing/large_calls.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(MpiLargeTest, C12_BlocksBeyond31BitsAreMoved) { EXPECT_OK(RunLargeCalls(MpiTestWorld())); }

}  // namespace
}  // namespace evenkeel::comm
