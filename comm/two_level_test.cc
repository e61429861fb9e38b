#include "evenkeel/comm/two_level.h"

#include <memory>
#include <vector>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

TEST(NodeGridTest, NeedsSeveralNodesWithEquallyManyRanks) {
  const auto grid_of = [](std::vector<int> nodes) {
    Topology topology(nodes);
    return NodeGrid::Create(WorldGroup(topology.world_size()), topology);
  };
  EXPECT_FALSE(grid_of({0, 0, 0, 0}).has_value());
  EXPECT_FALSE(grid_of({0, 1, 2}).has_value());
  EXPECT_FALSE(grid_of({0, 0, 1}).has_value());
  const auto blocks = grid_of({5, 5, 2, 2});
  ASSERT_TRUE(blocks.has_value());
  EXPECT_EQ(blocks->num_nodes(), 2);
  EXPECT_EQ(blocks->node(2), 1);  // nodes count in the order of their first rank
  EXPECT_TRUE(blocks->nodes_are_subtrees());
  const auto interleaved = grid_of({0, 1, 0, 1});
  ASSERT_TRUE(interleaved.has_value());
  EXPECT_EQ(interleaved->RankAt(1, 1), 3);
  EXPECT_FALSE(interleaved->nodes_are_subtrees());
  EXPECT_FALSE(grid_of({0, 0, 0, 1, 1, 1})->nodes_are_subtrees());  // three ranks are no subtree
}

enum class Op { kGather, kReduce, kExchange, kExchangeV };

struct Sent {
  int64_t within = 0;
  int64_t between = 0;
  int64_t messages_between = 0;
};

// What rank 1 of `nodes` x `per_node` ranks sends for blocks of `n` elements.
Sent Measure(Op op, DType dtype, int nodes, int per_node, int64_t n, bool two_level) {
  const int ranks = nodes * per_node;
  auto world = InProcessWorld::Create(
      {.world_size = ranks, .topology = *Topology::Blocks(ranks, per_node), .two_level = two_level});
  EK_CHECK_OK(world);
  const auto statuses = RunRanks(**world, [op, dtype, n, ranks](Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(ranks)));
    std::vector<std::byte> send(n * ranks * SizeOf(dtype)), recv(n * ranks * SizeOf(dtype));
    const TensorView many_in(send.data(), dtype, Shape({n * ranks})), many_out(recv.data(), dtype, Shape({n * ranks}));
    const TensorView one_in(send.data(), dtype, Shape({n})), one_out(recv.data(), dtype, Shape({n}));
    const std::vector<int64_t> counts(ranks, n);
    switch (op) {
      case Op::kGather:
        return group->AllGather(one_in, many_out, *stream);
      case Op::kReduce:
        return group->ReduceScatter(many_in, one_out, ReduceOp::kSum, *stream);
      case Op::kExchange:
        return group->AllToAll(many_in, many_out, *stream);
      case Op::kExchangeV:
        return group->AllToAllV(many_in, counts, many_out, counts, *stream);
    }
    return absl::OkStatus();
  });
  EK_CHECK_OK(FirstFailure(statuses));
  const LedgerCounts counts = (*world)->backend(1).ledger().Snapshot();
  const auto& sent = counts.sent[static_cast<int>(Axis::kWorld)];
  const LedgerEntry& between = sent[static_cast<int>(LinkClass::kInterNode)];
  return {sent[static_cast<int>(LinkClass::kIntraNode)].bytes_sent, between.bytes_sent, between.messages_sent};
}

TEST(TwoLevelTest, BytesByLinkClassAreTheClosedForms) {
  constexpr int64_t kElements = 10;
  for (const int nodes : {2, 3}) {
    for (const int per_node : {2, 4}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const int64_t block = kElements * SizeOf(dtype);
        const int64_t n = nodes, l = per_node;
        const Sent gather = Measure(Op::kGather, dtype, nodes, per_node, kElements, true);
        EXPECT_EQ(gather.within, n * (l - 1) * block);
        EXPECT_EQ(gather.between, (n - 1) * block);
        const Sent reduce = Measure(Op::kReduce, dtype, nodes, per_node, kElements, true);
        EXPECT_EQ(reduce.within, n * (l - 1) * block);
        EXPECT_EQ(reduce.between, (n - 1) * kElements * 4);  // partial sums are f32
        for (const Op op : {Op::kExchange, Op::kExchangeV}) {
          const Sent exchange = Measure(op, dtype, nodes, per_node, kElements, true);
          EXPECT_EQ(exchange.within, n * (l - 1) * block);
          EXPECT_EQ(exchange.between, (n - 1) * l * block);
          EXPECT_EQ(exchange.messages_between, n - 1);
        }
        for (const Op op : {Op::kGather, Op::kReduce, Op::kExchange, Op::kExchangeV}) {
          const Sent direct = Measure(op, dtype, nodes, per_node, kElements, false);
          EXPECT_EQ(direct.within, (l - 1) * block);
          EXPECT_EQ(direct.between, (n - 1) * l * block);
          EXPECT_EQ(direct.messages_between, (n - 1) * l);
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::comm
