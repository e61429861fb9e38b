// What a call that failed leaves behind: no memory of the caller that a message could touch, word to the peers, a
// channel that nobody takes; and how wrong records are told from right ones.
#include <cstring>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/message/message_backend.h"
#include "evenkeel/comm/message/message_options.h"
#include "evenkeel/comm/message/tag_channels.h"
#include "evenkeel/comm/message/testing/scripted_wire.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<ControlMessage::Kind> ControlTo(const ScriptedWire& wire, int peer) {
  std::vector<ControlMessage::Kind> kinds;
  for (const ScriptedWire::Sent& message : wire.sent) {
    int64_t serial = 0;
    const auto decoded = DecodeControl(message.bytes, &serial);
    if (message.tag == kControlTag && message.peer == peer && decoded.ok()) kinds.push_back(decoded->kind);
  }
  return kinds;
}

TEST(BreakTest, NothingOfAFailedAgreementStaysOpen) {
  ScriptedGroup group(3);
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.tag != kControlTag; };
  group.wire.At(absl::Milliseconds(10), [&] { group.wire.Echo(1); });
  EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(group.wire.NumOpen(), 0);
  EXPECT_OK(group.wire.condemned) << "records are this rank's own memory";
}

absl::Status ExchangeWithoutPeer(ScriptedGroup& group) {
  group.wire.At(absl::Milliseconds(1), [&group] { group.wire.Echo(1); });  // the record
  std::vector<float> out(200, 1.0f), in(200);
  return group.communicator->AllToAll(ConstTensorView(out.data(), DType::kF32, Shape({200})),
                                      TensorView(in.data(), DType::kF32, Shape({200})), *group.stream);
}

TEST(BreakTest, NothingOfAFailedExchangeStaysOpen) {
  ScriptedGroup group(2, {.eager_bytes = 0, .piece_bytes = 64});
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.bytes.size() == 64; };
  EXPECT_EQ(ExchangeWithoutPeer(group).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(group.wire.NumOpen(), 0);
  EXPECT_OK(group.wire.condemned);
}

// The wire still knows memory of the caller: this rank must carry nothing more.
TEST(BreakTest, WireIsCondemnedWhenItCannotGiveBack) {
  ScriptedGroup group(2, {.eager_bytes = 0, .piece_bytes = 64});
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.bytes.size() == 64; };
  group.wire.can_cancel = [&group](const Transfer& transfer) {
    for (const ScriptedWire::Sent& message : group.wire.sent) {
      if (message.transfer == &transfer && message.bytes.size() == 64) return false;
    }
    return true;
  };
  EXPECT_EQ(ExchangeWithoutPeer(group).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(group.wire.condemned, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("still under way")));
}

TEST(BreakTest, WordToThePeersIsOnItsWayBeforeTheCallReturns) {
  ScriptedGroup group(3);
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.tag == kControlTag; };
  group.wire.At(absl::Milliseconds(1), [&] { group.wire.Echo(1); });
  // Rank 1 takes it 30 ms later; rank 2, the absent one, never.
  bool taken = false;
  group.wire.At(absl::Milliseconds(1030), [&] {
    group.wire.Take(1);
    taken = true;
  });
  EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(taken);
  EXPECT_LE(group.wire.Now(), absl::Milliseconds(1030)) << "the absent rank is not waited for";
  group.wire.Take(2);
}

TEST(BreakTest, AnAbsentRankDoesNotHoldUpTheReturn) {
  ScriptedGroup group(2);
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.tag == kControlTag; };
  EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LE(group.wire.Now(), absl::Milliseconds(1001));
  group.wire.Take(1);
}

TEST(BreakTest, ChannelOfABrokenGroupIsNotTakenAgain) {
  ScriptedGroup group(2);
  EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kDeadlineExceeded);
  group.communicator.reset();
  EXPECT_EQ(group.mailroom.busy_channels().FirstFree(ScriptedGroup::kEpoch), ScriptedGroup::kEpoch + 1);
  EXPECT_THAT(ControlTo(group.wire, 1), ElementsAre(ControlMessage::Kind::kWaiting, ControlMessage::Kind::kAbort))
      << "and does not say that it leaves";

  ScriptedGroup well(2);
  EXPECT_EQ(well.mailroom.busy_channels().FirstFree(ScriptedGroup::kEpoch), ScriptedGroup::kEpoch + 1);
  well.communicator.reset();
  EXPECT_EQ(well.mailroom.busy_channels().FirstFree(ScriptedGroup::kEpoch), ScriptedGroup::kEpoch);
  EXPECT_THAT(ControlTo(well.wire, 1), ElementsAre(ControlMessage::Kind::kLeft));
}

// ---- Wrong records and pieces.

// Whole, sealed, with a right digest; but its row of counts is longer than the group allows.
TEST(BreakTest, C27_RowThatIsTooLongIsDamage) {
  ScriptedGroup group(2);
  group.wire.At(absl::Milliseconds(1), [&] {
    constexpr uint32_t kRow = 5;  // 2 * size is 4
    std::string bytes = group.wire.sent.back().bytes.substr(0, kFingerprintBytes);
    const std::string tail(kRow * sizeof(int64_t), '\7');
    const uint32_t lengths[2] = {kRow, 0};
    const uint64_t digest = CombineDigests(uint64_t{kRow} << 32, Digest64(tail.data(), tail.size()));
    bytes.append(reinterpret_cast<const char*>(lengths), sizeof(lengths));
    bytes.append(reinterpret_cast<const char*>(&digest), sizeof(digest));
    group.wire.Deliver(1, group.wire.sent.back().tag, bytes + tail);
  });
  EXPECT_THAT(group.Barrier(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a record is damaged")));
}

// The border between counts and payload has moved; all bytes are there.
TEST(BreakTest, C27_PayloadThatClaimsToBeCountsIsDamage) {
  ScriptedGroup group(2);
  group.wire.At(absl::Milliseconds(1), [&] {
    std::string bytes = group.wire.sent.back().bytes;
    const uint32_t lengths[2] = {1, 0};  // were 0 counts and 8 bytes
    std::memcpy(bytes.data() + kFingerprintBytes, lengths, sizeof(lengths));
    group.wire.Deliver(1, group.wire.sent.back().tag, bytes);
  });
  const float out[4] = {1, 2, 3, 4};
  float in[4];
  const absl::Status status = group.communicator->AllToAll(ConstTensorView(out, DType::kF32, Shape({4})),
                                                           TensorView(in, DType::kF32, Shape({4})), *group.stream);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a record is damaged")));
}

TEST(BreakTest, C27_PieceOfAnotherSizeIsDamage) {
  for (const size_t bytes : {size_t{0}, size_t{63}, size_t{65}}) {
    ScriptedGroup group(2, {.eager_bytes = 0, .piece_bytes = 64});
    group.wire.At(absl::Milliseconds(2), [&] {
      for (const ScriptedWire::Sent& message : group.wire.sent) {
        if (message.bytes.size() != 64) continue;
        group.wire.Deliver(1, message.tag, std::string(bytes, '\1'));
        break;
      }
    });
    const absl::Status status = ExchangeWithoutPeer(group);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("payload is damaged"))) << bytes;
    EXPECT_LT(group.wire.Now(), absl::Seconds(1));
  }
}

// ---- Groups in the making.

// A proposal of rank 1 as this rank would make it, but for `flags` and the channels it has in use.
void AnswerProposal(ScriptedWire& wire, uint8_t flags, const BusyChannels& busy) {
  wire.At(absl::ZeroDuration(), [&wire, flags, busy] {
    int64_t serial = 0;
    ControlMessage proposal = *DecodeControl(wire.sent.back().bytes, &serial);
    Fingerprint f;
    std::memcpy(&f, proposal.body.data(), sizeof(f));
    f.flags = flags;
    f = SealFingerprint(f);
    proposal.body.assign(reinterpret_cast<const char*>(&f), sizeof(f));
    proposal.body += busy.Encode();
    wire.Deliver(1, kControlTag, EncodeControl(proposal, 0));
  });
}

const Group kBoth{.axis = Axis::kWorld, .name = "world", .ranks = {0, 1}};

TEST(BreakTest, FormsThatDifferAreRefusedWhenTheGroupIsMade) {
  for (const bool two_level : {false, true}) {
    ScriptedWire wire(2);
    MessageBackend backend(
        &wire, {.name = "test", .topology = Topology::SingleNode(2), .two_level = two_level, .message = {}});
    AnswerProposal(wire, two_level ? 0 : kFlagTwoLevel, BusyChannels());
    EXPECT_THAT(backend.CreateGroup(kBoth).status(),
                StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("forms differ")));
  }
}

TEST(BreakTest, ChannelThatAPeerHasInUseIsLeftOut) {
  ScriptedWire wire(2);
  MessageBackend backend(&wire, {.name = "test", .topology = Topology::SingleNode(2), .message = {}});
  BusyChannels busy;
  busy.Add(0);
  busy.Add(1);
  AnswerProposal(wire, 0, busy);
  ASSERT_OK_AND_ASSIGN(const auto group, backend.CreateGroup(kBoth));
  EXPECT_EQ(group->epoch(), 2);
}

TEST(BreakTest, OptionsOutOfRangeAreRefused) {
  EXPECT_OK(CheckMessageOptions({.eager_bytes = 0, .piece_bytes = 64, .window = 1}));
  EXPECT_OK(CheckMessageOptions({.eager_bytes = 2560, .piece_bytes = (int64_t{1} << 31) - 1, .window = 64}));
  for (const MessageOptions& options : std::vector<MessageOptions>{{.eager_bytes = -1},
                                                                   {.eager_bytes = 2561},
                                                                   {.piece_bytes = 63},
                                                                   {.piece_bytes = int64_t{1} << 31},
                                                                   {.window = 0},
                                                                   {.window = 65}}) {
    EXPECT_EQ(CheckMessageOptions(options).code(), absl::StatusCode::kInvalidArgument)
        << options.eager_bytes << " " << options.piece_bytes << " " << options.window;
  }
}

}  // namespace
}  // namespace evenkeel::comm
