#include "evenkeel/comm/message/mailroom.h"

#include <string>

#include "evenkeel/comm/message/testing/scripted_wire.h"
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
  // Ten absent ranks, each with much to say, are still named at the other end.
  context = {.module = "comm", .operation = "barrier", .group = "world"};
  for (int rank = 0; rank < 10; ++rank) context.findings.push_back({rank, std::string(220, 'x')});
  const std::string body = EncodeStatus(MakeError(absl::StatusCode::kDeadlineExceeded, context, "ranks are absent"));
  EXPECT_LE(static_cast<int64_t>(EncodeControl({.body = body}, 1).size()), kEagerMessageBytes);
  ASSERT_TRUE(GetErrorContext(DecodeStatus(body)).has_value());
  EXPECT_EQ(GetErrorContext(DecodeStatus(body))->findings, context.findings);
}

// A mailroom of rank 0 of two, and what rank 1 sends it.
struct Inbox {
  void Arrive(const ControlMessage& message, int64_t serial) {
    wire.Deliver(1, kControlTag, EncodeControl(message, serial));
    mailroom.Poll();
  }
  ScriptedWire wire{2};
  Mailroom mailroom{&wire};
};

TEST(MailroomTest, NoticesAboutGroupsThatEndedAreDropped) {
  Inbox inbox;
  inbox.mailroom.OpenEpoch(3);
  inbox.Arrive({.kind = ControlMessage::Kind::kLeft, .id = 3}, 0);
  EXPECT_TRUE(inbox.mailroom.FindNotice(1, 3, false).has_value());
  EXPECT_FALSE(inbox.mailroom.FindNotice(1, 3, true).has_value());
  inbox.mailroom.CloseEpoch(3);
  EXPECT_FALSE(inbox.mailroom.FindNotice(1, 3, false).has_value());
  inbox.Arrive({.kind = ControlMessage::Kind::kAbort, .id = 3, .body = EncodeStatus(SampleCause())}, 1);
  EXPECT_FALSE(inbox.mailroom.FindNotice(1, 3, false).has_value());
  EXPECT_EQ(inbox.mailroom.num_dropped(), 1);
  inbox.Arrive({.kind = ControlMessage::Kind::kLeft, .id = 4}, 2);  // made there already, not yet here
  EXPECT_TRUE(inbox.mailroom.FindNotice(1, 4, false).has_value());
}

TEST(MailroomTest, FirstNoticeStays) {
  Inbox inbox;
  inbox.Arrive({.kind = ControlMessage::Kind::kAbort, .id = 3, .body = EncodeStatus(SampleCause())}, 0);
  inbox.Arrive({.kind = ControlMessage::Kind::kLeft, .id = 3}, 1);
  EXPECT_EQ(inbox.mailroom.FindNotice(1, 3, false)->kind, ControlMessage::Kind::kAbort);
}

TEST(MailroomTest, DoubledMessagesAreDropped) {
  Inbox inbox;
  for (const int64_t serial : {0, 2, 1, 2, 0, 1}) inbox.Arrive(SampleMessage(), serial);
  EXPECT_EQ(inbox.mailroom.num_dropped(), 3);
}

// Messages may overtake one another: what was said before the goodbye counts.
TEST(MailroomTest, GoodbyeIsBelievedWhenAllBeforeItIsHere) {
  Inbox inbox;
  inbox.Arrive({.kind = ControlMessage::Kind::kGoodbye}, 2);
  inbox.Arrive(SampleMessage(), 0);
  EXPECT_FALSE(inbox.mailroom.SaidGoodbye(1));
  inbox.Arrive(SampleMessage(), 1);
  EXPECT_TRUE(inbox.mailroom.SaidGoodbye(1));
  EXPECT_FALSE(inbox.mailroom.LeftAlone(1));
  inbox.Arrive({.kind = ControlMessage::Kind::kGoodbye, .a = 1}, 3);
  EXPECT_TRUE(inbox.mailroom.LeftAlone(1));
}

}  // namespace
}  // namespace evenkeel::comm
