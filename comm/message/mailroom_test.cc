#include "evenkeel/comm/message/mailroom.h"

#include <string>

#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

absl::Status SampleCause() {
  ErrorContext context{.module = "comm", .operation = "all_gather", .group = "ep"};
  context.epoch = 3;
  context.sequence = 17;
  context.findings = {{2, "has not entered this call"}};
  return MakeError(absl::StatusCode::kDeadlineExceeded, context, "ranks are absent");
}

ControlMessage SampleMessage() {
  return {.kind = ControlMessage::Kind::kAbort,
          .pair = true,
          .in_agree = true,
          .id = 5,
          .a = int64_t{1} << 40,
          .b = -1,
          .body = EncodeStatus(SampleCause())};
}

TEST(MailroomTest, ControlMessagesComeBackAsTheyWere) {
  int64_t serial = 0;
  ASSERT_OK_AND_ASSIGN(const ControlMessage back, DecodeControl(EncodeControl(SampleMessage(), 77), &serial));
  EXPECT_EQ(serial, 77);
  EXPECT_EQ(back.kind, ControlMessage::Kind::kAbort);
  EXPECT_TRUE(back.pair);
  EXPECT_TRUE(back.in_agree);
  EXPECT_EQ(back.id, 5);
  EXPECT_EQ(back.a, int64_t{1} << 40);
  EXPECT_EQ(back.b, -1);
  EXPECT_EQ(DecodeStatus(back.body), SampleCause());
}

TEST(MailroomTest, CutExtendedOrDamagedMessagesAreRefused) {
  const std::string bytes = EncodeControl(SampleMessage(), 1);
  int64_t serial = 0;
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeControl(absl::string_view(bytes.data(), length), &serial).ok()) << length;
  }
  EXPECT_FALSE(DecodeControl(bytes + "x", &serial).ok());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(DecodeControl(damaged, &serial).ok()) << bit;
  }
}

TEST(MailroomTest, AnyBytesAsAStatusGiveAnError) {
  const PhiloxStream random(PhiloxKey(1).Add("status bytes"));
  for (uint64_t run = 0; run < 2000; ++run) {
    std::string bytes(random.Below(1000 * run, 60), '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(random.Below(1000 * run + i + 1, 6));
    EXPECT_FALSE(DecodeStatus(bytes).ok());
  }
}

TEST(MailroomTest, LongCausesFitOneMessage) {
  ErrorContext context{.module = "comm", .operation = "barrier", .group = std::string(5000, 'g')};
  const absl::Status cause = MakeError(absl::StatusCode::kUnavailable, context, std::string(9000, 'w'));
  const ControlMessage message{.kind = ControlMessage::Kind::kVoid, .body = EncodeStatus(cause)};
  EXPECT_LE(static_cast<int64_t>(EncodeControl(message, 1).size()), kEagerMessageBytes);
  EXPECT_EQ(DecodeStatus(message.body).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace evenkeel::comm
