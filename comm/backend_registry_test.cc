#include "evenkeel/comm/backend_registry.h"

#include <string>

#include "evenkeel/comm/testing/named_world_check.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A user's own, in whatever library.
const bool registered =
    RegisterBackend("a_users_own", [](const WorldOptions& options) { return CreateWorld("in_process", options); });

TEST(BackendRegistryTest, WhatIsLinkedRunsByName) {
  EXPECT_THAT(BackendNames(), ElementsAre("a_users_own", "in_process"));
  EXPECT_OK(CheckNamedWorld("in_process", 3));
  EXPECT_TRUE(CreateWorld("a_users_own", {.world_size = 2}).ok());
}

TEST(BackendRegistryTest, WhatIsNotLinkedNamesItsTarget) {
  EXPECT_THAT(CheckNamedWorld("mpi", 2),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("link //comm/mpi"), HasSubstr("linked: a_users_own, in_process"))));
  EXPECT_THAT(CheckNamedWorld("sim", 2), StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("link //comm/sim")));
  EXPECT_THAT(CheckNamedWorld("nonsense", 2),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no backend is called \"nonsense\"")));
}

TEST(BackendRegistryTest, OptionsAreTheBackends) {
  EXPECT_THAT(CheckNamedWorld("in_process", 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world_size 0")));
}

TEST(BackendRegistryDeathTest, ANameIsTakenOnce) {
  EXPECT_DEATH(RegisterBackend("in_process", nullptr), "two backends have this name");
}

}  // namespace
}  // namespace evenkeel::comm
