// Fetching and releasing: orders recorded and left, memory by plan, races on worker streams, views that go stale.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

void ExpectSameBits(const ToyRun& a, const ToyRun& b, const std::string& what) {
  for (size_t r = 0; r < a.ranks.size(); ++r) {
    ASSERT_EQ(a.ranks[r].steps.size(), b.ranks[r].steps.size());
    for (size_t s = 0; s < a.ranks[r].steps.size(); ++s) {
      ASSERT_EQ(a.ranks[r].steps[s].activation, b.ranks[r].steps[s].activation)
          << what << " rank " << r << " step " << s;
      ASSERT_EQ(a.ranks[r].steps[s].weights_digest, b.ranks[r].steps[s].weights_digest) << what;
    }
  }
}

using Body = std::function<absl::Status(PartitionedModel& model, Stream& compute)>;

// Two leaves that share a parameter.
absl::Status OnTwoRanks(const PartitionedModelOptions& options, const Body& body) {
  OnRanksConfig config;
  config.description = SharedModel();
  config.options = options;
  return OnRanks(config, [&body](RankContext& rank) { return body(*rank.model, *rank.compute); });
}

ToyConfig SmallConfig(int world) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = world, .etp = 1};
  config.device.poison = true;
  config.options.poison_released = true;
  config.options.prefetch_bytes = 3000;
  config.options.reuse_distance_bytes = 0;
  config.steps = 6;
  return config;
}

// Steps 0..2 record and walk, step 3 visits another order (left plan), 4 and 5 walk the new one.
TEST(FetchTest, Trail60_61_ChangedOrderIsRecordedAnewWithTheSameBits) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    ToyConfig config = SmallConfig(3);
    config.steps = 9;
    config.options.policy = policy;
    config.order = [](int step, int num_leaves) {
      std::vector<int> order;
      for (int l = 0; l < num_leaves; ++l) order.push_back(l);
      if (step >= 3) std::swap(order[2], order[4]);
      if (step == 6) order.pop_back();  // a shorter pass
      return order;
    };
    ToyConfig reference = config;
    reference.options = PartitionedModelOptions();
    reference.options.policy = "replicated";
    ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(reference));
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ExpectSameBits(expected, run, policy);
    EXPECT_EQ(run.ranks[0].counts.trace_changes, 3) << policy;  // at 3, at 6, and back at 7
    EXPECT_EQ(run.ranks[0].trace_state, TraceState::kComplete);
    EXPECT_GT(run.ranks[0].counts.prefetched, 0);
  }
}

// Three steps in each state with micro-batches, recompute, evaluation passes and persistence.
TEST(FetchTest, Trail60_62_68_EverythingAtOnce) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    for (int64_t persistent : {0, 7, 50, 100000}) {
      ToyConfig config = SmallConfig(4);
      config.options.policy = policy;
      config.micro_batches = 2;
      config.recompute = true;
      config.eval_between = true;
      config.options.persistent_elements = persistent;
      // An expert that nobody uses, and a replica without tokens.
      config.expert_used = [](int, int replica, int expert) { return expert != 2 && replica != 1; };
      ToyConfig reference = config;
      reference.options = PartitionedModelOptions();
      reference.options.policy = "replicated";
      ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(reference));
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      ExpectSameBits(expected, run, absl::StrCat(policy, " persistent ", persistent));
      EXPECT_EQ(run.ranks[0].counts.trace_changes, 0);
      EXPECT_GE(run.ranks[0].counts.gathered_bytes, 0);
    }
  }
}

// Persistent parameters are gathered once per update, whether the order is known or not.
TEST(FetchTest, Trail63_PersistenceIsHonouredInEveryStep) {
  ToyConfig config = SmallConfig(3);
  config.options.persistent_elements = 100000;  // everything
  config.options.policy = "flat";
  config.steps = 5;
  ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
  config.steps = 1;  // ends while the order is still being recorded
  ASSERT_OK_AND_ASSIGN(const ToyRun first, RunToy(config));
  EXPECT_GT(first.ranks[0].counts.gathers, 0);
  EXPECT_EQ(run.ranks[0].counts.gathers, 5 * first.ranks[0].counts.gathers);
  EXPECT_EQ(first.ranks[0].counts.fetch_cycles, 0);
  EXPECT_EQ(run.ranks[0].counts.fetch_cycles, 0);
  EXPECT_EQ(run.ranks[0].counts.peak_gathered_bytes, run.ranks[0].counts.gathered_bytes);
}

TEST(FetchTest, LimitThatCannotBeMetNamesTheLeafBeforeTheFirstStep) {
  ToyConfig config = SmallConfig(2);
  config.options.max_live_bytes = 1000;  // a block of 4 experts has 4 * 7 * 12 * 4 bytes
  ToyRun run;
  for (const absl::Status& status : RunToyStatuses(config, &run)) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("layers.0.moe: needs")));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_live_bytes is 1000")));
  }
  config.options.max_live_bytes = 1600;
  ASSERT_OK_AND_ASSIGN(const ToyRun fits, RunToy(config));
  EXPECT_LE(fits.ranks[0].counts.peak_gathered_bytes, 1600);
}

// Gather on one stream, compute on another, delays everywhere, freed and released memory poisoned: same bits.
TEST(FetchTest, Trail81_82_83_85_106_RacesUnderDelays) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    ToyConfig config = SmallConfig(3);
    config.options.policy = policy;
    config.micro_batches = 2;
    config.options.reduce_bucket_bytes = 500;
    config.steps = 4;
    ToyConfig reference = config;
    reference.options = PartitionedModelOptions();
    reference.options.policy = "replicated";
    ASSERT_OK_AND_ASSIGN(const ToyRun expected, RunToy(reference));
    for (int slow = 0; slow < 3; ++slow) {
      config.device.stream_mode = HostDevice::StreamMode::kWorker;
      config.device.delay = [slow](absl::string_view stream, int64_t n) {
        const bool this_one = slow == 2 ? n % 3 == 0 : (stream == "compute") == (slow == 0);
        return this_one && n % 5 < 2 ? absl::Microseconds(200) : absl::ZeroDuration();
      };
      ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
      ExpectSameBits(expected, run, absl::StrCat(policy, " slow ", slow));
      for (const ToyRank& rank : run.ranks) {
        EXPECT_EQ(rank.counts.peak_gathered_bytes, rank.counts.predicted_peak_gathered_bytes);
      }
    }
  }
}

// Releasing one of two users leaves the parameter whole for the other (DeepSpeed's stand-in had 1 element).
TEST(FetchTest, Trail65_SharedParameterLivesUntilItsLastUserIsDone) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    PartitionedModelOptions options;
    options.policy = policy;
    options.poison_released = true;
    EXPECT_OK(OnTwoRanks(options, [](PartitionedModel& model, Stream&) -> absl::Status {
      for (int pass = 0; pass < 4; ++pass) {
        EK_RETURN_IF_ERROR(model.Fetch({0}).status());
        EK_ASSIGN_OR_RETURN(const LeafWeights b, model.Fetch({1}));
        EK_RETURN_IF_ERROR(model.Release({0}));
        EK_ASSIGN_OR_RETURN(const ConstTensorView shared, b.Get(1));
        EK_RETURN_IF_ERROR(Check(shared.num_elements() == 11, "the shared parameter has its elements"));
        for (int64_t i = 0; i < 11; ++i) {
          const float expected = static_cast<float>(InitialValue(model.parameters()[2], 1, i));
          EK_RETURN_IF_ERROR(Check(shared.data<float>()[i] == expected, "the shared parameter has its values"));
        }
        EK_RETURN_IF_ERROR(model.Release({1}));
        EK_RETURN_IF_ERROR(model.UseTrace("step"));
      }
      return Check(model.counts().gathers == 4 * 3, "every unit was gathered once per pass");
    })) << policy;
  }
}

// Three forward passes, then three backward passes, in a known order: every leaf comes early, nothing is wasted.
TEST(FetchTest, SeveralForwardPassesBeforeABackward) {
  PartitionedModelOptions options;
  options.prefetch_bytes = 200;
  options.reuse_distance_bytes = 0;
  EXPECT_OK(OnTwoRanks(options, [](PartitionedModel& model, Stream&) -> absl::Status {
    const std::vector<int> order = {0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0};
    for (int step = 0; step < 4; ++step) {
      const ModelCounts before = model.counts();
      for (size_t i = 0; i < order.size(); ++i) {
        EK_ASSIGN_OR_RETURN(const LeafWeights weights, model.Fetch({order[i]}));
        EK_RETURN_IF_ERROR(Check(std::isfinite(weights.views()[0].data<float>()[0]), "weights are whole"));
        if (i >= 6) {
          EK_ASSIGN_OR_RETURN(const auto gradients, model.Gradients({order[i]}));
          gradients[0].data<float>()[0] += 1;
          EK_RETURN_IF_ERROR(model.FlushGradients({order[i]}));
        }
        EK_RETURN_IF_ERROR(model.Release({order[i]}));
      }
      EK_ASSIGN_OR_RETURN(const StepResult result, model.Step());
      // Two leaves with three flushes each, one element each, ranks alike: sqrt(3^2 + 3^2).
      EK_RETURN_IF_ERROR(Check(std::abs(result.gradient_norm - std::sqrt(18.0)) < 1e-12, "three flushes add up"));
      if (step == 0) continue;
      EK_RETURN_IF_ERROR(Check(model.counts().prefetched > before.prefetched, "leaves come early"));
      EK_RETURN_IF_ERROR(Check(model.counts().prefetch_wasted == 0, "nothing was gathered in vain"));
      EK_RETURN_IF_ERROR(Check(model.counts().trace_changes == 0, "the order held"));
    }
    return absl::OkStatus();
  }));
}

TEST(FetchTest, StaleViewsAndWrongReleasesAreErrors) {
  EXPECT_OK(OnTwoRanks({}, [](PartitionedModel& model, Stream&) -> absl::Status {
    EXPECT_THAT(model.Release({0}), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is not fetched")));
    EXPECT_THAT(model.Fetch({7}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("leaf 7 of 2")));
    EXPECT_THAT(model.FindLeaf("c"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("there are: a, b")));
    EK_ASSIGN_OR_RETURN(const LeafWeights weights, model.Fetch({0}));
    EXPECT_OK(weights.Get(1));
    EXPECT_THAT(weights.Get(2), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("parameter 2 of 2")));
    EXPECT_THAT(model.Step(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("still fetched by 1 users")));
    EXPECT_THAT(model.UseTrace("x"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("still fetched")));
    EK_RETURN_IF_ERROR(model.Release({0}));
    EXPECT_THAT(weights.Get(0), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("was released")));
    return absl::OkStatus();
  }));
}

// A leaf whose input needs no gradient never flushes: the step does it, with zeros.
TEST(FetchTest, Trail58_LeafThatIsNeverFlushedIsReducedAtTheStep) {
  EXPECT_OK(OnTwoRanks({}, [](PartitionedModel& model, Stream&) -> absl::Status {
    for (int step = 0; step < 3; ++step) {
      EK_ASSIGN_OR_RETURN(const auto gradients, model.Gradients({0}));
      gradients[0].data<float>()[2] += 4;
      EK_ASSIGN_OR_RETURN(const StepResult result, model.Step());
      EK_RETURN_IF_ERROR(Check(result.stepped && result.gradient_norm == 4.0, "the added gradient arrived, once"));
    }
    return absl::OkStatus();
  }));
}

// Leaves of equal size fetched in another order on one rank: no collective can tell, the weights are mixed up. The step
// is not taken, and the odd rank is named.
TEST(FetchTest, C33_Trail54_MixedUpLeavesOfEqualSizeStopTheStep) {
  ToyConfig config = SmallConfig(3);
  config.options.prefetch_bytes = 0;
  config.options.reuse_distance_bytes = -1;
  config.options.poison_released = false;
  config.steps = 3;
  config.before_step = [](int step, int rank, PartitionedModel& model) -> absl::Status {
    if (step != 1) return absl::OkStatus();
    // The blocks of two layers, in turn; rank 2 takes the other one first.
    for (int turn = 0; turn < 2; ++turn) {
      EK_ASSIGN_OR_RETURN(const LeafId leaf,
                          model.FindLeaf(absl::StrCat("layers.", rank == 2 ? 1 - turn : turn, ".moe")));
      EK_RETURN_IF_ERROR(model.Fetch(leaf).status());
      EK_RETURN_IF_ERROR(model.Release(leaf));
    }
    return absl::OkStatus();
  };
  ToyRun run;
  for (const absl::Status& status : RunToyStatuses(config, &run)) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in different orders")));
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 2 has an order of its own")));
  }
  for (const ToyRank& rank : run.ranks) EXPECT_EQ(rank.steps.size(), 1u);
}

// Leaves of other sizes are refused by the collective itself, on all ranks, at once.
TEST(FetchTest, C33_LeavesOfOtherSizesAreRefusedBeforeBytesMove) {
  ToyConfig config = SmallConfig(3);
  config.steps = 3;
  config.before_step = [](int step, int rank, PartitionedModel& model) -> absl::Status {
    if (step != 1) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(const LeafId leaf, model.FindLeaf(rank == 1 ? "layers.0" : "layers.0.moe"));
    return model.Fetch(leaf).status();
  };
  ToyRun run;
  for (const absl::Status& status : RunToyStatuses(config, &run)) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }
}

TEST(FetchTest, MaxLiveBytesAtRunTimeIsAnErrorBeforeTheCollective) {
  PartitionedModelOptions options;
  options.max_live_bytes = 100;  // one leaf with the shared unit at a time
  EXPECT_OK(OnTwoRanks(options, [](PartitionedModel& model, Stream&) -> absl::Status {
    EK_RETURN_IF_ERROR(model.Fetch({0}).status());
    EXPECT_THAT(model.Fetch({1}), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("b: needs")));
    EK_RETURN_IF_ERROR(model.Release({0}));
    EK_RETURN_IF_ERROR(model.Fetch({1}).status());
    return model.Release({1});
  }));
}

}  // namespace
}  // namespace evenkeel::zero3
