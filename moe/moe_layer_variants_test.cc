// Experts, dtypes, streams and memory of every kind under every order.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/testing/expectations.h"
#include "evenkeel/moe/testing/layer_harness.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

// Trail 18: biases are kept. With expert TP the output bias is in every partial sum's place once, not T times.
TEST(MoeLayerVariantsTest, Trail18_BiasesAreKeptAndAddedOnce) {
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

// Trail 9: short cuts (one expert on a rank, one EP rank, one lane) are taken by the layout and hold for every k; the
// last two layouts must take none.
TEST(MoeLayerVariantsTest, Trail9_ShortCutsTakeEveryK) {
  for (int k : {1, 2, 3, 4}) {
    for (const auto& [tp, ep] : {std::pair<int, int>{1, 1}, {1, 4}, {2, 4}, {2, 1}, {1, 2}, {2, 2}}) {
      const LayerCase c = {.tp = tp, .ep = ep, .experts = 4, .top_k = k, .tokens = 7};
      for (const std::string& order : AllTensorParallelOrders()) {
        ExpectLikeDense(c, RunOrder(c, order), Name(c, order));
      }
    }
  }
}

TEST(MoeLayerVariantsTest, SwiGluInEveryOrder) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .dtype = DType::kF32};
  c.activation = ExpertActivation::kSwiGlu;
  const LayerRun reference = RunOrder(c, "reference");
  ExpectLikeDense(c, reference, "swiglu");
  for (const std::string& order : TensorParallelOrders()) ExpectBitwiseEqual(reference, RunOrder(c, order), order);
}

TEST(MoeLayerVariantsTest, SixteenBitOrdersAreBitwiseEqual) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 9, .dtype = dtype};
    const LayerRun reference = RunOrder(c, "reference");
    ExpectLikeDense(c, reference, Name(c, "reference"));
    for (const std::string& order : TensorParallelOrders()) {
      ExpectBitwiseEqual(reference, RunOrder(c, order), Name(c, order));
    }
  }
}

TEST(MoeLayerVariantsTest, WorkerStreamsGiveTheSameBits) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .dtype = DType::kF32};
  for (const std::string& order : AllTensorParallelOrders()) {
    c.worker_stream = false;
    const LayerRun direct = RunOrder(c, order);
    c.worker_stream = true;
    ExpectBitwiseEqual(direct, RunOrder(c, order), order);
  }
}

// Trail 14: padded slots, dropped routes and fresh buffers hold NaN or whatever was there; nothing of it may show.
TEST(MoeLayerVariantsTest, Trail14_PoisonedMemoryIsNeverRead) {
  LayerCase c = {.tp = 2, .ep = 2, .top_k = 2, .tokens = 9, .capacity_factor = 0.8};
  for (const std::string& order : AllTensorParallelOrders()) {
    c.poison = true;
    const LayerRun poisoned = RunOrder(c, order);
    c.poison = false;
    ExpectBitwiseEqual(poisoned, RunOrder(c, order), order);
    for (const RankRun& rank : poisoned.ranks) {
      EXPECT_GT(rank.decision.num_experts * rank.decision.capacity, rank.decision.num_kept()) << "no padding";
      EXPECT_LT(rank.decision.num_kept(), c.tokens * c.top_k) << "nothing dropped";
      for (const Member& member : kAllMembers) {
        for (double value : rank.values.*member.values) ASSERT_TRUE(std::isfinite(value)) << order << member.name;
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::moe
