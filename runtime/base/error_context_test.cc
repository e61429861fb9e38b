#include "evenkeel/runtime/base/error_context.h"

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::StatusIs;

ErrorContext Full() {
  ErrorContext context;
  context.module = "comm";
  context.operation = "all_to_all_v";
  context.group = "ep";
  context.epoch = 3;
  context.sequence = 8812;
  context.rank = 1;
  context.size = 4;
  context.findings = {{0, "sends 5 elements to rank 1"}, {2, "absent"}};
  context.elapsed = absl::Milliseconds(2100);
  context.limit = absl::Seconds(2);
  context.next_step = "the group is broken";
  return context;
}

TEST(ErrorContextTest, MessageNamesEverythingInOneOrder) {
  EXPECT_THAT(MakeError(absl::StatusCode::kFailedPrecondition, Full(), "split matrix differs"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       "comm all_to_all_v group=ep epoch=3 seq=8812 rank=1/4: split matrix differs; "
                       "rank 0 sends 5 elements to rank 1; rank 2 absent; after 2.1s of 2s; the group is broken"));
  ErrorContext small;
  small.module = "moe";
  EXPECT_THAT(MakeError(absl::StatusCode::kInvalidArgument, small, "k is 9 of 8 experts"),
              StatusIs(absl::StatusCode::kInvalidArgument, "moe: k is 9 of 8 experts"));
}

TEST(ErrorContextTest, PayloadComesBackWhole) {
  for (ErrorContext context : {Full(), ErrorContext()}) {
    const auto read = GetErrorContext(MakeError(absl::StatusCode::kInternal, context, "x"));
    ASSERT_TRUE(read.has_value());
    EXPECT_TRUE(*read == context);
  }
}

TEST(ErrorContextTest, AwkwardTextSurvives) {
  ErrorContext context = Full();
  context.group = "line\nbreak = equals \\ \"quote\" \x01\xff";
  context.findings = {{7, "colon: in=the\nmiddle"}, {-1, ""}};
  context.next_step = std::string("nul\0inside", 10);
  const auto read = GetErrorContext(MakeError(absl::StatusCode::kInternal, context, "x"));
  ASSERT_TRUE(read.has_value());
  EXPECT_TRUE(*read == context);
}

TEST(ErrorContextTest, AnnotateKeepsCodeAndPayload) {
  const absl::Status status = Annotate(MakeError(absl::StatusCode::kAborted, Full(), "first cause"), "step 12");
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, ::testing::StartsWith("step 12: comm all_to_all_v")));
  ASSERT_TRUE(GetErrorContext(status).has_value());
  EXPECT_EQ(GetErrorContext(status)->sequence, 8812);
  EXPECT_OK(Annotate(absl::OkStatus(), "step 12"));
}

TEST(ErrorContextTest, ForeignStatusesAndPayloadsAreHarmless) {
  EXPECT_FALSE(GetErrorContext(absl::InternalError("plain")).has_value());
  EXPECT_FALSE(GetErrorContext(absl::OkStatus()).has_value());
  absl::Status status = absl::InternalError("damaged");
  status.SetPayload("evenkeel/error_context", absl::Cord("rank=abc\n=\nfinding=x:y\nno equals\nsize=5\\\n"));
  const auto read = GetErrorContext(status);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->rank, -1);
  EXPECT_TRUE(read->findings.empty());
}

}  // namespace
}  // namespace evenkeel
