// GoogleTest matchers for absl::Status and StatusOr.
//
//   EXPECT_OK(layer->Forward(...));
//   ASSERT_OK_AND_ASSIGN(auto arena, Arena::Create(...));
//   EXPECT_THAT(Parse("x"), StatusIs(absl::StatusCode::kInvalidArgument,
//   HasSubstr("line 1")));
#ifndef EVENKEEL_RUNTIME_BASE_STATUS_MATCHERS_H_
#define EVENKEEL_RUNTIME_BASE_STATUS_MATCHERS_H_

#include <ostream>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {

MATCHER(IsOk, "is OK") {
  const absl::Status& status = ::evenkeel::base_internal::AsStatus(arg);
  if (status.ok()) return true;
  *result_listener << status.ToString();
  return false;
}

// The code equals `code` and the message matches `message` (a string or a
// matcher).
MATCHER_P2(StatusIs, code, message, "") {
  const absl::Status& status = ::evenkeel::base_internal::AsStatus(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         ::testing::Matches(::testing::MatcherCast<const std::string&>(message))(std::string(status.message()));
}

}  // namespace evenkeel::testutil

#define EXPECT_OK(expr) EXPECT_THAT((expr), ::evenkeel::testutil::IsOk())
#define ASSERT_OK(expr) ASSERT_THAT((expr), ::evenkeel::testutil::IsOk())
#define ASSERT_OK_AND_ASSIGN(lhs, ...) \
  ASSERT_OK_AND_ASSIGN_IMPL_(EK_CONCAT_(ek_test_status_or_, __LINE__), lhs, (__VA_ARGS__))
#define ASSERT_OK_AND_ASSIGN_IMPL_(temp, lhs, expr) \
  auto temp = expr;                                 \
  ASSERT_OK(temp);                                  \
  lhs = std::move(temp).value()

#endif  // EVENKEEL_RUNTIME_BASE_STATUS_MATCHERS_H_
