// The layer in canonical numerics: one set of bits for every T, E, expert layout and order, and what it cannot do.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

struct Member {
  const char* name;
  std::vector<double> Values::*values;
};
constexpr Member kExpertMembers[] = {{"w_in", &Values::w_in}, {"w_gate", &Values::w_gate}, {"w_out", &Values::w_out},
                                     {"b_in", &Values::b_in}, {"b_gate", &Values::b_gate}, {"b_out", &Values::b_out}};

// The sum over an EDP group as the reduction of gradients takes it: the canonical tree, in f32, or f64 for f64.
template <typename T>
std::vector<T> TreeOverEdp(const std::vector<std::vector<double>>& members, size_t begin, size_t end) {
  if (end - begin == 1) return std::vector<T>(members[begin].begin(), members[begin].end());
  size_t split = 1;
  while (split * 2 < end - begin) split *= 2;
  std::vector<T> sum = TreeOverEdp<T>(members, begin, begin + split);
  const std::vector<T> right = TreeOverEdp<T>(members, begin + split, end);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += right[i];
  return sum;
}

int64_t SizeOfWhole(const LayerCase& c, const std::string& name) {
  if (name == "b_out") return c.experts * c.hidden;
  return c.experts * c.ffn * (name[0] == 'b' ? 1 : c.hidden);
}

// A whole expert gradient, assembled from the shards of all ranks.
std::vector<double> Assembled(const LayerCase& c, const LayerRun& run, const Member& member) {
  const size_t size = static_cast<size_t>(SizeOfWhole(c, member.name));
  std::vector<double> index(size), whole(size);
  for (size_t i = 0; i < size; ++i) index[i] = static_cast<double>(i);
  for (const RankRun& rank : run.ranks) {
    if (rank.edp_rank != 0) continue;
    std::vector<std::vector<double>> members(run.ranks.size());
    size_t count = 0;
    for (const RankRun& other : run.ranks) {
      if (other.ep_rank != rank.ep_rank || (!c.whole && other.lane != rank.lane)) continue;
      members[other.edp_rank] = other.values.*member.values;
      ++count;
    }
    std::vector<double> sum;
    if (c.dtype == DType::kF64) {
      sum = TreeOverEdp<double>(members, 0, count);
    } else {
      const std::vector<float> narrow = TreeOverEdp<float>(members, 0, count);
      sum.assign(narrow.begin(), narrow.end());
    }
    const std::vector<double> places = ExpertShard(c, rank, member.name, index);
    for (size_t i = 0; i < places.size(); ++i) whole[static_cast<size_t>(places[i])] = sum[i];
  }
  return whole;
}

std::string Name(const LayerCase& c, const std::string& order) {
  return absl::StrCat(order, " T=", c.tp, " E=", c.ep, c.whole ? " whole" : "", " k=", c.top_k, " mode=", c.mode, " ",
                      std::string(DTypeName(c.dtype)));
}

LayerRun RunOrder(const LayerCase& c, const std::string& order) {
  const absl::StatusOr<LayerRun> run = RunLayer(c, *FindOrder(order));
  EXPECT_OK(run) << Name(c, order);
  return run.ok() ? *run : LayerRun();
}

void ExpectSame(const LayerCase& base_case, const LayerRun& base, const LayerCase& c, const std::string& order) {
  const LayerRun run = RunOrder(c, order);
  const std::string what = Name(c, order);
  for (const RankRun& rank : run.ranks) {
    const RankRun& other = base.ranks[rank.replica * base_case.tp];
    ASSERT_EQ(rank.values.y, other.values.y) << what;
    ASSERT_EQ(rank.values.dx, other.values.dx) << what;
    ASSERT_EQ(rank.values.router, other.values.router) << what;
    // The router's logits come and go before and after the layer's own buffers.
    const int64_t logits = rank.decision.num_tokens * rank.decision.num_experts * 4;
    EXPECT_EQ(rank.counted_memory.forward_peak, std::max(logits, rank.predicted_memory.forward_peak)) << what;
    EXPECT_EQ(rank.counted_memory.tape, rank.predicted_memory.tape) << what;
    EXPECT_EQ(rank.counted_memory.backward_peak, std::max(logits, rank.predicted_memory.backward_peak)) << what;
    EXPECT_EQ(rank.forward.bytes(comm::Axis::kEp), rank.predicted_forward.ep.bytes) << what;
    EXPECT_EQ(rank.backward.bytes(comm::Axis::kTp), rank.predicted_backward.tp.bytes) << what;
  }
  for (const Member& member : kExpertMembers) {
    ASSERT_EQ(Assembled(c, run, member), Assembled(base_case, base, member)) << what << " " << member.name;
  }
}

// Four replicas of 36 tokens: with a capacity, about half of the routes are dropped.
LayerCase Case(int tp, int ep, DType dtype, CapacityMode mode) {
  LayerCase c = {.tp = tp, .ep = ep, .dp = 4, .experts = 8, .top_k = 3, .tokens = 36, .hidden = 16, .ffn = 32};
  c.capacity_factor = 0.3;
  c.mode = mode;
  c.bias = true;
  c.canonical = true;
  c.dtype = dtype;
  c.activation = ExpertActivation::kSwiGlu;
  return c;
}

class CanonicalLayerTest : public ::testing::TestWithParam<std::tuple<DType, CapacityMode>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  CapacityMode mode() const { return std::get<1>(GetParam()); }
};

TEST_P(CanonicalLayerTest, OneSetOfBitsForEveryLayoutAndOrder) {
  const LayerCase base_case = Case(1, 1, dtype(), mode());
  const LayerRun base = RunOrder(base_case, mode() == CapacityMode::kDropless ? "token_sliced" : "reference");
  ASSERT_EQ(base.ranks.size(), 4u);
  const bool drops = mode() == CapacityMode::kFactor;
  EXPECT_EQ(base.ranks[0].decision.num_kept() < base.ranks[0].decision.num_routes(), drops);
  const DenseResult dense = RunDense(base_case, base);
  const double tolerance = dtype() == DType::kF64   ? 1e-12
                           : dtype() == DType::kF32 ? 2e-5
                           : dtype() == DType::kF16 ? 0.12 / 8
                                                    : 0.12;
  EXPECT_LE(MaxDifference(base.ranks[3].values.y, dense.y[3]), tolerance);
  EXPECT_LE(MaxDifference(base.ranks[3].values.dx, dense.dx[3]), std::max(tolerance, 5e-5));  // the router is f32

  for (int tp : {1, 2, 4, 8}) {
    for (int ep : {1, 2, 4}) {
      const LayerCase c = Case(tp, ep, dtype(), mode());
      for (const char* order :
           {"reference", "drop_gather", "fused", "token_sliced", "dedup", "overlapped(reference)"}) {
        ExpectSame(base_case, base, c, order);
      }
    }
  }
  for (int tp : {2, 4, 8}) {
    for (int ep = 1; ep <= 8; ep *= 2) {
      LayerCase c = Case(tp, ep, dtype(), mode());
      c.whole = true;
      for (const char* order : {"unsharded", "token_sliced", "dedup"}) ExpectSame(base_case, base, c, order);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CanonicalLayerTest,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF64, DType::kBF16, DType::kF16),
                                            ::testing::Values(CapacityMode::kFactor, CapacityMode::kNoDrop,
                                                              CapacityMode::kDropless)));

TEST(CanonicalLayerLimitsTest, MemoryIsPredictedOnWorkerStreamsAndWithRecomputation) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    LayerCase c = Case(2, 2, dtype, CapacityMode::kNoDrop);
    const LayerRun kept = RunOrder(c, "fused");
    c.recompute = true;
    ExpectSame(c, kept, c, "fused");
    c.worker_stream = true;
    const LayerRun queued = RunOrder(c, "fused");
    for (size_t r = 0; r < kept.ranks.size(); ++r) {
      EXPECT_EQ(queued.ranks[r].values.w_in, kept.ranks[r].values.w_in);
      EXPECT_EQ(queued.ranks[r].values.dx, kept.ranks[r].values.dx);
    }
  }
}

// Orders in chunks go through the same sums, ragged ones too.
TEST(CanonicalLayerLimitsTest, ChunkedOrdersHaveTheSameBits) {
  const LayerCase base_case = Case(1, 1, DType::kF32, CapacityMode::kNoDrop);
  const LayerRun base = RunOrder(base_case, "reference");
  for (const char* order : {"overlapped(fused)", "overlapped(token_sliced)"}) {
    ExpectSame(base_case, base, Case(2, 2, DType::kF32, CapacityMode::kNoDrop), order);
  }
}

// Exchanges in two levels of nodes, and experts behind them.
TEST(CanonicalLayerLimitsTest, ExchangesInTwoLevelsHaveTheSameBits) {
  const LayerCase base_case = Case(1, 1, DType::kF32, CapacityMode::kFactor);
  const LayerRun base = RunOrder(base_case, "reference");
  LayerCase c = Case(1, 4, DType::kF32, CapacityMode::kFactor);
  c.ranks_per_node = 2;
  for (const char* order : {"two_level(reference)", "two_level(token_sliced)"}) ExpectSame(base_case, base, c, order);
}

// Fast numerics differ between layouts: the test above can fail.
TEST(CanonicalLayerLimitsTest, FastNumericsHaveOtherBitsPerLayout) {
  LayerCase one = Case(1, 1, DType::kF32, CapacityMode::kNoDrop), two = Case(4, 1, DType::kF32, CapacityMode::kNoDrop);
  one.canonical = two.canonical = false;
  const LayerRun a = RunOrder(one, "reference"), b = RunOrder(two, "reference");
  EXPECT_NE(a.ranks[0].values.y, b.ranks[0].values.y);
}

TEST(CanonicalLayerLimitsTest, SaysWhatItCannot) {
  LayerCase c = Case(2, 2, DType::kF32, CapacityMode::kNoDrop);
  const auto status = [&](const char* order) { return RunLayer(c, *FindOrder(order)).status(); };
  c.ffn = 12;
  EXPECT_THAT(status("fused"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("8 blocks; tp 2 with ffn 12")));
  c.ffn = 32;
  c.experts = 6;
  EXPECT_THAT(status("dedup"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 experts per rank")));
  c.experts = 8;
  c.whole = true;
  c.ep = 1;
  EXPECT_THAT(status("overlapped(unsharded)"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ep 1 below tp 2")));
}

TEST(CanonicalLayerLimitsTest, RefusesAnOrderThatCombinesPartialSums) {
  const absl::StatusOr<Order> late = ParseOrder(R"pb(
                                                  name: "late_sum"
                                                  expert_layout: TENSOR_PARALLEL
                                                  step { kind: DISPATCH dim: SLOTS }
                                                  step { kind: ALL_TO_ALL axis: EP }
                                                  step { kind: COPY axis: TP }
                                                  step { kind: EXPERTS }
                                                  step { kind: ALL_TO_ALL axis: EP }
                                                  step { kind: COMBINE to: PARTIAL }
                                                  step { kind: ALL_REDUCE axis: TP })pb",
                                                "late_sum");
  ASSERT_OK(late);
  const LayerCase c = Case(2, 2, DType::kF32, CapacityMode::kNoDrop);
  EXPECT_THAT(RunLayer(c, *late).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'late_sum' adds up a token's experts")));
}

}  // namespace
}  // namespace evenkeel::moe
