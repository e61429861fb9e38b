#include "evenkeel/comm/message/wait_notes.h"

#include <optional>
#include <string>
#include <vector>

#include "evenkeel/comm/message/testing/scripted_wire.h"
#include "evenkeel/runtime/base/philox.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

WaitNotes Ring(int size) {
  WaitNotes notes;
  for (int rank = 0; rank < size; ++rank) {
    notes[rank] = {rank, {(rank + 1) % size}, "waits in barrier of group g" + std::to_string(rank)};
  }
  return notes;
}

TEST(WaitNotesTest, NotesComeBackAsTheyWere) {
  WaitNotes notes = Ring(4);
  notes[2].waits_for = {3, 0, 1};
  notes[3].waits_for = {};
  EXPECT_EQ(DecodeWaitNotes(EncodeWaitNotes(notes, 2), 4), notes);
  EXPECT_EQ(DecodeWaitNotes("", 4), WaitNotes());
  EXPECT_EQ(DecodeWaitNotes(EncodeWaitNotes(notes, 2), 3), std::nullopt) << "a rank outside the world";
}

// However many there are: one control message, and the teller's own wait is in it.
TEST(WaitNotesTest, ManyNotesFitOneMessage) {
  WaitNotes notes = Ring(100);
  for (auto& [rank, note] : notes) {
    note.waits_for.assign(50, 1);
    note.text.assign(1000, 'x');
  }
  const ControlMessage message{.kind = ControlMessage::Kind::kWaiting, .body = EncodeWaitNotes(notes, 99)};
  EXPECT_LE(static_cast<int64_t>(EncodeControl(message, 1).size()), kEagerMessageBytes);
  const std::optional<WaitNotes> back = DecodeWaitNotes(message.body, 100);
  ASSERT_TRUE(back.has_value());
  EXPECT_GE(back->size(), 8u);
  EXPECT_EQ(back->count(99), 1u);
}

TEST(WaitNotesTest, AnyBytesAreNotesOrNothing) {
  const PhiloxStream random(PhiloxKey(6));
  const std::string good = EncodeWaitNotes(Ring(4), 0);
  for (uint64_t run = 0; run < 3000; ++run) {
    std::string bytes = good.substr(0, random.Below(100 * run, good.size() + 1));
    for (uint64_t i = 0; i < run % 4 && !bytes.empty(); ++i) {
      bytes[random.Below(100 * run + 2 * i + 1, bytes.size())] =
          static_cast<char>(random.Below(100 * run + 2 * i + 2, 256));
    }
    const std::optional<WaitNotes> notes = DecodeWaitNotes(bytes, 4);
    if (!notes.has_value()) continue;
    for (const auto& [rank, note] : *notes) {
      EXPECT_TRUE(rank >= 0 && rank < 4);
      for (const int other : note.waits_for) EXPECT_TRUE(other >= 0 && other < 4);
    }
  }
}

TEST(WaitNotesTest, CyclesAreFoundFromInsideAndOutside) {
  EXPECT_EQ(
      DescribeCycle(0, Ring(2)),
      ", they wait for each other: world rank 0 waits in barrier of group g0 for world rank 1, world rank 1 waits "
      "in barrier of group g1 for world rank 0");
  WaitNotes notes = Ring(3);
  notes[5] = {5, {4, 2}, "waits in send of group g5"};  // nothing is known of rank 4
  EXPECT_EQ(
      DescribeCycle(5, notes),
      ", they wait for each other: world rank 2 waits in barrier of group g2 for world rank 0, world rank 0 waits "
      "in barrier of group g0 for world rank 1, world rank 1 waits in barrier of group g1 for world rank 2");
  notes.erase(1);
  EXPECT_EQ(DescribeCycle(5, notes), "");
  EXPECT_EQ(DescribeWaitOf(5, notes), "; it waits in send of group g5 for world ranks 4,2");
  EXPECT_EQ(DescribeWaitOf(1, notes), "");
}

TEST(WaitNotesTest, NewestNoteOfALivingGroupCounts) {
  ScriptedWire wire(3);
  Mailroom mailroom(&wire);
  int64_t serial = 0;
  const auto arrive = [&](const WaitNotes& notes, int64_t epoch, int64_t count) {
    wire.Deliver(
        1, kControlTag,
        EncodeControl(
            {.kind = ControlMessage::Kind::kWaiting, .id = epoch, .a = count, .body = EncodeWaitNotes(notes, 1)},
            serial++));
    mailroom.Poll();
  };
  mailroom.OpenEpoch(3);
  arrive(Ring(3), 3, 1);
  WaitNotes expected = Ring(3);
  expected.erase(0);  // about this rank itself
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), expected);
  arrive({}, 3, 2);  // it goes on
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), WaitNotes());
  arrive(Ring(3), 3, 1);  // overtaken
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), WaitNotes());
  arrive(Ring(3), 3, 3);
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), expected);
  mailroom.CloseEpoch(3);
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), WaitNotes());
  arrive(Ring(3), 3, 4);  // the group has ended
  EXPECT_EQ(KnownWaits(mailroom, 0, 3), WaitNotes());
}

}  // namespace
}  // namespace evenkeel::comm
