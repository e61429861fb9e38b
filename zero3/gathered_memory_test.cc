// What is gathered when: live bytes after every call, peaks predicted to the byte, and back to nothing.
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/fetch_plan.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/pass_peak.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

constexpr const char* kPolicies[] = {"flat", "coalesced", "per_parameter"};

ToyConfig SmallConfig(const char* policy) {
  ToyConfig config;
  config.mesh = {.tp = 1, .ep = 1, .dp = 3, .etp = 1};
  config.device.poison = true;
  config.options.policy = policy;
  config.options.poison_released = true;
  return config;
}

// A leaf's memory is there while it is fetched and gone when the next one comes, in the forward pass too: with the
// order known to the byte at every call; while it is learned, no more than the leaf before is still waiting.
TEST(GatheredMemoryTest, Trail53_LiveBytesFallWithEveryReleaseOfTheForwardPass) {
  for (const char* policy : kPolicies) {
    OnRanksConfig config;
    config.description = ChainModel(4, 24);
    config.options.policy = policy;
    EXPECT_OK(OnRanks(config, [policy](RankContext& rank) -> absl::Status {
      PartitionedModel& model = *rank.model;
      const int64_t base = model.counts().gathered_bytes;
      const bool planned = std::string(policy) == "flat";
      for (int step = 0; step < 3; ++step) {
        for (int leaf = 0; leaf < 4; ++leaf) {
          EK_RETURN_IF_ERROR(model.Fetch({leaf}).status());
          const int64_t fetched = model.counts().gathered_bytes - base;
          EK_RETURN_IF_ERROR(model.Release({leaf}));
          const int64_t released = model.counts().gathered_bytes - base;
          // per_parameter holds its second copy until the next gather.
          const int64_t most = std::string(policy) == "per_parameter" ? 2 * 96 : 96;
          EK_RETURN_IF_ERROR(Check(fetched >= 96 && fetched <= most, absl::StrCat("fetched ", fetched)));
          EK_RETURN_IF_ERROR(Check(released == (planned && step > 0 ? 0 : fetched), absl::StrCat("kept ", released)));
        }
        EK_RETURN_IF_ERROR(model.UseTrace("step"));
        EK_RETURN_IF_ERROR(Check(model.counts().gathered_bytes == base, "the pass leaves nothing"));
      }
      return absl::OkStatus();
    })) << policy;
  }
}

// A leaf runs twice in a step, the second time without gradients; counters never go negative and always are the set
// that is in use.
TEST(GatheredMemoryTest, Trail62_LeafThatRunsTwiceKeepsTheCountersTrue) {
  OnRanksConfig config;
  config.description = ChainModel(2, 24);
  EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
    PartitionedModel& model = *rank.model;
    for (int step = 0; step < 4; ++step) {
      const auto expect = [&](int64_t bytes) {
        const int64_t live = model.counts().gathered_bytes;
        // The first pass gives memory back at its next gather only.
        const bool right = step == 0 ? live >= bytes && live <= 2 * 96 : live == bytes;
        return Check(right, absl::StrCat("step ", step, ": ", live, " bytes live, in use ", bytes));
      };
      for (int run = 0; run < 2; ++run) {
        EK_RETURN_IF_ERROR(model.Fetch({0}).status());
        EK_RETURN_IF_ERROR(expect(96));
        EK_RETURN_IF_ERROR(model.Fetch({1}).status());
        EK_RETURN_IF_ERROR(expect(192));
        EK_RETURN_IF_ERROR(model.Release({0}));
        EK_RETURN_IF_ERROR(expect(96));
        EK_RETURN_IF_ERROR(model.Release({1}));
        EK_RETURN_IF_ERROR(expect(0));
      }
      // Backward of the first run only.
      for (int leaf : {1, 0}) {
        EK_RETURN_IF_ERROR(model.Fetch({leaf}).status());
        EK_RETURN_IF_ERROR(expect(96));
        EK_RETURN_IF_ERROR(model.FlushGradients({leaf}));
        EK_RETURN_IF_ERROR(model.Release({leaf}));
        EK_RETURN_IF_ERROR(expect(0));
      }
      EK_RETURN_IF_ERROR(model.Step().status());
      EK_RETURN_IF_ERROR(Check(model.counts().gathered_bytes == 0, "the step leaves nothing"));
      EK_RETURN_IF_ERROR(Check(model.counts().flushes == 2 * (step + 1), "one reduction per leaf and step"));
    }
    return absl::OkStatus();
  }));
}

TEST(GatheredMemoryTest, Trail71_ReleasedMemoryGoesBackToTheBaseline) {
  for (const char* policy : kPolicies) {
    ToyConfig config = SmallConfig(policy);
    config.steps = 6;
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    config.steps = 1;
    config.micro_batches = 3;
    ASSERT_OK_AND_ASSIGN(const ToyRun one, RunToy(config));
    // What is left is staging, which is there before the first fetch too; and never more than in the first pass.
    EXPECT_EQ(run.ranks[0].counts.gathered_bytes, one.ranks[0].counts.gathered_bytes) << policy;
    if (std::string(policy) == "flat") {
      EXPECT_EQ(run.ranks[0].counts.gathered_bytes, 0);
    }
  }
}

// The counted peak equals the prediction to the byte in every mode.
TEST(GatheredMemoryTest, PeakIsThePredictedPeak) {
  for (const char* policy : kPolicies) {
    for (int64_t prefetch : {0, 1500, 100000}) {
      for (int64_t reuse : {-1, 0, 4000}) {
        for (int64_t persistent : {0, 30}) {
          ToyConfig config = SmallConfig(policy);
          config.options.prefetch_bytes = prefetch;
          config.options.reuse_distance_bytes = reuse;
          config.options.persistent_elements = persistent;
          ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
          for (const ToyRank& rank : run.ranks) {
            EXPECT_EQ(rank.counts.peak_gathered_bytes, rank.counts.predicted_peak_gathered_bytes)
                << policy << " prefetch " << prefetch << " reuse " << reuse << " persistent " << persistent;
          }
        }
      }
    }
  }
}

// ... and in a pass that leaves its order: at every position, by a swap, by ending early, by going on. ResetPeak makes
// every pass show its own peak.
TEST(GatheredMemoryTest, PeakOfAPassThatLeavesItsOrderIsThePredictedPeak) {
  const std::vector<std::vector<int>> passes = {{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 3, 2},       {0, 1, 3, 2},
                                                {0, 1},       {0, 1},       {0, 1, 2, 3, 3},    {0, 1, 2, 3, 3},
                                                {2, 0, 0, 1}, {2, 0, 0, 1}, {2, 0, 3},          {3},
                                                {3, 2, 1, 0}, {3, 1, 2, 0}, {3, 1, 2, 0, 1, 2}, {3, 1, 2, 0, 1, 2}};
  for (const char* policy : kPolicies) {
    for (int64_t prefetch : {0, 250, 100000}) {
      for (int64_t reuse : {-1, 150, 100000}) {
        for (bool nested : {false, true}) {
          OnRanksConfig config;
          config.description = ChainModel(4, 24);
          for (int p = 0; p < 4; ++p) config.description.parameters[static_cast<size_t>(p)].shape = Shape({20 + 9 * p});
          config.options.policy = policy;
          config.options.prefetch_bytes = prefetch;
          config.options.reuse_distance_bytes = reuse;
          EXPECT_OK(OnRanks(config,
                            [&](RankContext& rank) -> absl::Status {
                              PartitionedModel& model = *rank.model;
                              for (size_t i = 0; i < passes.size(); ++i) {
                                model.ResetPeak();
                                if (nested) EK_RETURN_IF_ERROR(model.Fetch({passes[i][0]}).status());
                                for (int leaf : passes[i]) {
                                  EK_RETURN_IF_ERROR(model.Fetch({leaf}).status());
                                  EK_RETURN_IF_ERROR(model.Release({leaf}));
                                }
                                if (nested) EK_RETURN_IF_ERROR(model.Release({passes[i][0]}));
                                EK_RETURN_IF_ERROR(model.UseTrace("step"));
                                const ModelCounts counts = model.counts();
                                EK_RETURN_IF_ERROR(
                                    Check(counts.peak_gathered_bytes == counts.predicted_peak_gathered_bytes,
                                          absl::StrCat("pass ", i, ": counted ", counts.peak_gathered_bytes,
                                                       ", predicted ", counts.predicted_peak_gathered_bytes)));
                              }
                              return Check(model.counts().trace_changes > 4, "orders were left");
                            }))
              << policy << " prefetch " << prefetch << " reuse " << reuse << " nested " << nested;
        }
      }
    }
  }
}

// By hand: units of 100, 10 and 50 bytes. The plan gathers the next one early; the pass leaves it at its second fetch.
TEST(GatheredMemoryTest, LeftPassByHand) {
  using Kind = Visit::Kind;
  const std::vector<Visit> visits = {{Kind::kFetch, 0},   {Kind::kRelease, 0}, {Kind::kFetch, 1},
                                     {Kind::kRelease, 1}, {Kind::kFetch, 2},   {Kind::kRelease, 2}};
  PlanOptions options;
  options.prefetch_bytes = 60;
  options.fixed_bytes = 1000;
  ASSERT_OK_AND_ASSIGN(const FetchPlan plan, FetchPlan::Build({{"a", 100}, {"b", 10}, {"c", 50}},
                                                              {{"A", {0}}, {"B", {1}}, {"C", {2}}}, visits, options));
  EXPECT_EQ(plan.peak_bytes(), 1160);  // a, and both others early
  EXPECT_EQ(PeakOfLeftPass(plan, 6, visits, options), plan.peak_bytes());
  // Left at once: nothing early. c and a live together: 150.
  const std::vector<Visit> other = {{Kind::kFetch, 2}, {Kind::kFetch, 0}, {Kind::kRelease, 0}, {Kind::kRelease, 2}};
  EXPECT_EQ(PeakOfLeftPass(plan, 0, other, options), 1150);
  // Left after a: b and c came early (160 live) and are dropped; their places are free at once.
  const std::vector<Visit> later = {{Kind::kFetch, 0}, {Kind::kRelease, 0}, {Kind::kFetch, 2}, {Kind::kRelease, 2}};
  EXPECT_EQ(PeakOfLeftPass(plan, 2, later, options), 1160);
  // On demand from there on memory of its own is given back by the next gather only: a twice is no 200.
  const std::vector<Visit> twice = {{Kind::kFetch, 2}, {Kind::kRelease, 2}, {Kind::kFetch, 0}, {Kind::kRelease, 0}};
  EXPECT_EQ(PeakOfLeftPass(plan, 0, twice, options), 1100);
}

// The peak that is counted is memory that the device really gave: nothing else allocates here.
TEST(GatheredMemoryTest, CountedPeakIsWhatTheDeviceAllocated) {
  for (const char* policy : kPolicies) {
    OnRanksConfig config;
    config.description = SharedModel();
    config.options.policy = policy;
    config.options.prefetch_bytes = 50;
    EXPECT_OK(OnRanks(config, [policy](RankContext& rank) -> absl::Status {
      PartitionedModel& model = *rank.model;
      WorkCounters& counters = rank.device->counters();
      const int64_t base = counters.Snapshot().live_bytes - model.counts().gathered_bytes;
      for (int pass = 0; pass < 3; ++pass) {
        for (int leaf : {0, 1, 0}) {
          EK_RETURN_IF_ERROR(model.Fetch({leaf}).status());
          EK_RETURN_IF_ERROR(model.Release({leaf}));
        }
        const int64_t arena = model.counts().arena_bytes;
        const int64_t peak = counters.Snapshot().peak_live_bytes - base - arena;
        EK_RETURN_IF_ERROR(model.UseTrace("step"));
        const bool planned = arena > 0;
        if (!planned && peak != model.counts().peak_gathered_bytes) {
          return absl::InternalError(absl::StrCat(policy, " pass ", pass, ": device ", peak, ", counted ",
                                                  model.counts().peak_gathered_bytes));
        }
      }
      return Check(model.counts().peak_gathered_bytes == model.counts().predicted_peak_gathered_bytes, "predicted");
    })) << policy;
  }
}

}  // namespace
}  // namespace evenkeel::zero3
