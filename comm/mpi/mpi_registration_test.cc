// Processes by the name of their backend.
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/testing/named_world_check.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(MpiRegistrationTest, RunsByName) { EXPECT_OK(CheckNamedWorld("mpi", 0)); }

}  // namespace
}  // namespace evenkeel::comm
