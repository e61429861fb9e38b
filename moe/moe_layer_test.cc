// The layer under every order: bits, gradients, bytes, memory, and the cases that break others.
#include "evenkeel/moe/moe_layer.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/exchange_bound.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::Each;
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
    EXPECT_EQ(rank.decision.capacity % T, 0);  // trap 1
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

TEST_P(OrderGridTest, Trap16_UnshardedIsLikeDenseAtItsBytes) {
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
  for (DType dtype : {DType::kF32, DType::kBF16}) {
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

// ---- Experts, dtypes, streams ----

std::vector<std::string> TensorParallelOrders() { return {"reference", "drop_gather", "fused", "token_sliced"}; }

// dedup adds up in another order: the same values, other last bits.
std::vector<std::string> AllTensorParallelOrders() {
  return {"reference", "drop_gather", "fused", "token_sliced", "dedup"};
}

// Trap 18: biases are kept. With expert TP the output bias is in every partial sum's place once, not T times.
TEST(MoeLayerTest, Trap18_BiasesAreKeptAndAddedOnce) {
  for (ExpertActivation activation : {ExpertActivation::kGelu, ExpertActivation::kSwiGlu}) {
    LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 7};
    c.activation = activation;
    c.bias = true;
    const LayerRun reference = RunOrder(c, "reference");
    for (const std::string& order : TensorParallelOrders()) {
      const LayerRun run = RunOrder(c, order);
      ExpectLikeDense(c, run, Name(c, order));
      ExpectBitwiseEqual(reference, run, Name(c, order));
      EXPECT_GT(MaxAbs(run.ranks[1].values.b_out), 0);
      EXPECT_GT(MaxAbs(run.ranks[1].values.b_in), 0);
    }
    ExpectLikeDense(c, RunOrder(c, "dedup"), Name(c, "dedup"));
    c.whole = true;
    ExpectLikeDense(c, RunOrder(c, "dedup"), Name(c, "dedup"));
    ExpectLikeDense(c, RunOrder(c, "unsharded"), Name(c, "unsharded"));
    ExpectLikeDense(c, RunOrder(c, "token_sliced"), Name(c, "token_sliced"));
  }
}

TEST(MoeLayerTest, SwiGluInEveryOrder) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .dtype = DType::kF32};
  c.activation = ExpertActivation::kSwiGlu;
  const LayerRun reference = RunOrder(c, "reference");
  ExpectLikeDense(c, reference, "swiglu");
  for (const std::string& order : TensorParallelOrders()) ExpectBitwiseEqual(reference, RunOrder(c, order), order);
}

TEST(MoeLayerTest, Bf16OrdersAreBitwiseEqual) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 9, .dtype = DType::kBF16};
  const LayerRun reference = RunOrder(c, "reference");
  ExpectLikeDense(c, reference, "bf16");
  for (const std::string& order : TensorParallelOrders()) ExpectBitwiseEqual(reference, RunOrder(c, order), order);
}

TEST(MoeLayerTest, WorkerStreamsGiveTheSameBits) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .dtype = DType::kF32};
  for (const std::string& order : AllTensorParallelOrders()) {
    c.worker_stream = false;
    const LayerRun direct = RunOrder(c, order);
    c.worker_stream = true;
    ExpectBitwiseEqual(direct, RunOrder(c, order), order);
  }
}

TEST(MoeLayerTest, PoisonedMemoryIsNeverRead) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2};
  for (const std::string& order : AllTensorParallelOrders()) {
    c.poison = true;
    const LayerRun poisoned = RunOrder(c, order);
    c.poison = false;
    ExpectBitwiseEqual(poisoned, RunOrder(c, order), order);
  }
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

// Trap 8: a drop that cuts a flat buffer in the wrong dimension gives numbers, and no error. Slices cut slots.
TEST(MoeLayerTest, Trap08_SlicesCutSlotsAndNeverTheHiddenDim) {
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

// Trap 1: with expert TP and no drops, a capacity that is not a multiple of T cannot be sliced.
TEST(MoeLayerTest, Trap01_EveryModesCapacityCanBeSliced) {
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

// ---- Rows that are missing ----

// Trap 22 and 23: a rank without tokens takes part in every collective, forward and backward, and keeps its shapes.
TEST(MoeLayerTest, Trap22And23_ZeroTokensOnARank) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2};
  c.tokens_of = [](int replica) { return replica == 0 ? 0 : 5; };
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    ASSERT_EQ(run.ranks.size(), 4u);
    EXPECT_TRUE(run.ranks[0].values.y.empty());
    EXPECT_EQ(run.ranks[0].taps.size(), run.ranks[3].taps.size());
    ExpectCounts(run, order);
  }
  c.whole = true;
  for (const char* order : {"unsharded", "token_sliced", "dedup"}) ExpectLikeDense(c, RunOrder(c, order), order);
}

TEST(MoeLayerTest, Trap22And23_NoTokensAnywhere) {
  LayerCase c = {.tp = 2, .ep = 2, .tokens = 0};
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    for (const RankRun& rank : run.ranks) EXPECT_THAT(rank.values.w_in, Each(0.0)) << order;
  }
}

// Fewer tokens than lanes: some lanes own none.
TEST(MoeLayerTest, FewerTokensThanLanes) {
  LayerCase c = {.tp = 4, .ep = 2, .top_k = 2, .tokens = 2};
  const LayerRun reference = RunOrder(c, "reference");
  for (const std::string& order : TensorParallelOrders()) ExpectBitwiseEqual(reference, RunOrder(c, order), order);
}

// Trap 24: experts that see no row have exactly zero gradients; the favourite gets everything.
TEST(MoeLayerTest, Trap24_AllTokensToOneExpert) {
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 1, .tokens = 9};
  c.mode = CapacityMode::kNoDrop;
  c.favourite_expert = 2;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) {
      const std::vector<double>& w = rank.values.w_in;
      const std::vector<double> first(w.begin(), w.begin() + w.size() / 2), second(w.begin() + w.size() / 2, w.end());
      if (rank.ep_rank == 0) {
        EXPECT_THAT(w, Each(0.0)) << order;
      } else {
        EXPECT_GT(MaxAbs(first), 0) << order;
        EXPECT_THAT(second, Each(0.0)) << order;
      }
    }
  }
}

// A token whose routes were all dropped gets exactly zero and sends nothing back but through nothing.
TEST(MoeLayerTest, DroppedTokensAreExactlyZero) {
  LayerCase c = {.tp = 1, .ep = 2, .experts = 4, .top_k = 1, .tokens = 12, .capacity_factor = 0.1};
  c.favourite_expert = 1;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) {
      int dropped = 0;
      for (int64_t token = 0; token < 12; ++token) {
        if (rank.decision.slot[token] >= 0) continue;
        ++dropped;
        for (int64_t i = 0; i < c.hidden; ++i) {
          EXPECT_EQ(rank.values.y[token * c.hidden + i], 0) << order;
          EXPECT_EQ(rank.values.dx[token * c.hidden + i], 0) << order;
        }
      }
      EXPECT_EQ(dropped, 11) << order;
    }
  }
}

// Dropless: ragged orders have no capacity at all; padded ones are as wide as the fullest expert needs.
TEST(MoeLayerTest, DroplessDropsNothing) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 7};
  c.mode = CapacityMode::kDropless;
  for (const std::string& order : AllTensorParallelOrders()) {
    const LayerRun run = RunOrder(c, order);
    ExpectLikeDense(c, run, order);
    for (const RankRun& rank : run.ranks) EXPECT_EQ(rank.decision.num_kept(), 14) << order;
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

// ---- Gradients against finite differences ----

double Loss(const LayerCase& c, const Order& order) {
  absl::StatusOr<LayerRun> run = RunLayer(c, order);
  EK_CHECK_OK(run);
  double loss = 0;
  for (const RankRun& rank : run->ranks) {
    if (rank.lane != 0) continue;
    for (size_t i = 0; i < rank.values.y.size(); ++i) loss += rank.values.y[i] * rank.values.dy[i];
  }
  return loss;
}

TEST(MoeLayerTest, GradientsAreTheSlopesOfTheLoss) {
  struct Probe {
    const char* name;
    int64_t index;
    double step, bound;
  };
  // The router computes in f32, so its slope needs a wider step and bound.
  const Probe probes[] = {{"w_in", 37, 1e-5, 1e-7}, {"w_gate", 70, 1e-5, 1e-7}, {"w_out", 101, 1e-5, 1e-7},
                          {"b_in", 9, 1e-5, 1e-7},  {"b_out", 17, 1e-5, 1e-7},  {"router", 11, 2e-3, 2e-3},
                          {"x", 21, 2e-3, 2e-3}};
  LayerCase c = {.tp = 2, .ep = 2, .experts = 4, .top_k = 2, .tokens = 5};
  c.mode = CapacityMode::kNoDrop;
  c.activation = ExpertActivation::kSwiGlu;
  c.bias = true;
  for (const char* name : {"drop_gather", "fused", "token_sliced", "dedup"}) {
    ASSERT_OK_AND_ASSIGN(const Order order, FindOrder(name));
    const LayerRun base = RunOrder(c, name);
    for (const Probe& probe : probes) {
      LayerCase up = c, down = c;
      up.perturb = down.perturb = probe.name;
      up.perturb_index = down.perturb_index = probe.index;
      up.perturb_by = probe.step;
      down.perturb_by = -probe.step;
      const double slope = (Loss(up, order) - Loss(down, order)) / (2 * probe.step);
      double gradient = 0;
      if (std::string(probe.name) == "x") {
        gradient = base.ranks[0].values.dx[probe.index];
      } else if (std::string(probe.name) == "router") {
        for (const RankRun& rank : base.ranks) gradient += rank.lane == 0 ? rank.values.router[probe.index] : 0;
      } else {
        // Find the element on the rank that holds it, by a one-hot image of the whole tensor.
        const int64_t sizes[] = {4 * 8 * 8, 4 * 8};
        std::vector<double> one_hot(probe.name[0] == 'w' ? sizes[0] : sizes[1]);
        one_hot[probe.index] = 1;
        for (const Member& member : kExpertMembers) {
          if (std::string(member.name) != probe.name) continue;
          for (const RankRun& rank : base.ranks) {
            const std::vector<double> mask = ExpertShard(c, rank, probe.name, one_hot);
            for (size_t i = 0; i < mask.size(); ++i) {
              const bool replicated = std::string(probe.name) == "b_out";
              if (!replicated || rank.lane == 0) gradient += mask[i] * (rank.values.*member.values)[i];
            }
          }
        }
      }
      EXPECT_NEAR(slope, gradient, probe.bound * (1 + std::abs(gradient))) << name << " " << probe.name;
    }
  }
}

// ---- Orders that nobody built in ----

TEST(MoeLayerTest, AnyWellTypedOrderRuns) {
  const char* kOrders[] = {// Folded after the sum over lanes instead of before it.
                           R"pb(name: "late_fold"
                                step { kind: SLICE dim: TOKENS }
                                step { kind: DISPATCH dim: DESTINATIONS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: ALL_GATHER dim: DESTINATIONS to: INVARIANT }
                                step { kind: EXPAND }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: FOLD }
                                step { kind: SLICE dim: SUMS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb",
                           // Deduplicated, all lanes the same.
                           R"pb(name: "dedup_reference"
                                step { kind: DISPATCH dim: DESTINATIONS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COPY }
                                step { kind: EXPAND }
                                step { kind: EXPERTS }
                                step { kind: FOLD }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE })pb",
                           // Partial tokens are summed at the very end.
                           R"pb(name: "late_sum"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE to: PARTIAL }
                                step { kind: ALL_REDUCE })pb",
                           // The input gradient is summed as tokens.
                           R"pb(name: "early_copy"
                                step { kind: COPY }
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE })pb",
                           // Each lane combines its own slots; the sums are scattered and gathered as tokens.
                           R"pb(name: "slot_sums"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: SLICE dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: ALL_GATHER dim: SLOTS to: REPLICATED }
                                step { kind: EXPERTS }
                                step { kind: REDUCE_SCATTER dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE to: PARTIAL }
                                step { kind: REDUCE_SCATTER dim: TOKENS }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb",
                           // Slices at the experts instead of at the source.
                           R"pb(name: "late_slice"
                                step { kind: DISPATCH dim: SLOTS }
                                step { kind: ALL_TO_ALL }
                                step { kind: SLICE dim: SLOTS }
                                step { kind: ALL_GATHER dim: SLOTS to: REPLICATED }
                                step { kind: EXPERTS }
                                step { kind: REDUCE_SCATTER dim: SLOTS }
                                step { kind: ALL_GATHER dim: SLOTS to: INVARIANT }
                                step { kind: ALL_TO_ALL }
                                step { kind: COMBINE })pb",
                           // Real rows, all lanes the same.
                           R"pb(name: "ragged_reference"
                                step { kind: DISPATCH dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE })pb",
                           // drop_gather on real rows.
                           R"pb(name: "ragged_drop_gather"
                                step { kind: SLICE dim: TOKENS }
                                step { kind: DISPATCH dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: ALL_GATHER dim: ROWS to: INVARIANT }
                                step { kind: COPY }
                                step { kind: EXPERTS }
                                step { kind: ALL_REDUCE }
                                step { kind: SLICE dim: ROWS }
                                step { kind: ALL_TO_ALL_V }
                                step { kind: COMBINE }
                                step { kind: ALL_GATHER dim: TOKENS to: INVARIANT })pb"};
  for (const char* text : kOrders) {
    ASSERT_OK_AND_ASSIGN(const Order order, ParseOrder(text, "test"));
    for (int tp : {1, 2, 4}) {
      for (int ep : {1, 2}) {
        LayerCase c = {.tp = tp, .ep = ep, .experts = 4, .top_k = 2, .tokens = 7};
        const std::string what = Name(c, order.name);
        absl::StatusOr<LayerRun> run = RunLayer(c, order);
        ASSERT_OK(run) << what;
        ExpectLikeDense(c, *run, what);
        ExpectLanesAgree(*run, what);
        ExpectCounts(*run, what);
      }
    }
  }
}

// A sequence-parallel caller: each lane brings and gets its own tokens; the first slice and the last gather fall away.
TEST(MoeLayerTest, SlicedTokensAtBothEnds) {
  ASSERT_OK_AND_ASSIGN(const Order order,
                       ParseOrder(R"pb(
                                    name: "sequence_parallel"
                                    expert_layout: ANY_LAYOUT
                                    input: SLICED_TOKENS
                                    output: SLICED_TOKENS
                                    step { kind: DISPATCH dim: ROWS }
                                    step { kind: ALL_TO_ALL_V }
                                    step { kind: ALL_GATHER dim: ROWS to: REPLICATED when: TENSOR_PARALLEL_EXPERTS }
                                    step { kind: EXPERTS }
                                    step { kind: REDUCE_SCATTER dim: ROWS when: TENSOR_PARALLEL_EXPERTS }
                                    step { kind: ALL_TO_ALL_V }
                                    step { kind: COMBINE })pb",
                                  "test"));
  for (bool whole : {false, true}) {
    for (int tp : {1, 2, 4}) {
      LayerCase c = {.tp = tp, .ep = 2, .experts = 4, .top_k = 2, .tokens = 7};
      c.whole = whole;
      const std::string what = Name(c, order.name);
      absl::StatusOr<LayerRun> run = RunLayer(c, order);
      ASSERT_OK(run) << what;
      const DenseResult dense = RunDense(c, *run);
      const LayerRun replicated = RunOrder(c, "token_sliced");
      for (size_t r = 0; r < run->ranks.size(); ++r) {
        const RankRun& rank = run->ranks[r];
        const int64_t first = rank.lane * (7 / tp) + std::min(rank.lane, 7 % tp);
        const auto own = [&](const std::vector<double>& all) {
          const auto begin = all.begin() + first * c.hidden;
          return std::vector<double>(begin, begin + rank.values.y.size());
        };
        EXPECT_LE(MaxDifference(rank.values.y, own(dense.y[rank.replica])), 1e-12) << what;
        EXPECT_LE(MaxDifference(rank.values.dx, own(dense.dx[rank.replica])), 2e-5) << what;
        EXPECT_EQ(rank.values.router, replicated.ranks[r].values.router) << what;
        EXPECT_EQ(rank.values.w_in, replicated.ranks[r].values.w_in) << what;
      }
      ExpectCounts(*run, what);
    }
  }
}

// ---- Refusals ----

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
  c.dtype = DType::kF16;
  EXPECT_THAT(status(c, "reference"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("f16")));
}

}  // namespace
}  // namespace evenkeel::moe
