// A leaf whose modules run in threads of their own: one gather, one release, gradients from everybody.
#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

constexpr int kOutputs = 6;
constexpr int64_t kElements = 33;

// One leaf of kOutputs modules with a parameter each.
ModelDescription ManyOutputs() {
  ModelDescription model;
  model.root.type = "Model";
  ModuleNode block{"block", "Block", {}, {}, false};
  for (int i = 0; i < kOutputs; ++i) {
    model.parameters.push_back(PlainParameter(absl::StrCat("head", i), kElements));
    block.children.push_back({absl::StrCat(i), "Head", {i}, {}, false});
  }
  model.root.children.push_back(std::move(block));
  return model;
}

// What one module's thread does, forward or backward: fetch, use, add gradients where asked, release. All hold the leaf
// at the same time before the first lets go.
absl::Status RunModule(RankContext& rank, int i, bool backward, absl::Barrier* fetched) {
  const absl::StatusOr<LeafWeights> weights = rank.model->Fetch({0});
  const absl::StatusOr<absl::Span<const TensorView>> gradients =
      backward ? rank.model->Gradients({0}) : absl::Span<const TensorView>();
  if (fetched->Block()) delete fetched;
  EK_RETURN_IF_ERROR(weights.status());
  EK_RETURN_IF_ERROR(gradients.status());
  EK_ASSIGN_OR_RETURN(const ConstTensorView own, weights->Get(i));
  std::atomic<bool> right{true};
  EK_RETURN_IF_ERROR(rank.compute->Launch([&right, own, i, model = rank.model.get()] {
    const float expected = static_cast<float>(InitialValue(model->parameters()[static_cast<size_t>(i)], 1, 7));
    right = own.data<float>()[7] == expected;
    return absl::OkStatus();
  }));
  if (backward) {
    const TensorView gradient = (*gradients)[static_cast<size_t>(i)];
    EK_RETURN_IF_ERROR(rank.compute->Launch([gradient, i] {
      for (int64_t e = 0; e < kElements; ++e) gradient.data<float>()[e] += static_cast<float>(i + 1);
      return absl::OkStatus();
    }));
  }
  EK_RETURN_IF_ERROR(rank.compute->Synchronize());
  EK_RETURN_IF_ERROR(Check(right, absl::StrCat("module ", i, " saw its weights")));
  return rank.model->Release({0});
}

absl::Status RunAllModules(RankContext& rank, bool backward) {
  std::vector<absl::Status> statuses(kOutputs);
  std::vector<std::thread> threads;
  auto* fetched = new absl::Barrier(kOutputs);
  for (int i = 0; i < kOutputs; ++i) {
    threads.emplace_back([&, i] { statuses[static_cast<size_t>(i)] = RunModule(rank, i, backward, fetched); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EK_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

TEST(ThreadsTest, LeafOfSeveralOutputsIsGatheredExactlyOnce) {
  for (const char* policy : {"flat", "coalesced", "per_parameter"}) {
    for (const auto mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
      OnRanksConfig config;
      config.world_size = 3;
      config.description = ManyOutputs();
      config.leaves.rules = {LeafRule::Type("Block")};
      config.options.policy = policy;
      config.options.optimizer.learning_rate = 0;  // every pass sees the initial weights
      config.device.stream_mode = mode;
      EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
        for (int step = 0; step < 3; ++step) {
          EK_RETURN_IF_ERROR(RunAllModules(rank, false));
          EK_RETURN_IF_ERROR(Check(rank.model->counts().gathers == 2 * step + 1, "one gather in the forward pass"));
          EK_RETURN_IF_ERROR(RunAllModules(rank, true));
          EK_RETURN_IF_ERROR(Check(rank.model->counts().gathers == 2 * step + 2, "one gather in the backward pass"));
          EK_RETURN_IF_ERROR(rank.model->FlushGradients({0}));
          std::vector<float> gradient(kElements);
          for (int i = 0; i < kOutputs; ++i) {
            EK_RETURN_IF_ERROR(rank.model->ReadTensor(i, TensorKind::kGradient, "",
                                                      TensorView(gradient.data(), DType::kF32, Shape({kElements}))));
            for (float g : gradient) EK_RETURN_IF_ERROR(Check(g == static_cast<float>(i + 1), "gradients arrived"));
          }
          EK_RETURN_IF_ERROR(rank.model->Step().status());
          EK_RETURN_IF_ERROR(Check(rank.model->counts().fetches == 2 * (step + 1), "the threads shared a fetch"));
          EK_RETURN_IF_ERROR(Check(rank.model->counts().flushes == step + 1, "one reduction"));
        }
        return absl::OkStatus();
      })) << policy;
    }
  }
}

// While one thread holds the leaf, others come and go as they like.
TEST(ThreadsTest, OthersComeAndGoWhileOneHoldsTheLeaf) {
  OnRanksConfig config;
  config.description = ManyOutputs();
  config.leaves.rules = {LeafRule::Type("Block")};
  EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const LeafWeights first, rank.model->Fetch({0}));
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&rank, &wrong] {
        for (int turn = 0; turn < 20; ++turn) {
          const absl::StatusOr<LeafWeights> weights = rank.model->Fetch({0});
          if (!weights.ok() || !weights->Get(0).ok()) ++wrong;
          if (!rank.model->Gradients({0}).ok() || !rank.model->Release({0}).ok()) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EK_RETURN_IF_ERROR(Check(wrong == 0, "every thread saw the leaf"));
    EK_RETURN_IF_ERROR(Check(rank.model->counts().gathers == 1, "it was gathered once"));
    EK_RETURN_IF_ERROR(Check(first.Get(0).ok(), "the first user still holds the leaf"));
    return rank.model->Release({0});
  }));
}

}  // namespace
}  // namespace evenkeel::zero3
