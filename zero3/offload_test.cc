// A model whose states do not fit: they live in a file, with the same bits.
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/device/mapped_file_device.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int kLeaves = 8;
constexpr int64_t kElements = 4096;

ModelDescription Chain() {
  ModelDescription model;
  model.root.type = "Model";
  for (int l = 0; l < kLeaves; ++l) {
    ParameterSpec spec;
    spec.name = "w" + std::to_string(l);
    spec.shape = Shape({kElements});
    spec.dtype = DType::kBF16;
    spec.initializer = Initializer::Normal(1.0);
    model.root.children.push_back({"leaf" + std::to_string(l), "Block", {l}, {}, false});
    model.parameters.push_back(spec);
  }
  return model;
}

struct Result {
  uint64_t digest = 0;
  int64_t peak_bytes = 0;
  int64_t file_bytes = 0;
};

enum class Offload { kNothing, kStates, kStatesAndWeights };

absl::Status Train(comm::Backend& backend, Offload offload, int64_t budget, Result* result) {
  EK_ASSIGN_OR_RETURN(auto dp, backend.CreateGroup(comm::WorldGroup(backend.size())));
  auto device = HostDevice::Create({.max_live_bytes = budget});
  EK_ASSIGN_OR_RETURN(auto file, MappedFileDevice::Create(device.get(), {.folder = ::testing::TempDir()}));
  EK_ASSIGN_OR_RETURN(auto compute, device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(auto comm, device->CreateStream("comm"));
  const ModelDescription description = Chain();
  EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(description, {}));
  PartitionedModelOptions options;
  options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  options.verify_shards = true;
  if (offload != Offload::kNothing) options.offload_device = file.get();
  options.offload_weights = offload == Offload::kStatesAndWeights;
  EK_ASSIGN_OR_RETURN(auto model, PartitionedModel::Create(description.parameters, selection, options, {.dp = dp.get()},
                                                           device.get(), compute.get(), comm.get()));
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      for (int l = 0; l < kLeaves; ++l) {
        EK_ASSIGN_OR_RETURN(const LeafWeights weights, model->Fetch({l}));
        EK_ASSIGN_OR_RETURN(const auto gradients, model->Gradients({l}));
        for (int64_t i = 0; i < kElements; ++i) {
          gradients[0].data<float>()[i] +=
              static_cast<float>(weights.views()[0].data<BF16>()[i]) + 0.01f * (l + step + 3 * micro);
        }
        EK_RETURN_IF_ERROR(model->FlushGradients({l}));
        EK_RETURN_IF_ERROR(model->Release({l}));
      }
    }
    EK_ASSIGN_OR_RETURN(const StepResult stepped, model->Step());
    result->digest = CombineDigests(result->digest, Digest64(&stepped.gradient_norm, sizeof(stepped.gradient_norm)));
  }
  std::vector<float> whole(kElements);
  for (int l = 0; l < kLeaves; ++l) {
    EK_RETURN_IF_ERROR(
        model->ReadTensor(l, TensorKind::kMaster, "", TensorView(whole.data(), DType::kF32, Shape({kElements}))));
    result->digest = CombineDigests(result->digest, Digest64(whole.data(), whole.size() * sizeof(float)));
  }
  result->peak_bytes = device->counters().Snapshot().peak_live_bytes;
  result->file_bytes = file->counters().Snapshot().live_bytes;
  return absl::OkStatus();
}

absl::StatusOr<Result> TrainOnTwoRanks(Offload offload, int64_t budget) {
  EK_ASSIGN_OR_RETURN(auto world, comm::InProcessWorld::Create({.world_size = 2}));
  std::vector<Result> results(2);
  EK_RETURN_IF_ERROR(comm::FirstFailure(comm::RunRanks(*world, [&](comm::Backend& backend) {
    return Train(backend, offload, budget, &results[static_cast<size_t>(backend.rank())]);
  })));
  return results[0];
}

// Trail 88: every micro-batch counts, and the norm is that of the run without offload.
TEST(OffloadTest, Trail88_SameBitsInLessMemory) {
  ASSERT_OK_AND_ASSIGN(const Result plain, TrainOnTwoRanks(Offload::kNothing, int64_t{1} << 40));
  ASSERT_OK_AND_ASSIGN(const Result states, TrainOnTwoRanks(Offload::kStates, int64_t{1} << 40));
  ASSERT_OK_AND_ASSIGN(const Result all, TrainOnTwoRanks(Offload::kStatesAndWeights, int64_t{1} << 40));
  EXPECT_EQ(states.digest, plain.digest);
  EXPECT_EQ(all.digest, plain.digest);
  // Per rank: f32 master and two moments of half the elements; then bf16 weights.
  const int64_t shard = kLeaves * kElements / 2;
  EXPECT_EQ(states.file_bytes, shard * 12);
  EXPECT_EQ(plain.peak_bytes - states.peak_bytes, shard * 12);
  EXPECT_EQ(all.file_bytes, shard * 14);
  EXPECT_EQ(plain.peak_bytes - all.peak_bytes, shard * 14);

  // A budget that the plain model cannot meet.
  EXPECT_THAT(TrainOnTwoRanks(Offload::kNothing, all.peak_bytes),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("live of a limit of")));
  ASSERT_OK_AND_ASSIGN(const Result bounded, TrainOnTwoRanks(Offload::kStatesAndWeights, all.peak_bytes));
  EXPECT_EQ(bounded.digest, plain.digest);
}

}  // namespace
}  // namespace evenkeel::zero3
