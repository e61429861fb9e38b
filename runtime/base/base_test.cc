// Checked arithmetic, digests, clocks, status macros and matchers.

#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <string>

#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::IsOk;
using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

TEST(CheckedMathTest, ReportsOverflowWithTheNumbers) {
  ASSERT_OK_AND_ASSIGN(const int64_t sum, CheckedAdd(kMax - 1, 1));
  EXPECT_EQ(sum, kMax);
  EXPECT_THAT(CheckedAdd(kMax, 1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("9223372036854775807 + 1")));
  EXPECT_THAT(CheckedAdd(kMin, -1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
  ASSERT_OK_AND_ASSIGN(const int64_t product, CheckedMul(int64_t{1} << 31, int64_t{1} << 31));
  EXPECT_EQ(product, int64_t{1} << 62);
  EXPECT_THAT(CheckedMul(int64_t{1} << 32, int64_t{1} << 31),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("4294967296 * 2147483648")));
  EXPECT_THAT(CheckedMul(kMin, -1), Not(IsOk()));
}

TEST(CheckedMathTest, RoundsUp) {
  for (int64_t value : {0, 1, 15, 16, 17}) {
    ASSERT_OK_AND_ASSIGN(const int64_t rounded, CheckedRoundUp(value, 16));
    EXPECT_EQ(rounded, (value + 15) / 16 * 16);
  }
  ASSERT_OK_AND_ASSIGN(const int64_t odd, CheckedRoundUp(10, 7));
  EXPECT_EQ(odd, 14);
  EXPECT_THAT(CheckedRoundUp(-1, 16), Not(IsOk()));
  EXPECT_THAT(CheckedRoundUp(1, 0), Not(IsOk()));
  EXPECT_THAT(CheckedRoundUp(kMax - 3, 16), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
  static_assert(CeilDiv(0, 4) == 0 && CeilDiv(1, 4) == 1 && CeilDiv(4, 4) == 1 && CeilDiv(5, 4) == 2);
  static_assert(CeilDiv(kMax, 1) == kMax && CeilDiv(kMax, 2) == kMax / 2 + 1);
}

TEST(DigestTest, IsXxh3AndSeesEveryByte) {
  EXPECT_EQ(Digest64(""), 0x2d06800538d394c2u);  // XXH3_64bits of no bytes, as published
  EXPECT_EQ(Digest64(nullptr, 0), Digest64(""));
  for (size_t length : {1, 16, 17, 200, 1000}) {
    std::string text(length, 'x');
    const uint64_t digest = Digest64(text);
    for (size_t i = 0; i < length; ++i) {
      text[i] = 'y';
      ASSERT_NE(Digest64(text), digest) << length << " " << i;
      text[i] = 'x';
    }
    ASSERT_EQ(Digest64(text.data(), length), digest);
  }
  EXPECT_NE(CombineDigests(1, 2), CombineDigests(2, 1));
}

TEST(ClockTest, VirtualTimeMovesOnlyWhenTold) {
  VirtualClock clock;
  EXPECT_EQ(clock.Now(), absl::ZeroDuration());
  clock.Sleep(absl::Hours(3));
  clock.Advance(absl::Milliseconds(5));
  EXPECT_EQ(clock.Now(), absl::Hours(3) + absl::Milliseconds(5));
}

TEST(ClockTest, RealTimeNeverGoesBack) {
  absl::Duration before = Clock::Real()->Now();
  for (int i = 0; i < 1000; ++i) {
    const absl::Duration now = Clock::Real()->Now();
    ASSERT_GE(now, before);
    before = now;
  }
  Clock::Real()->Sleep(absl::Microseconds(200));
  EXPECT_GE(Clock::Real()->Now() - before, absl::Microseconds(200));
}

absl::StatusOr<std::unique_ptr<int>> Half(int value) {
  if (value % 2 != 0) return absl::InvalidArgumentError("odd");
  return std::make_unique<int>(value / 2);
}

absl::Status Quarter(int value, int* result) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<int> half, Half(value));
  EK_ASSIGN_OR_RETURN(*result, [&]() -> absl::StatusOr<int> {
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<int> quarter, Half(*half));
    return *quarter;
  }());
  EK_RETURN_IF_ERROR(absl::OkStatus());
  return absl::OkStatus();
}

TEST(StatusMacrosTest, PassErrorsUpAndMoveValues) {
  int result = 0;
  EXPECT_OK(Quarter(12, &result));
  EXPECT_EQ(result, 3);
  EXPECT_THAT(Quarter(6, &result), StatusIs(absl::StatusCode::kInvalidArgument, "odd"));
  EXPECT_THAT(Half(3), AllOf(Not(IsOk()), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dd"))));
  EXPECT_THAT(Half(3), Not(StatusIs(absl::StatusCode::kInternal, "odd")));
}

TEST(StatusMacrosDeathTest, ChecksEndTheProcessAndSayWhy) {
  EXPECT_DEATH(EK_CHECK(1 + 1 == 3), "check failed: 1 \\+ 1 == 3");
  EXPECT_DEATH(EK_CHECK_OK(absl::InternalError("broken")), "INTERNAL: broken");
  EK_CHECK(true);
  EK_CHECK_OK(Half(2));
}

}  // namespace
}  // namespace evenkeel
