// Who is named, and when, while messages, notices, deaths and limits come in every order: one rank's waits on a network
// that is written down move by move.
#include "evenkeel/comm/message/absence.h"

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/message/testing/scripted_wire.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const absl::Duration kHalf = absl::Milliseconds(500);
const absl::Duration kLimit = absl::Seconds(1);

std::vector<int> NamedRanks(const absl::Status& status) {
  std::vector<int> ranks;
  if (const auto context = GetErrorContext(status); context.has_value()) {
    for (const RankFinding& finding : context->findings) ranks.push_back(finding.rank);
  }
  return ranks;
}

// What a peer says that has waited for `absent` in vain.
absl::Status Absent(int absent) {
  ErrorContext context{.module = "comm", .operation = "barrier", .group = "world", .epoch = ScriptedGroup::kEpoch};
  context.findings = {{absent, "has not entered this call"}};
  return MakeError(absl::StatusCode::kDeadlineExceeded, context, "ranks are absent");
}

// A notice of a rank that has sent `records` records and `pieces` pieces.
ControlMessage GaveUp(const absl::Status& cause, int64_t records = 0, int64_t pieces = 0) {
  return {.kind = ControlMessage::Kind::kAbort,
          .in_agree = true,
          .id = ScriptedGroup::kEpoch,
          .a = records,
          .b = pieces,
          .body = EncodeStatus(cause)};
}

TEST(AbsenceTest, PeerThatMissesThisRankIsNotAskedWhoIsMissing) {
  ScriptedGroup group(3);
  group.Notice(kLimit + absl::Milliseconds(10), 1, GaveUp(Absent(0)));
  const absl::Status status = group.Barrier();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("has not entered this call")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(1, 2)) << status;
}

TEST(AbsenceTest, CauseOfARankThatDiedAfterItGaveUpIsTaken) {
  ScriptedGroup group(3);
  group.wire.At(kHalf, [&] {
    group.wire.dead.insert(1);
    group.wire.Deliver(1, kControlTag, EncodeControl(GaveUp(Absent(2)), 0));
  });
  const absl::Status status = group.Barrier();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(NamedRanks(status), ElementsAre(2)) << status;
  EXPECT_LT(group.wire.Now(), kLimit);
}

TEST(AbsenceTest, BrokenWireNamesTheDeadRank) {
  ScriptedGroup group(3);
  group.wire.At(kHalf, [&] {
    group.wire.dead.insert(2);
    group.wire.broken = absl::UnavailableError("the launcher ends the job");
  });
  absl::Status status = group.Barrier();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("a rank is gone")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(2)) << status;
  ScriptedGroup later(3);  // before a call
  later.wire.dead.insert(2);
  later.wire.broken = absl::UnavailableError("the launcher ends the job");
  status = later.Barrier();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("a rank is gone")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(2)) << status;
}

TEST(AbsenceTest, BrokenWireTellsWhatAPeerSaidBefore) {
  ScriptedGroup group(3);
  group.Notice(kHalf, 1, GaveUp(Absent(2)));
  group.wire.At(kHalf + absl::Nanoseconds(1), [&] { group.wire.broken = absl::UnavailableError("the job ends"); });
  group.wire.busy_pause = absl::Milliseconds(1);  // no look at notices in between
  const absl::Status status = group.Barrier();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 gave the group up")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(2)) << status;
}

TEST(AbsenceTest, BrokenWireIsNotTheFaultOfWhoLeftInGoodOrder) {
  ScriptedGroup group(3);
  group.Notice(kHalf, 1, {.kind = ControlMessage::Kind::kLeft, .id = ScriptedGroup::kEpoch});
  group.wire.At(kHalf + absl::Nanoseconds(1), [&] { group.wire.broken = absl::UnavailableError("the job ends"); });
  group.wire.busy_pause = absl::Milliseconds(1);
  EXPECT_THAT(group.Barrier(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("the job ends")));
}

// Its side of the making failed: the group was given up before it began.
TEST(AbsenceTest, VoidedProposalEndsACallOfTheGroup) {
  for (const bool pair : {false, true}) {
    for (const int peer : {1, 2}) {
      ScriptedGroup group(3);
      group.Notice(kHalf, peer,
                   {.kind = ControlMessage::Kind::kVoid, .id = 10 * peer, .a = -1, .body = EncodeStatus(Absent(0))});
      float value = 0;
      const TensorView one(&value, DType::kF32, Shape({1}));
      const absl::Status status = pair ? group.communicator->Recv(one, peer, *group.stream) : group.Barrier();
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("gave the group up")));
      EXPECT_EQ(group.wire.Now(), kHalf) << status;
    }
  }
}

// A pair hears of the end of its group, however far the peer had come with the calls of that.
TEST(AbsenceTest, EndOfTheGroupEndsACallOfAPair) {
  ScriptedGroup group(3);
  group.Notice(kHalf, 1, GaveUp(Absent(2), /*records=*/5));
  float value = 0;
  const absl::Status status = group.communicator->Recv(TensorView(&value, DType::kF32, Shape({1})), 1, *group.stream);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 gave the group up")));
  EXPECT_EQ(group.wire.Now(), kHalf) << status;
}

// What a rank had sent before it died may be on its way still: one more look, before it is called gone.
TEST(AbsenceTest, RecordThatArrivesWithTheDeathIsTaken) {
  ScriptedGroup group(3);
  group.wire.At(absl::Milliseconds(100), [&] { group.wire.Echo(2); });
  group.wire.At(kHalf, [&] { group.wire.dead.insert(1); });
  bool seen = false;
  group.wire.on_health = [&](int peer) {
    if (peer == 1 && group.wire.dead.count(1) != 0 && !std::exchange(seen, true)) group.wire.Echo(1);
  };
  EXPECT_OK(group.Barrier());
  EXPECT_TRUE(seen);
}

// Everything has come, but one rank takes nothing.
TEST(AbsenceTest, RankThatDoesNotTakeARecordIsNamed) {
  ScriptedGroup group(3);
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.peer == 1 && message.tag != kControlTag; };
  group.wire.At(absl::Milliseconds(1), [&] { group.wire.Echo(1), group.wire.Echo(2); });
  const absl::Status status = group.Barrier();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("does not take this rank's record")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(1)) << status;
}

// Late is who has not come, not who is slow to take; and each call counts for itself.
TEST(AbsenceTest, OnlyWhoHasNotComeIsLate) {
  ScriptedGroup group(3, {}, {.after = absl::Milliseconds(100), .report = [](const StragglerReport&) {}});
  group.wire.stays = [](const ScriptedWire::Sent& message) { return message.peer == 1 && message.tag != kControlTag; };
  group.wire.At(absl::Milliseconds(1), [&] { group.wire.Echo(1); });
  group.wire.At(kHalf, [&] {
    group.wire.Echo(2);
    group.wire.Take(1);
  });
  ASSERT_OK(group.Barrier());
  group.wire.stays = [](const ScriptedWire::Sent&) { return false; };
  group.wire.At(kHalf + absl::Milliseconds(1), [&] { group.wire.Echo(1), group.wire.Echo(2); });
  ASSERT_OK(group.Barrier());
  EXPECT_EQ(group.communicator->stragglers()[1].calls, 0);
  EXPECT_EQ(group.communicator->stragglers()[2].calls, 1);
}

// Another thread of this rank gives the group up, such as because two of them use it at once.
TEST(AbsenceTest, WaitEndsWhenThisRankGivesTheGroupUp) {
  ScriptedGroup group(3);
  group.wire.At(kHalf, [&] { group.transport->Abort(absl::FailedPreconditionError("two threads")); });
  EXPECT_THAT(group.Barrier(), StatusIs(absl::StatusCode::kAborted, HasSubstr("two threads")));
  EXPECT_EQ(group.wire.Now(), kHalf);
}

// The limit is that of the call, however many agreements it takes.
TEST(AbsenceTest, SecondAgreementOfACallHasWhatIsLeftOfItsLimit) {
  ScriptedGroup group(2);
  const Call call{.operation = Operation::kBarrier, .sequence = 0, .limit = kLimit};
  group.wire.At(absl::Milliseconds(800), [&] { group.wire.Echo(1); });
  Agreement agreement;
  ASSERT_OK(group.transport->Agree(call, {}, &agreement));
  EXPECT_THAT(group.transport->Agree(call, {}, &agreement),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("")));
  EXPECT_LE(group.wire.Now(), kLimit + absl::Milliseconds(300)) << "the limit, and word to the peers";
  EXPECT_THAT(group.transport->Agree(call, {}, &agreement), StatusIs(absl::StatusCode::kAborted, HasSubstr("")));
}

// ---- Payload: 64 bytes a piece, from and to rank 1 and rank 2.

constexpr int64_t kPieces = 4, kFloats = 16 * kPieces;

struct PayloadGroup : ScriptedGroup {
  PayloadGroup() : ScriptedGroup(3, {.eager_bytes = 0, .piece_bytes = 64, .window = 4}) {
    wire.At(absl::Milliseconds(1), [this] { wire.Echo(1), wire.Echo(2); });  // the records
  }
  // All pieces that are sent to `peer` come back from it, at most `limit`.
  void EchoPieces(int peer, int limit) {
    std::vector<ScriptedWire::Sent> pieces;
    for (const ScriptedWire::Sent& m : wire.sent) {
      if (m.peer == peer && m.tag != kControlTag && m.bytes.size() == 64) pieces.push_back(m);
    }
    for (int i = first[peer]; i < std::min<int>(limit, static_cast<int>(pieces.size())); ++i) {
      wire.Deliver(peer, pieces[i].tag, pieces[i].bytes);
      first[peer] = i + 1;
    }
  }
  absl::Status Exchange() {
    const Shape shape({3 * kFloats});
    return communicator->AllToAll(ConstTensorView(out.data(), DType::kF32, shape),
                                  TensorView(in.data(), DType::kF32, shape), *stream);
  }
  std::vector<float> out = std::vector<float>(3 * kFloats, 1.0f), in = std::vector<float>(3 * kFloats);
  std::map<int, int> first;
};

// Pieces that were sent before the notice can still come; the next one cannot, and is not waited for.
TEST(AbsenceTest, PiecesThatWereNotSentAreNotWaitedFor) {
  for (const int64_t sent : {0, 2, 3}) {
    PayloadGroup group;
    group.wire.At(absl::Milliseconds(2), [&] { group.EchoPieces(2, kPieces); });
    group.Notice(kHalf, 1, GaveUp(Absent(2), /*records=*/1, sent));
    group.wire.At(absl::Milliseconds(700), [&group, sent] { group.EchoPieces(1, static_cast<int>(sent)); });
    const absl::Status status = group.Exchange();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 gave the group up")));
    EXPECT_LT(group.wire.Now(), kLimit) << sent << " pieces; " << status;
    EXPECT_EQ(group.wire.Now(), sent > 0 ? absl::Milliseconds(700) : kHalf) << "what was on its way is waited for";
  }
}

// Who does not take payload may wait for who does not send it.
TEST(AbsenceTest, WhoSendsNothingIsNamedBeforeWhoTakesNothing) {
  PayloadGroup group;
  group.wire.stays = [](const ScriptedWire::Sent& m) { return m.peer == 2 && m.bytes.size() == 64; };
  group.wire.At(absl::Milliseconds(2), [&] { group.EchoPieces(2, kPieces); });
  const absl::Status status = group.Exchange();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("its payload has not come")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(1)) << status;
  // With all payload here it is who takes nothing.
  PayloadGroup other;
  other.wire.stays = [](const ScriptedWire::Sent& m) { return m.peer == 2 && m.bytes.size() == 64; };
  other.wire.At(absl::Milliseconds(2), [&] { other.EchoPieces(1, kPieces), other.EchoPieces(2, kPieces); });
  const absl::Status takes_nothing = other.Exchange();
  EXPECT_THAT(takes_nothing, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("does not take its payload")));
  EXPECT_THAT(NamedRanks(takes_nothing), ElementsAre(2)) << takes_nothing;
}

// Pieces that are here and fill the room for what waits to be combined: the next is not missing.
TEST(AbsenceTest, RankWhosePiecesWaitToBeCombinedIsNotMissing) {
  PayloadGroup group;
  group.wire.At(absl::Milliseconds(2), [&group] { group.EchoPieces(2, 2); });
  const absl::Status status = group.communicator->ReduceScatter(
      ConstTensorView(group.out.data(), DType::kF32, Shape({3 * kFloats})),
      TensorView(group.in.data(), DType::kF32, Shape({kFloats})), ReduceOp::kSum, *group.stream);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("its payload has not come")));
  EXPECT_THAT(NamedRanks(status), ElementsAre(1)) << status;
}

// Payload that keeps coming does not keep a call alive.
TEST(AbsenceTest, LimitHoldsWhilePayloadMoves) {
  PayloadGroup group;
  group.out.assign(3 * 16 * 3000, 1.0f);
  group.in.assign(3 * 16 * 3000, 0.0f);
  for (int ms = 2; ms < 2900; ms += 3) {
    group.wire.At(absl::Milliseconds(ms), [&group] {
      group.EchoPieces(1, group.first[1] + 1);
      group.EchoPieces(2, group.first[2] + 1);
    });
  }
  group.wire.At(absl::Milliseconds(2), [&] { group.wire.busy_pause = absl::Milliseconds(3); });
  group.wire.At(absl::Milliseconds(1400), [&] { group.wire.busy_pause = absl::ZeroDuration(); });
  const Shape shape({3 * 16 * 3000});
  const absl::Status status =
      group.communicator->AllToAll(ConstTensorView(group.out.data(), DType::kF32, shape),
                                   TensorView(group.in.data(), DType::kF32, shape), *group.stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_GE(group.wire.Now(), kLimit);
  EXPECT_LE(group.wire.Now(), kLimit + absl::Milliseconds(300)) << "16 polls, and word to the peers";
}

}  // namespace
}  // namespace evenkeel::comm
