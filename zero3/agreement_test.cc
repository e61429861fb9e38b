// What ranks and instances must agree on or keep apart: orders of calls, use from outside a leaf, two models.
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/order_log.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// "expert" belongs to a family of its own, whose groups are of one rank here: reducing it is no collective, so no
// collective can notice that a rank does it once more than the others.
ModelDescription DenseAndExpert() {
  ModelDescription model = ChainModel(2, 12);
  model.parameters.push_back(PlainParameter("expert", 6));
  model.parameters.back().family = Family::kExpert;
  model.root.children.push_back({"expert", "Expert", {2}, {}, false});
  return model;
}

absl::Status OneStep(RankContext& rank, int odd, bool longer) {
  for (int leaf : {0, 1}) {
    EK_RETURN_IF_ERROR(rank.model->Fetch({leaf}).status());
    EK_RETURN_IF_ERROR(rank.model->FlushGradients({leaf}));
    EK_RETURN_IF_ERROR(rank.model->Release({leaf}));
  }
  EK_RETURN_IF_ERROR(rank.model->FlushGradients({2}));
  if (rank.rank == odd && longer) EK_RETURN_IF_ERROR(rank.model->FlushGradients({2}));
  return rank.model->Step().status();
}

// Lists of different length: no hang, the same error everywhere, both lists in it.
TEST(AgreementTest, Trail56_ListsOfDifferentLengthAreShownOnEveryRank) {
  for (int odd = 0; odd < 3; ++odd) {
    OnRanksConfig config;
    config.world_size = 3;
    config.description = DenseAndExpert();
    const std::vector<absl::Status> statuses = OnRanksStatuses(config, [odd](RankContext& rank) -> absl::Status {
      EK_RETURN_IF_ERROR(OneStep(rank, odd, false));
      return OneStep(rank, odd, true);
    });
    ASSERT_THAT(statuses, SizeIs(3));
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr(absl::StrCat("rank ", odd, " has an order of its own from call 5 on"))));
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("6 calls [..., gather leaf1, reduce leaf1, reduce expert, reduce expert]"),
                        HasSubstr("others have 5 calls [..., gather leaf1, reduce leaf1, reduce expert]")));
    }
  }
}

constexpr int64_t kElements = 12;

// Adds `value` to every gradient of the leaf.
absl::Status Add(RankContext& rank, int leaf, float value) {
  EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({leaf}));
  for (int64_t i = 0; i < kElements; ++i) gradients[0].data<float>()[i] += value;
  return absl::OkStatus();
}

// Every weight of the leaf is `moved` below its first value.
absl::Status CheckMoved(RankContext& rank, int leaf, float moved) {
  EK_ASSIGN_OR_RETURN(const LeafWeights weights, rank.model->Fetch({leaf}));
  EK_ASSIGN_OR_RETURN(const ConstTensorView view, weights.Get(0));
  for (int64_t i = 0; i < kElements; ++i) {
    const auto first = static_cast<float>(InitialValue(rank.model->parameters()[static_cast<size_t>(leaf)], 1, i));
    EK_RETURN_IF_ERROR(Check(view.data<float>()[i] == first - moved, absl::StrCat("leaf ", leaf, " element ", i)));
  }
  return rank.model->Release({leaf});
}

// Asking for gradients once more behind a flush is a local matter until the step, which reduces them: on all ranks, or
// one of them would wait in a reduction that the others never enter. What it has added counts.
TEST(AgreementTest, GradientsAskedForAgainOnOneRankAreReducedOnAll) {
  for (const char* policy : {"flat", "per_parameter", "replicated"}) {
    for (const int64_t bucket_bytes : {0, 4096}) {
      for (int odd = 0; odd < 3; ++odd) {
        OnRanksConfig config;
        config.world_size = 3;
        config.description = ChainModel(2, kElements);
        config.options.policy = policy;
        config.options.reduce_bucket_bytes = bucket_bytes;
        config.options.optimizer.learning_rate = 0.125;
        EXPECT_OK(OnRanks(config,
                          [odd](RankContext& rank) -> absl::Status {
                            for (int leaf : {0, 1}) {
                              EK_RETURN_IF_ERROR(Add(rank, leaf, 1));
                              EK_RETURN_IF_ERROR(rank.model->FlushGradients({leaf}));
                            }
                            if (rank.rank == odd) EK_RETURN_IF_ERROR(Add(rank, 0, 3));
                            EK_RETURN_IF_ERROR(rank.model->Step().status());
                            EK_RETURN_IF_ERROR(CheckMoved(rank, 0, 0.25f));  // (1 + 1 + 1 + 3) / 3 times the rate
                            EK_RETURN_IF_ERROR(CheckMoved(rank, 1, 0.125f));
                            return rank.model->Step().status();
                          }))
            << policy << " odd " << odd << " buckets " << bucket_bytes;
      }
    }
  }
}

// With micro-batches it is one too many, and the same error everywhere.
TEST(AgreementTest, AMicroBatchTooManyOnOneRankIsEveryRanksError) {
  OnRanksConfig config;
  config.world_size = 3;
  config.description = ChainModel(2, kElements);
  config.options.micro_batches = 2;
  const std::vector<absl::Status> statuses = OnRanksStatuses(config, [](RankContext& rank) -> absl::Status {
    for (int pass = 0; pass < 2; ++pass) {
      for (int leaf : {0, 1}) EK_RETURN_IF_ERROR(rank.model->FlushGradients({leaf}));
    }
    if (rank.rank == 1) EK_RETURN_IF_ERROR(Add(rank, 0, 3));
    return rank.model->Step().status();
  });
  ASSERT_THAT(statuses, SizeIs(3));
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("leaf0")));
  }
}

TEST(AgreementTest, OrdersAreComparedWithTheMostCommonOne) {
  const std::vector<std::string> names = {"a", "b"};
  EXPECT_THAT(CompareOrders({{0, 1}, {0, 1}}, names), SizeIs(0));
  EXPECT_THAT(CompareOrders({}, names), SizeIs(0));
  const auto empty = CompareOrders({{0, 1}, {}, {0, 1}}, names);
  ASSERT_THAT(empty, SizeIs(1));
  EXPECT_EQ(empty[0].rank, 1);
  EXPECT_EQ(empty[0].had,
            "has an order of its own from call 0 on: 0 calls [] where others have 2 calls [gather a, reduce a]");
  const auto swapped = CompareOrders({{2, 0, 14}, {0, 2}, {0, 2}, {3}}, names);
  ASSERT_THAT(swapped, SizeIs(2));
  EXPECT_EQ(swapped[0].rank, 0);
  EXPECT_THAT(swapped[0].had, HasSubstr("3 calls [gather b, gather a, gather unit 7]"));
  EXPECT_EQ(swapped[1].rank, 3);
  EXPECT_THAT(swapped[1].had, HasSubstr("1 calls [reduce b]"));
  // A long list shows the calls around the difference.
  std::vector<int64_t> longer(40, 0), other(40, 0);
  other[30] = 2;
  const auto around = CompareOrders({longer, other, longer}, names);
  ASSERT_THAT(around, SizeIs(1));
  EXPECT_THAT(around[0].had,
              HasSubstr("from call 30 on: 40 calls [..., gather a, gather a, gather a, gather b, gather a"));
}

// A bit of a shard is wrong when the shard is gathered, and right again before the step: the pass has used it, so
// nobody steps, and the leaf is named.
TEST(AgreementTest, C37_ShardThatWasWrongWhenItWasGathered) {
  for (int wrong_step : {0, 2}) {
    OnRanksConfig config;
    config.world_size = 3;
    config.description = ChainModel(2, 12);
    config.options.verify_shards = true;
    const std::vector<absl::Status> statuses = OnRanksStatuses(config, [&](RankContext& rank) -> absl::Status {
      for (int step = 0;; ++step) {
        unsigned char* bit = nullptr;
        for (const StateTensor& tensor : rank.model->StateTensors()) {
          if (tensor.parameter == 1) bit = static_cast<unsigned char*>(tensor.fragments[0].data.raw());
        }
        const bool spoil = rank.rank == 1 && step == wrong_step;
        if (spoil) *bit ^= 1;
        for (int leaf : {0, 1}) {
          EK_RETURN_IF_ERROR(rank.model->Fetch({leaf}).status());
          EK_RETURN_IF_ERROR(rank.model->Release({leaf}));
        }
        if (spoil) *bit ^= 1;
        EK_RETURN_IF_ERROR(rank.model->Step().status());
        EK_RETURN_IF_ERROR(Check(step < wrong_step, "nobody steps"));
      }
    });
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, HasSubstr("rank 1 has a changed shard")));
    }
    EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kDataLoss, HasSubstr("shard of leaf1")));
  }
}

constexpr int64_t kRouter = 40 * 40;

// "moe" owns the router; "gate" uses it too, and says so.
ModelDescription RouterUsedOutside() {
  ModelDescription model;
  model.root.type = "Model";
  model.parameters = {PlainParameter("router", kRouter), PlainParameter("expert", 50), PlainParameter("norm", 8),
                      PlainParameter("next", kRouter)};
  model.root.children.push_back({"moe", "MoeBlock", {0, 1}, {}, false});
  model.root.children.push_back({"gate", "Gate", {2, 0}, {}, false});
  model.root.children.push_back({"next", "Linear", {3}, {}, false});
  return model;
}

absl::Status AddOnes(RankContext& rank, int leaf, size_t position) {
  EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({leaf}));
  for (int64_t i = 0; i < kRouter; ++i) gradients[position].data<float>()[i] += 1;
  return rank.model->FlushGradients({leaf});
}

// The router is above the persistence threshold, so it is released; the gate reads it in every forward and backward
// pass all the same, over the recorded step and three that follow the plan. Upstream, the second step saw 0 elements.
TEST(AgreementTest, Trail51_RouterAboveTheThresholdUsedFromOutsideItsLeaf) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    OnRanksConfig config;
    config.description = RouterUsedOutside();
    config.leaves.rules = {LeafRule::Type("MoeBlock")};
    config.options.policy = policy;
    config.options.persistent_elements = 100;
    config.options.prefetch_bytes = 10000;
    config.options.poison_released = true;
    config.options.optimizer.learning_rate = 0.125;
    EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
      PartitionedModel& model = *rank.model;
      const int64_t base = model.counts().gathered_bytes;  // norm, and staging where the policy has some
      EK_ASSIGN_OR_RETURN(const LeafId moe, model.FindLeaf("moe"));
      EK_ASSIGN_OR_RETURN(const LeafId gate, model.FindLeaf("gate"));
      EK_ASSIGN_OR_RETURN(const LeafId next, model.FindLeaf("next"));
      std::vector<float> expected;
      for (int64_t i = 0; i < kRouter; ++i) {
        expected.push_back(static_cast<float>(InitialValue(model.parameters()[0], 1, i)));
      }
      const auto read = [&](absl::string_view when) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const LeafWeights weights, model.Fetch(gate));
        EK_ASSIGN_OR_RETURN(const ConstTensorView router, weights.Get(1));
        EK_RETURN_IF_ERROR(Check(router.num_elements() == kRouter, absl::StrCat(when, ": elements")));
        for (int64_t i = 0; i < kRouter; ++i) {
          const bool right = router.data<float>()[i] == expected[static_cast<size_t>(i)];
          EK_RETURN_IF_ERROR(Check(right, absl::StrCat(when, ": element ", i)));
        }
        return absl::OkStatus();
      };
      for (int step = 0; step < 4; ++step) {
        EK_ASSIGN_OR_RETURN(const LeafWeights inside, model.Fetch(moe));
        // The gate begins inside the block and ends after it.
        EK_RETURN_IF_ERROR(model.Fetch(gate).status());
        EK_RETURN_IF_ERROR(model.Release(moe));
        // Takes any memory that was given back too early.
        EK_RETURN_IF_ERROR(model.Fetch(next).status());
        EK_RETURN_IF_ERROR(model.Release(next));
        // Not through a fetch of its own: an error that says so, not a tensor of nothing.
        EXPECT_THAT(inside.Get(0), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("was released")));
        EK_RETURN_IF_ERROR(read(absl::StrCat("forward of step ", step)));
        EK_RETURN_IF_ERROR(model.Release(gate));
        EK_RETURN_IF_ERROR(model.Release(gate));
        EK_RETURN_IF_ERROR(read(absl::StrCat("backward of step ", step)));
        EK_RETURN_IF_ERROR(AddOnes(rank, gate.value, 1));
        EK_RETURN_IF_ERROR(model.Release(gate));
        EK_RETURN_IF_ERROR(model.Fetch(moe).status());
        EK_RETURN_IF_ERROR(AddOnes(rank, moe.value, 0));
        EK_RETURN_IF_ERROR(model.Release(moe));
        EK_RETURN_IF_ERROR(model.Step().status());
        for (float& w : expected) w -= 0.125f * 2.0f;  // both users' ones, averaged over the ranks
        EK_RETURN_IF_ERROR(Check(model.trace_state() == TraceState::kComplete, "the order is known from step 1 on"));
      }
      return Check(model.counts().gathered_bytes == base, "the router is not persistent");
    })) << policy;
  }
}

// Two models of one description on the same streams and group: what one fetches, flushes and steps is not the other's.
// A wrapper around a leaf has nothing of its child's.
TEST(AgreementTest, Trail67_StateBelongsToTheInstance) {
  OnRanksConfig config;
  config.description = ChainModel(1, 12);
  config.options.optimizer.learning_rate = 0.5;
  EXPECT_OK(OnRanks(config, [&config](RankContext& rank) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(config.description, {}));
    EK_ASSIGN_OR_RETURN(
        const auto other,
        PartitionedModel::Create(config.description.parameters, selection, config.options, {.dp = rank.dp.get()},
                                 rank.device.get(), rank.compute.get(), rank.comm.get()));
    PartitionedModel& model = *rank.model;
    for (int step = 0; step < 3; ++step) {
      EK_ASSIGN_OR_RETURN(const LeafWeights weights, model.Fetch({0}));
      EXPECT_THAT(other->Release({0}), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is not fetched")));
      EK_RETURN_IF_ERROR(Check(other->counts().gathered_bytes == 0, "the other model has gathered nothing"));
      EK_ASSIGN_OR_RETURN(const auto gradients, model.Gradients({0}));
      gradients[0].data<float>()[0] += 2;
      EK_RETURN_IF_ERROR(model.FlushGradients({0}));
      EK_RETURN_IF_ERROR(weights.Get(0).status());
      EK_RETURN_IF_ERROR(model.Release({0}));
      EK_ASSIGN_OR_RETURN(const StepResult mine, model.Step());
      EK_ASSIGN_OR_RETURN(const StepResult its, other->Step());
      EK_RETURN_IF_ERROR(Check(mine.gradient_norm == 2 && its.gradient_norm == 0, "gradients are kept apart"));
    }
    std::vector<float> a(12), b(12);
    EK_RETURN_IF_ERROR(model.ReadTensor(0, TensorKind::kWeight, "", TensorView(a.data(), DType::kF32, Shape({12}))));
    EK_RETURN_IF_ERROR(other->ReadTensor(0, TensorKind::kWeight, "", TensorView(b.data(), DType::kF32, Shape({12}))));
    const float initial = static_cast<float>(InitialValue(model.parameters()[0], 1, 0));
    return Check(b[0] == initial && a[0] == ((initial - 1) - 1) - 1, "only one model has moved");
  }));

  ModelDescription wrapped = ChainModel(2, 12);
  ModuleNode wrapper{"wrapper", "MoeBlock", {}, {}, false};  // same type, no parameters of its own
  wrapper.children = std::move(wrapped.root.children);
  wrapper.children[0].type = "MoeBlock";
  wrapped.root.children = {std::move(wrapper)};
  LeafOptions options;
  options.rules = {LeafRule::Name("wrapper.leaf0")};
  ASSERT_OK_AND_ASSIGN(const LeafSelection selection, SelectLeaves(wrapped, options));
  for (const Leaf& leaf : selection.leaves) {
    EXPECT_NE(leaf.name, "wrapper");
    if (leaf.name != "wrapper.leaf0") continue;
    EXPECT_EQ(leaf.parameters, std::vector<int>{0});
  }
}

}  // namespace
}  // namespace evenkeel::zero3
