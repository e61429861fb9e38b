#include "evenkeel/comm/two_level.h"

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
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

// What goes from rank i to rank j: some of everything, with empty rows.
int64_t CountOf(int i, int j) { return i % 3 == 2 ? 0 : 1 + (5 * i + 3 * j) % 4; }

struct Layout {
  const char* name;
  std::vector<int> nodes;   // of each world rank
  std::vector<int> ranks;   // of the group, in its order
  bool exchanges = true;    // gathers and exchanges go in two levels
  bool reductions = false;  // sums too
};

const Layout kLayouts[] = {
    {"blocks", {0, 0, 1, 1, 2, 2}, {0, 1, 2, 3, 4, 5}, true, true},
    {"nodes of three", {0, 0, 0, 1, 1, 1}, {0, 1, 2, 3, 4, 5}, true, false},
    {"interleaved", {0, 1, 0, 1, 0, 1}, {0, 1, 2, 3, 4, 5}, true, false},
    {"scattered", {7, 7, 3, 3, 3, 7}, {0, 1, 2, 3, 4, 5}, true, false},
    {"a part of the world, turned round", {0, 0, 1, 1, 0, 0, 1, 1}, {6, 3, 4, 1}, true, true},
    {"uneven", {0, 0, 0, 1, 1}, {0, 1, 2, 3, 4}, false, false},
    {"very uneven", {0, 1, 1, 2, 2, 2}, {0, 1, 2, 3, 4, 5}, false, false},
    {"a rank a node", {0, 1, 2}, {0, 1, 2}, false, false},
};

// Bytes that group rank `self` sends, from the rules alone; [0] within its node, [1] between nodes.
class Books {
 public:
  Books(const Layout& layout, int self) : layout_(layout), self_(self) {
    for (int r = 0; r < size(); ++r) {
      if (node(r) != node(self)) continue;
      if (r < self) ++local_;
    }
  }
  std::vector<int64_t> Gather() const {
    std::vector<int64_t> sent(2);
    for (int r = 0; r < size(); ++r) {
      if (r == self_) continue;
      if (!layout_.exchanges) sent[node(r) != node(self_)] += CountOf(self_, 0);
      // To the others of the node what all ranks with this local index have, to the other nodes the own block.
      if (layout_.exchanges && node(r) == node(self_))
        sent[0] += Column(local_, [](int from) { return CountOf(from, 0); });
      if (layout_.exchanges && node(r) != node(self_) && LocalOf(r) == local_) sent[1] += CountOf(self_, 0);
    }
    return sent;
  }
  // Partial sums have `partial_bytes` for `element_bytes`; both forms in bytes.
  std::vector<int64_t> Reduce(int64_t element_bytes, int64_t partial_bytes) const {
    std::vector<int64_t> sent(2);
    for (int r = 0; r < size(); ++r) {
      if (r == self_) continue;
      const bool near = node(r) == node(self_);
      if (!layout_.reductions) sent[near ? 0 : 1] += CountOf(r, 0) * element_bytes;
      if (layout_.reductions && near) {
        sent[0] += Column(LocalOf(r), [](int to) { return CountOf(to, 0); }) * element_bytes;
      }
      if (layout_.reductions && !near && LocalOf(r) == local_) sent[1] += CountOf(r, 0) * partial_bytes;
    }
    return sent;
  }
  std::vector<int64_t> Exchange() const {
    std::vector<int64_t> sent(2);
    for (int r = 0; r < size(); ++r) {
      if (r == self_) continue;
      const bool near = node(r) == node(self_);
      if (!layout_.exchanges) sent[near ? 0 : 1] += CountOf(self_, r);
      if (layout_.exchanges && near) {
        sent[0] += Column(LocalOf(r), [this](int to) { return CountOf(self_, to); });
      }
      if (layout_.exchanges && !near && LocalOf(r) == local_) {
        for (int from = 0; from < size(); ++from) {
          if (node(from) == node(self_)) sent[1] += CountOf(from, r);
        }
      }
    }
    return sent;
  }

 private:
  int size() const { return static_cast<int>(layout_.ranks.size()); }
  int node(int r) const { return layout_.nodes[layout_.ranks[r]]; }
  int LocalOf(int rank) const {
    int local = 0;
    for (int r = 0; r < rank; ++r) local += node(r) == node(rank) ? 1 : 0;
    return local;
  }
  // Over the ranks with this local index on all nodes.
  template <typename Count>
  int64_t Column(int local, const Count& count) const {
    int64_t sum = 0;
    for (int r = 0; r < size(); ++r) sum += LocalOf(r) == local ? count(r) : 0;
    return sum;
  }

  const Layout& layout_;
  const int self_;
  int local_ = 0;
};

// One rank's part: a call of each kind with uneven counts, and what it booked.
absl::Status CheckBooks(Backend& backend, const Layout& layout) {
  const Group group{.axis = Axis::kEp, .name = "ep", .ranks = layout.ranks};
  const int self = group.IndexOf(backend.rank()), size = group.size();
  if (self < 0) return absl::OkStatus();
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const auto ep, backend.CreateGroup(group));
  LedgerCounts before = backend.ledger().Snapshot();
  const auto check = [&](const char* what, const std::vector<int64_t>& wanted) {
    const LedgerCounts now = backend.ledger().Snapshot();
    const auto sent = (now - before).sent[static_cast<int>(Axis::kEp)];
    before = now;
    const int64_t within = sent[static_cast<int>(LinkClass::kIntraNode)].bytes_sent;
    const int64_t between = sent[static_cast<int>(LinkClass::kInterNode)].bytes_sent;
    if (within == wanted[0] && between == wanted[1]) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(layout.name, ", ", what, ", rank ", self, ": ", within, " and ", between,
                                            " bytes, wanted ", wanted[0], " and ", wanted[1]));
  };
  std::vector<int64_t> counts(size), to(size), from(size);
  int64_t total = 0, out = 0, in = 0;
  for (int r = 0; r < size; ++r) {
    total += counts[r] = CountOf(r, 0);
    out += to[r] = CountOf(self, r);
    in += from[r] = CountOf(r, self);
  }
  std::vector<std::byte> source(400), target(400);
  const auto send = [&](DType dtype, int64_t n) { return ConstTensorView(source.data(), dtype, Shape({n})); };
  const auto recv = [&](DType dtype, int64_t n) { return TensorView(target.data(), dtype, Shape({n})); };
  const Books books(layout, self);
  EK_RETURN_IF_ERROR(ep->AllGatherV(send(DType::kU8, counts[self]), recv(DType::kU8, total), counts, *stream));
  EK_RETURN_IF_ERROR(check("all_gather_v", books.Gather()));
  for (const DType dtype : {DType::kBF16, DType::kF64}) {
    EK_RETURN_IF_ERROR(
        ep->ReduceScatterV(send(dtype, total), recv(dtype, counts[self]), counts, ReduceOp::kSum, *stream));
    const int64_t bytes = SizeOf(dtype);
    EK_RETURN_IF_ERROR(check("reduce_scatter_v", books.Reduce(bytes, dtype == DType::kBF16 ? 4 : bytes)));
  }
  EK_RETURN_IF_ERROR(ep->AllToAllV(send(DType::kU8, out), to, recv(DType::kU8, in), from, *stream));
  return check("all_to_all_v", books.Exchange());
}

// Nodes of all kinds, groups in any order, uneven counts: the books of every rank by link class. Nodes with different
// numbers of ranks are no grid and keep the direct form.
TEST(TwoLevelTest, BooksOfEveryLayoutAreTheClosedForms) {
  for (const Layout& layout : kLayouts) {
    auto world = InProcessWorld::Create(
        {.world_size = static_cast<int>(layout.nodes.size()), .topology = Topology(layout.nodes), .two_level = true});
    ASSERT_OK(world);
    for (const absl::Status& status :
         RunRanks(**world, [&layout](Backend& backend) { return CheckBooks(backend, layout); })) {
      EXPECT_OK(status);
    }
  }
}

}  // namespace
}  // namespace evenkeel::comm
