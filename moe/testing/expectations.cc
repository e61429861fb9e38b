#include "evenkeel/moe/testing/expectations.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

// Tolerances: y and expert gradients are f64 throughout; the router works in f32 whatever the dtype, and its part of dx
// and its own gradient carry that.
struct Tolerance {
  double exact;
  double router;
};
Tolerance ToleranceOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return {1e-12, 2e-5};
    case DType::kF32:
      return {2e-5, 5e-5};
    case DType::kF16:  // three bits more than bf16
      return {0.12 / 8, 0.12 / 8};
    default:
      return {0.12, 0.12};
  }
}

void ExpectTraffic(const comm::LedgerCounts& counted, const OrderTraffic& predicted, const std::string& what) {
  EXPECT_EQ(counted.bytes(comm::Axis::kEp), predicted.ep.bytes) << what;
  EXPECT_EQ(counted.bytes(comm::Axis::kTp), predicted.tp.bytes) << what;
  EXPECT_EQ(counted.sent[static_cast<int>(comm::Axis::kEp)][static_cast<int>(comm::LinkClass::kInterNode)].bytes_sent,
            predicted.ep.inter_node_bytes)
      << what;
  EXPECT_EQ(counted.collectives[static_cast<int>(comm::Axis::kEp)], predicted.ep.collectives) << what;
  EXPECT_EQ(counted.collectives[static_cast<int>(comm::Axis::kTp)], predicted.tp.collectives) << what;
}

}  // namespace

std::string Name(const LayerCase& c, const std::string& order) {
  return absl::StrCat(order, " T=", c.tp, " E=", c.ep, " e=", c.experts, " k=", c.top_k, " s=", c.tokens,
                      " cf=", c.capacity_factor, c.whole ? " whole" : "", " seed=", c.seed, " ",
                      std::string(DTypeName(c.dtype)));
}

LayerRun RunOrder(const LayerCase& c, const std::string& order) {
  absl::StatusOr<Order> found = FindOrder(order);
  EK_CHECK_OK(found);
  absl::StatusOr<LayerRun> run = RunLayer(c, *found);
  EXPECT_OK(run) << Name(c, order);
  return run.ok() ? *std::move(run) : LayerRun();
}

std::vector<std::string> TensorParallelOrders() { return {"reference", "drop_gather", "fused", "token_sliced"}; }

std::vector<std::string> AllTensorParallelOrders() {
  return {"reference", "drop_gather", "fused", "token_sliced", "dedup"};
}

void ExpectBitwiseEqual(const LayerRun& a, const LayerRun& b, const std::string& what) {
  ASSERT_EQ(a.ranks.size(), b.ranks.size()) << what;
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    for (const Member& member : kAllMembers) {
      EXPECT_EQ(a.ranks[r].values.*member.values, b.ranks[r].values.*member.values)
          << what << " rank " << r << " " << member.name;
    }
  }
}

void ExpectLikeDense(const LayerCase& c, const LayerRun& run, const std::string& what) {
  if (run.ranks.empty()) return;
  const DenseResult dense = RunDense(c, run);
  const Tolerance tolerance = ToleranceOf(c.dtype);
  for (const RankRun& rank : run.ranks) {
    const auto near = [&](const char* name, const std::vector<double>& got, const std::vector<double>& want,
                          double bound) {
      EXPECT_LE(MaxDifference(got, want), bound * (1 + MaxAbs(want)))
          << what << " " << name << " replica " << rank.replica << " lane " << rank.lane;
    };
    near("y", rank.values.y, dense.y[rank.replica], tolerance.exact);
    near("dx", rank.values.dx, dense.dx[rank.replica], tolerance.router);
    near("router", rank.values.router, dense.router[rank.replica], tolerance.router);
    for (const Member& member : kExpertMembers) {
      near(member.name, SumOverEdp(c, run, rank, member.values),
           ExpertShard(c, rank, member.name, dense.sums.*member.values), tolerance.exact);
    }
  }
}

void ExpectLanesAgree(const LayerRun& run, const std::string& what) {
  for (const RankRun& a : run.ranks) {
    for (const RankRun& b : run.ranks) {
      if (a.replica != b.replica) continue;
      EXPECT_EQ(a.values.router, b.values.router) << what;
      EXPECT_EQ(a.values.y, b.values.y) << what;
      EXPECT_EQ(a.values.dx, b.values.dx) << what;
    }
  }
}

void ExpectCounts(const LayerRun& run, const std::string& what) {
  for (const RankRun& rank : run.ranks) {
    ExpectTraffic(rank.forward, rank.predicted_forward, what + " forward");
    ExpectTraffic(rank.backward, rank.predicted_backward, what + " backward");
    // The router's logits come and go before and after the order's own buffers.
    const int64_t logits = rank.decision.num_tokens * rank.decision.num_experts * 4;
    EXPECT_EQ(rank.counted_memory.forward_peak, std::max(logits, rank.predicted_memory.forward_peak)) << what;
    EXPECT_EQ(rank.counted_memory.tape, rank.predicted_memory.tape) << what;
    EXPECT_EQ(rank.counted_memory.backward_peak, std::max(logits, rank.predicted_memory.backward_peak)) << what;
  }
}

}  // namespace evenkeel::moe
