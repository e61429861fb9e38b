// The simulation by its name.
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/testing/named_world_check.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(SimRegistrationTest, RunsByName) { EXPECT_OK(CheckNamedWorld("sim", 5)); }

}  // namespace
}  // namespace evenkeel::comm
