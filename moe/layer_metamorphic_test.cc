// Changes of a layer's input whose effect on its output is known without a reference, under every order. The router's
// own are in router_metamorphic_test.cc; no tokens on a rank and all tokens to one expert are in layer_rows_test.cc.
#include <string>
#include <vector>

#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

// Values of the rows `tokens` of a [., hidden] tensor.
std::vector<double> RowsOf(const std::vector<double>& all, const std::vector<int64_t>& tokens, int64_t hidden) {
  std::vector<double> rows;
  for (int64_t t : tokens) rows.insert(rows.end(), all.begin() + t * hidden, all.begin() + (t + 1) * hidden);
  return rows;
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> range;
  for (int64_t i = begin; i < end; ++i) range.push_back(i);
  return range;
}

LayerCase Dropless() {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 2, .tokens = 8, .dtype = DType::kF32};
  c.mode = CapacityMode::kNoDrop;
  return c;
}

// Tokens of one replica in another order: outputs and input gradients go along, bit by bit; weights see the same rows.
TEST(LayerMetamorphicTest, PermutedTokensGivePermutedOutputs) {
  const std::vector<int64_t> from = {5, 2, 7, 0, 3, 6, 1, 4};
  LayerCase c = Dropless();
  c.dtype = DType::kF64;
  LayerCase permuted = c;
  permuted.taken_from = [&](const std::string& name, int64_t index) {
    const int64_t row = index / c.hidden;
    if ((name != "x" && name != "dy") || row >= c.tokens) return index;  // replica 0 only
    return from[row] * c.hidden + index % c.hidden;
  };
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun plain = RunOrder(c, order), run = RunOrder(permuted, order);
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      const std::vector<int64_t> rows = run.ranks[r].replica == 0 ? from : Range(0, c.tokens);
      EXPECT_EQ(run.ranks[r].values.y, RowsOf(plain.ranks[r].values.y, rows, c.hidden)) << order;
      EXPECT_EQ(run.ranks[r].values.dx, RowsOf(plain.ranks[r].values.dx, rows, c.hidden)) << order;
      for (const Member& member : kExpertMembers) {
        EXPECT_LE(MaxDifference(run.ranks[r].values.*member.values, plain.ranks[r].values.*member.values), 1e-12)
            << order << " " << member.name;
      }
    }
  }
}

// Experts renamed together with their weights (router rows too): the same layer. Sums over a token's experts may take
// another order, so f64 to rounding; the router computes in f32.
TEST(LayerMetamorphicTest, RenamedExpertsGiveTheSameOutputs) {
  const std::vector<int64_t> from = {2, 0, 3, 1};
  LayerCase c = Dropless();
  c.dtype = DType::kF64;
  c.bias = true;
  LayerCase renamed = c;
  renamed.taken_from = [&](const std::string& name, int64_t index) {
    int64_t size = 0;  // of one expert
    if (name == "router" || name == "b_out") size = c.hidden;
    if (name == "b_in") size = c.ffn;
    if (name == "w_in" || name == "w_out") size = c.hidden * c.ffn;
    return size == 0 ? index : from[index / size] * size + index % size;
  };
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun plain = RunOrder(c, order), run = RunOrder(renamed, order);
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      const RankRun &a = plain.ranks[r], &b = run.ranks[r];
      ASSERT_EQ(a.decision.expert.size(), b.decision.expert.size());
      for (size_t i = 0; i < a.decision.expert.size(); ++i) {
        EXPECT_EQ(from[b.decision.expert[i]], a.decision.expert[i]) << order << " route " << i;
      }
      EXPECT_LE(MaxDifference(b.values.y, a.values.y), 1e-6 * (1 + MaxAbs(a.values.y))) << order;
      EXPECT_LE(MaxDifference(b.values.dx, a.values.dx), 1e-5 * (1 + MaxAbs(a.values.dx))) << order;
      for (int64_t e = 0; e < c.experts; ++e) {
        EXPECT_LE(MaxDifference(RowsOf(b.values.router, {e}, c.hidden), RowsOf(a.values.router, {from[e]}, c.hidden)),
                  1e-5 * (1 + MaxAbs(a.values.router)))
            << order;
      }
    }
  }
}

// A batch in two halves, nothing dropped: every token's output and gradient has the same bits, and the halves' weight
// gradients add up to the whole's.
TEST(LayerMetamorphicTest, SplittingADroplessBatchChangesNoToken) {
  LayerCase whole = Dropless();
  whole.dtype = DType::kF64;
  const int64_t cut = 3;
  const auto half = [&](int64_t begin, int64_t end) {
    LayerCase c = whole;
    c.tokens = end - begin;
    c.taken_from = [&whole, begin, tokens = end - begin](const std::string& name, int64_t index) {
      if (name != "x" && name != "dy") return index;
      const int64_t row = index / whole.hidden, replica = row / tokens;
      return (replica * whole.tokens + begin + row % tokens) * whole.hidden + index % whole.hidden;
    };
    return c;
  };
  const LayerCase first_case = half(0, cut), second_case = half(cut, whole.tokens);
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(whole, order), first = RunOrder(first_case, order),
                   second = RunOrder(second_case, order);
    for (size_t r = 0; r < run.ranks.size(); ++r) {
      const Values &all = run.ranks[r].values, &a = first.ranks[r].values, &b = second.ranks[r].values;
      EXPECT_EQ(a.y, RowsOf(all.y, Range(0, cut), whole.hidden)) << order;
      EXPECT_EQ(b.y, RowsOf(all.y, Range(cut, whole.tokens), whole.hidden)) << order;
      EXPECT_EQ(a.dx, RowsOf(all.dx, Range(0, cut), whole.hidden)) << order;
      EXPECT_EQ(b.dx, RowsOf(all.dx, Range(cut, whole.tokens), whole.hidden)) << order;
      std::vector<double> sum = a.w_in;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += b.w_in[i];
      EXPECT_LE(MaxDifference(sum, all.w_in), 1e-12) << order;
    }
  }
}

// Another replica's tokens share experts, exchanges and batches with mine, and must not show in mine.
TEST(LayerMetamorphicTest, OtherRanksTokensNeverChangeMine) {
  for (CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop}) {
    LayerCase c = Dropless();
    c.mode = mode;
    LayerCase other = c;
    other.taken_from = [&](const std::string& name, int64_t index) {
      const bool theirs = (name == "x" || name == "dy") && index >= c.tokens * c.hidden;
      return theirs ? index + 7777 : index;
    };
    for (const std::string& order : AllTensorParallelOrders()) {
      const LayerRun plain = RunOrder(c, order), run = RunOrder(other, order);
      for (size_t r = 0; r < run.ranks.size(); ++r) {
        const bool mine = run.ranks[r].replica == 0;
        EXPECT_EQ(run.ranks[r].values.y == plain.ranks[r].values.y, mine) << order;
        EXPECT_EQ(run.ranks[r].values.dx == plain.ranks[r].values.dx, mine) << order;
        EXPECT_EQ(run.ranks[r].values.router == plain.ranks[r].values.router, mine) << order;
      }
    }
  }
}

// Equal tokens, wherever they stand and on whichever replica, get equal outputs.
TEST(LayerMetamorphicTest, EqualTokensGetEqualOutputs) {
  LayerCase c = Dropless();
  c.taken_from = [&](const std::string& name, int64_t index) {
    return (name == "x" || name == "dy") && index / c.hidden % 3 == 0 ? index % c.hidden : index;
  };
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    int compared = 0;
    for (const RankRun& rank : run.ranks) {
      for (int64_t t = 0; t < c.tokens; ++t) {
        if ((rank.replica * c.tokens + t) % 3 != 0) continue;
        EXPECT_EQ(RowsOf(rank.values.y, {t}, c.hidden), RowsOf(run.ranks[0].values.y, {0}, c.hidden)) << order;
        EXPECT_EQ(RowsOf(rank.values.dx, {t}, c.hidden), RowsOf(run.ranks[0].values.dx, {0}, c.hidden)) << order;
        ++compared;
      }
    }
    EXPECT_EQ(compared, 12) << order;
  }
}

// A capacity that nobody reaches is no capacity: the bits of the dropless layer, in padded and in ragged orders.
TEST(LayerMetamorphicTest, LargeCapacityEqualsDropless) {
  LayerCase large = Dropless();
  large.mode = CapacityMode::kFactor;
  large.capacity_factor = 4;
  LayerCase fullest = Dropless(), none = Dropless();
  none.mode = CapacityMode::kDropless;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(large, order);
    for (const RankRun& rank : run.ranks) EXPECT_EQ(rank.decision.num_kept(), large.tokens * large.top_k);
    ExpectBitwiseEqual(run, RunOrder(fullest, order), order + ", as wide as the fullest expert");
    ExpectBitwiseEqual(run, RunOrder(none, order), order + ", dropless");
  }
}

}  // namespace
}  // namespace evenkeel::moe
