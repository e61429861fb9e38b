// The layer under every order: bits, bytes, memory, and what it refuses.
#include "evenkeel/moe/moe_layer.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/exchange_bound.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// The closed forms of the docs, written down once more.
void ExpectClosedForms(const LayerCase& c, const LayerRun& run, const std::string& order) {
  for (const RankRun& rank : run.ranks) {
    const int64_t T = c.tp, E = c.ep;
    const int64_t V = c.experts * rank.decision.capacity * c.hidden * SizeOf(c.dtype);
    const bool sliced = order != "reference";
    const int64_t ep_bytes = 2 * (E - 1) * V / E / (sliced ? T : 1);
    const int64_t factor = order == "reference" ? 2 : order == "drop_gather" ? 4 : order == "fused" ? 3 : 1;
    const int64_t tp_bytes = factor * (T - 1) * V / T;
    for (const comm::LedgerCounts* counted : {&rank.forward, &rank.backward}) {
      EXPECT_EQ(counted->bytes(comm::Axis::kEp), ep_bytes) << Name(c, order);
      EXPECT_EQ(counted->bytes(comm::Axis::kTp), tp_bytes) << Name(c, order);
    }
    EXPECT_EQ(rank.decision.capacity % T, 0);  // trail 1
  }
}

// Rows that really have to move, counted from the decisions alone.
void ExpectRealRowsOnly(const LayerCase& c, const LayerRun& run, const std::string& what) {
  int64_t counted = 0, remote = 0;
  for (const RankRun& rank : run.ranks) {
    counted += rank.forward.bytes(comm::Axis::kEp);
    const RoutingDecision& d = rank.decision;
    for (int64_t token = 0; token < d.num_tokens; ++token) {
      const int64_t small = d.num_tokens / c.tp, longer = d.num_tokens % c.tp;
      const int64_t in_longer = longer * (small + 1);
      const int64_t owner =
          token < in_longer ? token / (small + 1) : longer + (token - in_longer) / std::max<int64_t>(small, 1);
      if (owner != rank.lane) continue;
      for (int64_t j = 0; j < d.top_k; ++j) {
        if (d.slot[token * d.top_k + j] < 0) continue;
        remote += d.expert[token * d.top_k + j] / (c.experts / c.ep) != rank.ep_rank;
      }
    }
  }
  EXPECT_EQ(counted, 2 * remote * c.hidden * SizeOf(c.dtype)) << what;
}

// ---- The grid ----

class OrderGridTest : public ::testing::TestWithParam<std::tuple<int, int, int>> {
 protected:
  LayerCase Case(double capacity_factor, DType dtype) const {
    LayerCase c;
    c.tp = std::get<0>(GetParam());
    c.ep = std::get<1>(GetParam());
    c.top_k = std::get<2>(GetParam());
    c.experts = 8;
    c.capacity_factor = capacity_factor;
    c.dtype = dtype;
    c.seed = 7;
    return c;
  }
};

INSTANTIATE_TEST_SUITE_P(Grid, OrderGridTest,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(1, 2, 4),
                                            ::testing::Values(1, 2, 4)));

TEST_P(OrderGridTest, PaddedOrdersAreBitwiseEqualAndLikeDense) {
  for (DType dtype : {DType::kF32, DType::kF64}) {
    for (double factor : {0.7, 1.3}) {
      const LayerCase c = Case(factor, dtype);
      const LayerRun reference = RunOrder(c, "reference");
      ExpectLikeDense(c, reference, Name(c, "reference"));
      ExpectLanesAgree(reference, Name(c, "reference"));
      ExpectClosedForms(c, reference, "reference");
      ExpectCounts(reference, Name(c, "reference"));
      for (const char* order : {"drop_gather", "fused"}) {
        const LayerRun run = RunOrder(c, order);
        ExpectBitwiseEqual(reference, run, Name(c, order));
        ExpectClosedForms(c, run, order);
        ExpectCounts(run, Name(c, order));
      }
    }
  }
}

TEST_P(OrderGridTest, Trail16_UnshardedIsLikeDenseAtItsBytes) {
  LayerCase c = Case(1.3, DType::kF64);
  c.whole = true;
  const LayerRun run = RunOrder(c, "unsharded");
  ExpectLikeDense(c, run, Name(c, "unsharded"));
  ExpectLanesAgree(run, Name(c, "unsharded"));
  ExpectClosedForms(c, run, "unsharded");
  ExpectCounts(run, Name(c, "unsharded"));
}

// Same layout, other row sets: forward, dx and (by canonical positions) expert gradients have the padded orders' bits.
TEST_P(OrderGridTest, TokenSlicedHasTheReferencesBitsAndMovesRealRowsOnly) {
  for (double factor : {0.7, 1.3}) {
    const LayerCase c = Case(factor, DType::kF32);
    const LayerRun run = RunOrder(c, "token_sliced");
    ExpectBitwiseEqual(RunOrder(c, "reference"), run, Name(c, "token_sliced"));
    ExpectRealRowsOnly(c, run, Name(c, "token_sliced"));
    ExpectCounts(run, Name(c, "token_sliced"));
  }
}

TEST_P(OrderGridTest, TokenSlicedWithWholeExpertsIsLikeDense) {
  LayerCase c = Case(1.3, DType::kF64);
  c.whole = true;
  const LayerRun run = RunOrder(c, "token_sliced");
  ExpectLikeDense(c, run, Name(c, "token_sliced"));
  ExpectLanesAgree(run, Name(c, "token_sliced"));
  ExpectRealRowsOnly(c, run, Name(c, "token_sliced"));
  ExpectCounts(run, Name(c, "token_sliced"));
}

// One row per (token, distinct remote destination) out, the same back: the bound, and not a byte more.
void ExpectAtTheBound(const LayerCase& c, const LayerRun& run, const std::string& what) {
  int64_t counted = 0, bound = 0;
  for (const RankRun& rank : run.ranks) {
    counted += rank.forward.bytes(comm::Axis::kEp);
    if (rank.lane != 0 || c.whole) continue;
    const ExchangePlaces places = {
        .ep_rank = rank.ep_rank, .node_of_rank = std::vector<int>(c.ep, 0), .home_ranks = {}};
    absl::StatusOr<ExchangeBound> rows = BoundExchange(rank.decision, places);
    ASSERT_OK(rows);
    bound += 2 * rows->total();
  }
  if (!c.whole) {
    EXPECT_EQ(counted, bound * c.hidden * SizeOf(c.dtype)) << what;
  }
}

TEST_P(OrderGridTest, DedupIsLikeDenseAtTheBound) {
  for (bool whole : {false, true}) {
    for (double factor : {0.7, 1.3}) {
      LayerCase c = Case(factor, whole ? DType::kF64 : DType::kF32);
      c.whole = whole;
      const LayerRun run = RunOrder(c, "dedup");
      ExpectLikeDense(c, run, Name(c, "dedup"));
      ExpectLanesAgree(run, Name(c, "dedup"));
      ExpectAtTheBound(c, run, Name(c, "dedup"));
      ExpectCounts(run, Name(c, "dedup"));
    }
  }
}

// Sums over experts follow one tree over expert ids: where each rank holds a power of two of them, dealing them to
// more ranks changes no bit of the output.
TEST(MoeLayerTest, DedupSumsDoNotDependOnE) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<std::vector<double>> outputs, inputs;
    for (int ep : {1, 2, 4}) {
      LayerCase c = {.tp = 1, .ep = ep, .dp = 4, .experts = 8, .top_k = 4, .tokens = 9, .dtype = dtype};
      c.mode = CapacityMode::kNoDrop;
      const LayerRun run = RunOrder(c, "dedup");
      ASSERT_EQ(run.ranks.size(), 4u);
      outputs.push_back(run.ranks[1].values.y);
      inputs.push_back(run.ranks[1].values.dx);
      ExpectLikeDense(c, run, Name(c, "dedup"));
    }
    EXPECT_EQ(outputs[0], outputs[1]);
    EXPECT_EQ(outputs[0], outputs[2]);
    if (dtype == DType::kF32) {
      EXPECT_EQ(inputs[0], inputs[1]);
      EXPECT_EQ(inputs[0], inputs[2]);
    }
  }
}

// Chunks of experts in turn, the exchange of one beside the experts of another: the same bits and bytes. Chunks are as
// even as can be; 5 local experts in 2, 3 and 5 of them.
TEST(MoeLayerTest, OverlappedHasTheBitsOfItsOrder) {
  for (const char* inner : {"reference", "drop_gather", "fused", "unsharded", "token_sliced"}) {
    for (int tp : {1, 2}) {
      for (int ep : {1, 2, 4}) {
        LayerCase c = {.tp = tp, .ep = ep, .experts = 5 * ep, .top_k = 3, .tokens = 7, .dtype = DType::kF32};
        c.activation = ExpertActivation::kSwiGlu;
        c.bias = true;
        c.whole = std::string(inner) == "unsharded";
        const LayerRun plain = RunOrder(c, inner);
        for (const char* chunks : {":2", ":3", ":5"}) {
          for (bool worker : {false, true}) {
            c.worker_stream = worker;
            const std::string order = absl::StrCat("overlapped(", inner, chunks, ")");
            const LayerRun run = RunOrder(c, order);
            ExpectBitwiseEqual(plain, run, Name(c, order));
            for (size_t r = 0; r < run.ranks.size(); ++r) {
              EXPECT_EQ(run.ranks[r].forward.bytes(comm::Axis::kEp), plain.ranks[r].forward.bytes(comm::Axis::kEp));
              EXPECT_EQ(run.ranks[r].backward.bytes(comm::Axis::kTp), plain.ranks[r].backward.bytes(comm::Axis::kTp));
            }
            if (!worker) ExpectCounts(run, Name(c, order));
          }
        }
        c.worker_stream = false;
      }
    }
  }
}

// The experts' middle computed again: the same bits from a smaller tape, and the prediction says how much smaller.
TEST(MoeLayerTest, RecomputedExpertsHaveTheSameBits) {
  for (ExpertActivation activation : {ExpertActivation::kGelu, ExpertActivation::kSwiGlu}) {
    for (const char* order : {"reference", "token_sliced", "dedup", "overlapped(fused)"}) {
      LayerCase c = {.tp = 2, .ep = 2, .experts = 8, .top_k = 2, .tokens = 7, .ffn = 16, .dtype = DType::kF32};
      c.activation = activation;
      c.bias = true;
      const LayerRun kept = RunOrder(c, order);
      c.recompute = true;
      const LayerRun again = RunOrder(c, order);
      ExpectBitwiseEqual(kept, again, order);
      ExpectCounts(again, order);
      for (size_t r = 0; r < kept.ranks.size(); ++r) {
        EXPECT_LT(again.ranks[r].counted_memory.tape, kept.ranks[r].counted_memory.tape) << order;
      }
    }
  }
}

TEST(MoeLayerTest, OverlappedNeedsAnExpertPerChunk) {
  LayerCase c = {.tp = 1, .ep = 2, .experts = 4, .top_k = 2};
  EXPECT_THAT(
      RunLayer(c, *FindOrder("overlapped(fused:4)")).status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("wants 4 chunks of a rank's experts; there are 2")));
}

// More rows than one block of the weight gradient: a ragged order sums them at the padded orders' positions.
TEST(MoeLayerTest, WeightGradientsSumRowsAtCanonicalPositions) {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 2, .top_k = 1, .tokens = 300, .dtype = DType::kF32};
  c.capacity_factor = 1.5;
  ExpectBitwiseEqual(RunOrder(c, "reference"), RunOrder(c, "token_sliced"), "canonical positions");
  c.top_k = 2;
  c.capacity_factor = 0.7;
  ExpectBitwiseEqual(RunOrder(c, "fused"), RunOrder(c, "token_sliced"), "canonical positions, drops");
}

TEST(MoeLayerTest, TapsFollowTheProgramBothWays) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2};
  const LayerRun run = RunOrder(c, "fused");
  EXPECT_EQ(run.ranks[0].taps,
            (std::vector<std::string>{
                "dispatch(slots)", "slice(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->R", "experts",
                "reduce_scatter(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->I", "combine", "combine'",
                "slice(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->R", "experts'",
                "reduce_scatter(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->I", "dispatch'(slots)"}));
}

// Trail 8: a drop that cuts a flat buffer in the wrong dimension gives numbers, and no error. Slices cut slots.
TEST(MoeLayerTest, Trail8_SlicesCutSlotsAndNeverTheHiddenDim) {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 2, .hidden = 8};
  for (const char* order : {"drop_gather", "fused"}) {
    const LayerRun run = RunOrder(c, order);
    ASSERT_EQ(run.ranks.size(), 4u);
    for (const RankRun& rank : run.ranks) {
      for (size_t i = 0; i < rank.taps.size(); ++i) {
        EXPECT_EQ(rank.tap_shapes[i].dim(1), c.hidden) << order << " " << rank.taps[i];
        if (rank.taps[i] != "slice(tp, slots)") continue;
        EXPECT_EQ(rank.tap_shapes[i].dim(0), 4 * rank.decision.capacity / 2) << order;
      }
    }
  }
}

// Trail 1: with expert TP and no drops, a capacity that is not a multiple of T cannot be sliced.
TEST(MoeLayerTest, Trail1_EveryModesCapacityCanBeSliced) {
  for (CapacityMode mode : {CapacityMode::kFactor, CapacityMode::kNoDrop}) {
    for (int64_t tokens : {1, 5, 9}) {
      LayerCase c = {.tp = 4, .ep = 2, .experts = 4, .top_k = 1, .tokens = tokens};
      c.mode = mode;
      const LayerRun run = RunOrder(c, "fused");
      ExpectLikeDense(c, run, Name(c, "fused"));
      for (const RankRun& rank : run.ranks) EXPECT_EQ(rank.decision.capacity % 4, 0);
    }
  }
}

// Without groups for control data their bytes are in the payload's ledger, exactly as predicted.
TEST(MoeLayerTest, ControlTrafficIsPredictedToo) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 7};
  const LayerRun apart = RunOrder(c, "token_sliced");
  c.control_groups = false;
  const LayerRun together = RunOrder(c, "token_sliced");
  for (size_t r = 0; r < apart.ranks.size(); ++r) {
    const RankRun &a = apart.ranks[r], &b = together.ranks[r];
    EXPECT_GT(a.predicted_forward.control_ep.bytes, 0);
    EXPECT_GT(a.predicted_backward.control_tp.bytes, 0);
    // The router's agreement on capacity (8 bytes MAX over EP) and digests (over TP) are its own.
    EXPECT_EQ(b.backward.bytes(comm::Axis::kTp), a.predicted_backward.tp.bytes + a.predicted_backward.control_tp.bytes);
    EXPECT_GE(b.forward.bytes(comm::Axis::kEp), a.predicted_forward.ep.bytes + a.predicted_forward.control_ep.bytes);
  }
}

TEST(MoeLayerTest, RefusesWhatDoesNotFit) {
  const auto status = [](LayerCase c, const char* order) { return RunLayer(c, *FindOrder(order)).status(); };
  LayerCase c = {.tp = 2, .ep = 2};
  c.experts = 5;
  EXPECT_THAT(status(c, "fused"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("5 experts")));
  c.experts = 4;
  c.ffn = 7;
  EXPECT_THAT(status(c, "fused"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ffn 7")));
  c.ffn = 8;
  EXPECT_THAT(status(c, "unsharded"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layout")));
  c.whole = true;
  EXPECT_THAT(status(c, "reference"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("layout")));
  c.whole = false;
  c.dtype = DType::kI32;
  EXPECT_THAT(status(c, "reference"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("moe dtype i32")));
}

}  // namespace
}  // namespace evenkeel::moe
