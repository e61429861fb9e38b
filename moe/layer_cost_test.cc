// What a layer costs, counted: rows, bytes and memory grow with s and with k and never with their squares, and the host
// issues the same calls however many tokens there are. Times are in //tools/bench:moe.
#include <cstdint>
#include <string>

#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kFewTokens = 16;

// A batch of `tokens` that repeats the same kFewTokens on each replica, so that its routing is the small one's,
// repeated. The capacity is above what any expert gets.
LayerCase Repeated(int64_t tokens, int top_k) {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = top_k, .tokens = tokens, .capacity_factor = 4};
  c.dtype = DType::kF32;
  c.taken_from = [tokens, hidden = c.hidden](const std::string& name, int64_t index) {
    if (name != "x" && name != "dy") return index;
    const int64_t row = index / hidden;
    return (row / tokens * kFewTokens + row % tokens % kFewTokens) * hidden + index % hidden;
  };
  return c;
}

// Sums over the ranks.
struct Cost {
  int64_t rows = 0;
  int64_t ep_bytes = 0, tp_bytes = 0;
  int64_t peak_bytes = 0, tape_bytes = 0;
  int64_t host_operations = 0, launches = 0, allocations = 0, collectives = 0;
};

Cost CostOf(const LayerCase& c, const std::string& order) {
  Cost cost;
  for (const RankRun& rank : RunOrder(c, order).ranks) {
    cost.rows += rank.decision.num_kept();
    for (const comm::LedgerCounts* counts : {&rank.forward, &rank.backward}) {
      cost.ep_bytes += counts->bytes(comm::Axis::kEp);
      cost.tp_bytes += counts->bytes(comm::Axis::kTp);
    }
    cost.peak_bytes += rank.counted_memory.forward_peak + rank.counted_memory.backward_peak;
    cost.tape_bytes += rank.counted_memory.tape;
    for (const WorkCounts* work : {&rank.forward_work, &rank.backward_work}) {
      cost.host_operations += work->host_operations;
      cost.launches += work->launches;
      cost.allocations += work->allocations;
      cost.collectives += work->collectives;
    }
  }
  return cost;
}

void ExpectSameCalls(const Cost& a, const Cost& b, const std::string& what) {
  EXPECT_GT(a.host_operations, 0) << what;
  EXPECT_EQ(a.host_operations, b.host_operations) << what;
  EXPECT_EQ(a.launches, b.launches) << what;
  EXPECT_EQ(a.allocations, b.allocations) << what;
  EXPECT_EQ(a.collectives, b.collectives) << what;
}

TEST(LayerCostTest, RowsBytesAndMemoryGrowWithTheTokens) {
  for (const std::string& order : AllTensorParallelOrders()) {
    const Cost few = CostOf(Repeated(kFewTokens, 2), order);
    for (int64_t times : {2, 4, 16}) {
      const std::string what = Name(Repeated(times * kFewTokens, 2), order);
      const Cost many = CostOf(Repeated(times * kFewTokens, 2), order);
      EXPECT_EQ(many.rows, times * few.rows) << what;
      EXPECT_EQ(many.ep_bytes, times * few.ep_bytes) << what;
      EXPECT_EQ(many.tp_bytes, times * few.tp_bytes) << what;
      // Row lists of ragged orders differ by lane, hence no equality.
      EXPECT_LE(many.peak_bytes, times * few.peak_bytes * 1.05) << what;
      EXPECT_LE(many.tape_bytes, times * few.tape_bytes * 1.05) << what;
      ExpectSameCalls(few, many, what);
    }
  }
}

TEST(LayerCostTest, RowsBytesAndMemoryGrowWithTheRoutes) {
  for (const std::string& order : AllTensorParallelOrders()) {
    const Cost one = CostOf(Repeated(kFewTokens, 1), order);
    for (int k : {2, 3, 4}) {
      const std::string what = Name(Repeated(kFewTokens, k), order);
      const Cost more = CostOf(Repeated(kFewTokens, k), order);
      EXPECT_EQ(more.rows, k * one.rows) << what;
      // Padded: slots. Ragged: the rows that go elsewhere, at most all, and tokens, which k does not multiply.
      const bool padded = order != "token_sliced" && order != "dedup";
      if (padded) {
        EXPECT_EQ(more.ep_bytes, k * one.ep_bytes) << what;
        EXPECT_EQ(more.tp_bytes, k * one.tp_bytes) << what;
      } else {
        const LayerCase c = Repeated(kFewTokens, k);
        EXPECT_LE(more.ep_bytes, 4 * more.rows / c.tp * c.hidden * 4) << what;
      }
      EXPECT_LE(more.peak_bytes, k * one.peak_bytes * 1.05) << what;
      ExpectSameCalls(one, more, what);
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
