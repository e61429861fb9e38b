// The layout flag: what it takes and how it complains.
#include "evenkeel/testing/layout_text.h"

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

TEST(LayoutTextTest, NamesSizesInAnyOrder) {
  ASSERT_OK_AND_ASSIGN(const comm::MeshShape full, ParseLayout("dp=4,tp=2,etp=1,ep=8"));
  EXPECT_EQ(full, (comm::MeshShape{.tp = 2, .ep = 8, .dp = 4, .etp = 1}));
  ASSERT_OK_AND_ASSIGN(const comm::MeshShape lanes, ParseLayout("tp=4"));
  EXPECT_EQ(lanes, (comm::MeshShape{.tp = 4, .ep = 1, .dp = 1, .etp = 4}));
}

TEST(LayoutTextTest, RefusesAnythingElse) {
  const std::pair<const char*, const char*> bad[] = {{"", "names none"},
                                                     {"tp=2,", "names none"},
                                                     {"pp=2", "'pp=2' names none"},
                                                     {"tp", "tp is ''"},
                                                     {"tp=0", "tp is '0'"},
                                                     {"tp=-1", "tp is '-1'"},
                                                     {"tp=2x", "tp is '2x'"},
                                                     {"tp=1,tp=1", "tp is there twice"},
                                                     {"tp=99999999999", "no size"},
                                                     {"tp=4,etp=2", "etp 2 is neither 1 nor tp 4"}};
  for (const auto& [text, complaint] : bad) {
    EXPECT_THAT(ParseLayout(text).status(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(complaint))) << text;
  }
}

}  // namespace
}  // namespace evenkeel::testutil
