#include "evenkeel/comm/byte_ledger.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(ByteLedgerTest, BooksByAxisAndLink) {
  ByteLedger ledger;
  ledger.AddMessage(Axis::kEp, LinkClass::kIntraNode, 100);
  ledger.AddMessage(Axis::kEp, LinkClass::kInterNode, 7);
  ledger.AddMessage(Axis::kTp, LinkClass::kIntraNode, 0);  // an empty payload is no message
  ledger.AddCollective(Axis::kEp);
  ledger.AddControl(64);
  const LedgerCounts counts = ledger.Snapshot();
  EXPECT_EQ(counts.bytes(Axis::kEp), 107);
  EXPECT_EQ(counts.bytes(Axis::kTp), 0);
  EXPECT_EQ(counts.sent[static_cast<int>(Axis::kEp)][static_cast<int>(LinkClass::kInterNode)],
            (LedgerEntry{.bytes_sent = 7, .messages_sent = 1}));
  EXPECT_EQ(counts.sent[static_cast<int>(Axis::kTp)][0].messages_sent, 0);
  EXPECT_EQ(counts.total_collectives(), 1);
  EXPECT_EQ(counts.control_bytes, 64);
}

TEST(ByteLedgerTest, DifferenceIsTheTrafficBetween) {
  ByteLedger ledger;
  ledger.AddMessage(Axis::kDp, LinkClass::kIntraNode, 5);
  ledger.AddCollective(Axis::kDp);
  const LedgerCounts before = ledger.Snapshot();
  ledger.AddMessage(Axis::kDp, LinkClass::kIntraNode, 11);
  ledger.AddControl(3);
  const LedgerCounts between = ledger.Snapshot() - before;
  EXPECT_EQ(between.bytes(Axis::kDp), 11);
  EXPECT_EQ(between.total_collectives(), 0);
  EXPECT_EQ(between.control_bytes, 3);
}

TEST(ByteLedgerTest, LosesNothingUnderThreads) {
  ByteLedger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger] {
      for (int i = 0; i < 10000; ++i) ledger.AddMessage(Axis::kWorld, LinkClass::kIntraNode, 3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.Snapshot().bytes(Axis::kWorld), 120000);
}

TEST(TopologyTest, BlocksAndLinks) {
  const auto topology = Topology::Blocks(5, 2);
  ASSERT_TRUE(topology.ok());
  EXPECT_EQ(topology->node(4), 2);
  EXPECT_EQ(topology->Link(0, 1), LinkClass::kIntraNode);
  EXPECT_EQ(topology->Link(1, 2), LinkClass::kInterNode);
  EXPECT_FALSE(Topology::Blocks(4, 0).ok());
}

}  // namespace
}  // namespace evenkeel::comm
