// Experts beside dense parameters: a partition per group, and the same norm with states in a file.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/toy_training.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

// EP 2 and 4, AdamW, clipping: norm, clip and weights with offloaded states are those without.
TEST(ExpertShardsTest, Trail45_NormOfAMoEModelWithOffloadIsTheSame) {
  const comm::MeshShape meshes[] = {{.tp = 1, .ep = 2, .dp = 4, .etp = 1}, {.tp = 2, .ep = 4, .dp = 4, .etp = 2}};
  for (const comm::MeshShape& mesh : meshes) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      ToyConfig config;
      config.mesh = mesh;
      config.dtype = dtype;
      config.micro_batches = 2;
      config.options.max_gradient_norm = 1;
      config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
      ASSERT_OK_AND_ASSIGN(const ToyRun plain, RunToy(config));
      config.offload_folder = ::testing::TempDir();
      for (bool weights : {false, true}) {
        config.options.offload_weights = weights;
        ASSERT_OK_AND_ASSIGN(const ToyRun offloaded, RunToy(config));
        for (size_t r = 0; r < plain.ranks.size(); ++r) {
          EXPECT_LT(offloaded.ranks[r].state_bytes, plain.ranks[r].state_bytes);
          for (size_t s = 0; s < plain.ranks[r].steps.size(); ++s) {
            const ToyStep& a = plain.ranks[r].steps[s];
            const ToyStep& b = offloaded.ranks[r].steps[s];
            ASSERT_GT(a.result.gradient_norm, 1.0);
            ASSERT_EQ(b.result.gradient_norm, a.result.gradient_norm) << "rank " << r << " step " << s;
            ASSERT_EQ(b.result.clip_scale, a.result.clip_scale) << "rank " << r << " step " << s;
            ASSERT_EQ(b.weights_digest, a.weights_digest) << "rank " << r << " step " << s;
          }
        }
      }
    }
  }
}

// A leaf with dense and expert parameters is one unit per family: two gathers that share their edges, and the host
// operations that the formula predicts.
TEST(ExpertShardsTest, LeafOfTwoFamiliesIsGatheredOncePerFamily) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    ToyConfig config;
    config.mesh = {.tp = 1, .ep = 2, .dp = 4, .etp = 1};
    config.options.policy = policy;
    config.before_step = [](int step, int, PartitionedModel& model) -> absl::Status {
      if (step != 2) return absl::OkStatus();
      EK_RETURN_IF_ERROR(model.UseTrace("alone"));
      EK_ASSIGN_OR_RETURN(const LeafId block, model.FindLeaf("layers.1.moe"));
      for (int turn = 0; turn < 4; ++turn) {
        const ModelCounts before = model.counts();
        EK_RETURN_IF_ERROR(model.Fetch(block).status());
        EK_RETURN_IF_ERROR(model.Release(block));
        EK_RETURN_IF_ERROR(model.UseTrace("alone"));  // memory that the policy brought goes back
        const ModelCounts after = model.counts();
        if (after.gathers - before.gathers != 2) return absl::InternalError("not one gather per family");
        const int64_t operations = after.fetch_host_operations - before.fetch_host_operations;
        // The first turn records, the second binds the views of the plan's places.
        if (turn > 1 && operations != model.PredictedHostOperations(block)) {
          return absl::InternalError(absl::StrCat("turn ", turn, ": ", operations, " host operations, not ",
                                                  model.PredictedHostOperations(block)));
        }
      }
      return model.UseTrace("step");
    };
    EXPECT_OK(RunToy(config).status()) << policy;
  }
}

// What one rank owns of a parameter.
struct Owned {
  int64_t begin = 0;
  int64_t end = 0;
};

// A dense parameter is cut over all data-parallel ranks, an expert over the ranks of its own EDP group only, by the
// rank inside that group; together they are every element once. Nobody holds more than a group's share.
TEST(ExpertShardsTest, Trail46_EveryFamilyIsPartitionedOverItsOwnGroup) {
  for (int ep : {1, 2, 4}) {
    ToyConfig config;
    config.mesh = {.tp = 1, .ep = ep, .dp = 8, .etp = 1};
    config.options.policy = "per_parameter";  // shards of one parameter ascend with the rank, ceil(n / group) each
    config.options.optimizer.momentum = 0.5;
    config.steps = 1;
    absl::Mutex mutex;
    std::map<std::pair<std::string, std::string>, std::map<int, Owned>> owned;  // [parameter, state][rank]
    config.before_step = [&](int, int rank, PartitionedModel& model) -> absl::Status {
      absl::MutexLock lock(&mutex);
      for (const StateTensor& tensor : model.StateTensors()) {
        const ParameterSpec& spec = model.parameters()[static_cast<size_t>(tensor.parameter)];
        if (tensor.fragments.size() > 1) return absl::InternalError("one run per parameter");
        Owned& mine = owned[{spec.name, tensor.state}][rank];
        if (tensor.fragments.empty()) continue;
        mine.begin = tensor.fragments[0].begin;
        mine.end = mine.begin + tensor.fragments[0].data.num_elements();
      }
      return absl::OkStatus();
    };
    ASSERT_OK_AND_ASSIGN(const ToyRun run, RunToy(config));
    ASSERT_OK_AND_ASSIGN(const comm::Mesh mesh, comm::Mesh::Create(config.mesh));
    for (int rank = 0; rank < 8; ++rank) {
      for (const ParameterSpec& spec : run.ranks[static_cast<size_t>(rank)].specs) {
        const auto axis = spec.family == Family::kExpert ? comm::Axis::kEdp : comm::Axis::kDp;
        const std::vector<int> group = mesh.GroupOf(axis, rank).ranks;
        ASSERT_EQ(group.size(), spec.family == Family::kExpert ? 8u / static_cast<size_t>(ep) : 8u);
        const int64_t share =
            (spec.num_elements() + static_cast<int64_t>(group.size()) - 1) / static_cast<int64_t>(group.size());
        int64_t at = 0;
        for (int member : group) {
          for (const std::string state : {"", "momentum"}) {
            if (!spec.trainable && state != "") continue;
            const Owned& part = owned[{spec.name, state}][member];
            const int64_t begin = std::min(at, spec.num_elements());
            const int64_t end = std::min(begin + share, spec.num_elements());
            ASSERT_EQ(part.end - part.begin, end - begin) << spec.name << " ep " << ep << " rank " << member;
            if (end > begin) {
              ASSERT_EQ(part.begin, begin) << spec.name << " ep " << ep << " rank " << member;
            }
          }
          at += share;
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::zero3
