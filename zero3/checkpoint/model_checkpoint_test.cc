// A model's state through a checkpoint and back: f16 with its loss scale, at other world sizes.
#include "evenkeel/zero3/checkpoint/model_checkpoint.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/testing/on_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kElements = 21;

OnRanksConfig HalfModel(int world_size) {
  OnRanksConfig config;
  config.world_size = world_size;
  config.description = ChainModel(2, kElements, DType::kF16);
  config.options.optimizer.kind = OptimizerOptions::Kind::kAdamW;
  config.options.loss_scale.initial = 4096;
  config.options.loss_scale.growth_interval = 2;
  return config;
}

// The gradient of an f16 backward pass: beyond f16 in steps 1 and 4, as long as the scale is above 512.
absl::Status TrainStep(RankContext& rank, int step) {
  const double gradient = step == 1 || step == 4 ? 100 : 1 + 0.25 * step;
  for (int leaf : {0, 1}) {
    EK_ASSIGN_OR_RETURN(const auto gradients, rank.model->Gradients({leaf}));
    const float value = static_cast<float>(F16(static_cast<float>(gradient * rank.model->loss_scale())));
    for (int64_t i = 0; i < kElements; ++i) gradients[0].data<float>()[i] += value * static_cast<float>(leaf + 1);
    EK_RETURN_IF_ERROR(rank.model->FlushGradients({leaf}));
  }
  return rank.model->Step().status();
}

absl::Status Save(RankContext& rank, DiskModel& disk, const std::map<std::string, std::string>& metadata) {
  EK_ASSIGN_OR_RETURN(const auto writer,
                      CheckpointWriter::Create(&disk, rank.dp.get(), rank.comm.get(), {.root = "ckpt"}));
  EK_RETURN_IF_ERROR(writer->Start(rank.model->step(), metadata, ModelPieces(*rank.model, 0)));
  return writer->Finish();
}

absl::Status Load(RankContext& rank, DiskModel& disk, const LoadOptions& options = {}) {
  EK_ASSIGN_OR_RETURN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  return LoadModel(*found.reader, options, rank.dp.get(), *rank.comm, rank.model.get());
}

// Every number that a continued run goes on from.
struct Seen {
  std::vector<float> values;
  StepProgress progress;
};

absl::StatusOr<Seen> Look(RankContext& rank) {
  Seen seen;
  seen.progress = rank.model->progress();
  for (int p : {0, 1}) {
    for (const char* state : {"", "first_moment", "second_moment"}) {
      std::vector<float> values(kElements);
      const TensorKind kind = *state == '\0' ? TensorKind::kMaster : TensorKind::kState;
      EK_RETURN_IF_ERROR(
          rank.model->ReadTensor(p, kind, state, TensorView(values.data(), DType::kF32, Shape({kElements}))));
      seen.values.insert(seen.values.end(), values.begin(), values.end());
    }
  }
  return seen;
}

// Stopped after every number of steps, in the middle of falling and growing, resumed by other numbers of ranks.
TEST(ModelCheckpointTest, ResumedF16RunHasTheScaleAndTheBitsOfAnUninterruptedOne) {
  constexpr int kSteps = 9;
  for (int stop = 1; stop < kSteps; ++stop) {
    DiskModel disk;
    absl::Mutex mutex;
    Seen whole;
    EXPECT_OK(OnRanks(HalfModel(2), [&](RankContext& rank) -> absl::Status {
      for (int step = 0; step < kSteps; ++step) {
        if (step == stop) EK_RETURN_IF_ERROR(Save(rank, disk, ModelMetadata(*rank.model)));
        EK_RETURN_IF_ERROR(TrainStep(rank, step));
      }
      EK_ASSIGN_OR_RETURN(const Seen seen, Look(rank));
      absl::MutexLock lock(&mutex);
      whole = seen;
      return absl::OkStatus();
    }));
    ASSERT_GT(whole.progress.skipped_total, 0);
    for (int world : {1, 2, 3}) {
      EXPECT_OK(OnRanks(
          HalfModel(world),
          [&](RankContext& rank) -> absl::Status {
            EK_RETURN_IF_ERROR(Load(rank, disk));
            for (int step = stop; step < kSteps; ++step) EK_RETURN_IF_ERROR(TrainStep(rank, step));
            EK_ASSIGN_OR_RETURN(const Seen seen, Look(rank));
            EK_RETURN_IF_ERROR(Check(seen.values == whole.values, "masters and moments"));
            EK_RETURN_IF_ERROR(Check(seen.progress.step == whole.progress.step, "steps"));
            EK_RETURN_IF_ERROR(Check(seen.progress.loss_scale == whole.progress.loss_scale, "scale"));
            EK_RETURN_IF_ERROR(Check(seen.progress.good_steps == whole.progress.good_steps, "good steps"));
            EK_RETURN_IF_ERROR(Check(seen.progress.skipped_in_a_row == whole.progress.skipped_in_a_row, "in a row"));
            return Check(seen.progress.skipped_total == whole.progress.skipped_total, "skipped");
          }))
          << "stopped after " << stop << ", resumed by " << world;
    }
  }
}

TEST(ModelCheckpointTest, LossScaleThatIsMissingOrBadIsRefused) {
  for (const std::string scale : {"none", "1000", "-4", "inf", "x"}) {
    DiskModel disk;
    EXPECT_OK(OnRanks(HalfModel(2), [&](RankContext& rank) -> absl::Status {
      std::map<std::string, std::string> metadata = ModelMetadata(*rank.model);
      metadata["zero3.loss_scale"] = scale;
      if (scale == "none") metadata.erase("zero3.loss_scale");
      return Save(rank, disk, metadata);
    }));
    const auto code = scale == "none" ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInvalidArgument;
    for (const absl::Status& status :
         OnRanksStatuses(HalfModel(2), [&](RankContext& rank) { return Load(rank, disk); })) {
      EXPECT_THAT(status, StatusIs(code, HasSubstr("loss_scale"))) << scale;
    }
    if (scale != "none") continue;
    EXPECT_OK(OnRanks(HalfModel(2), [&](RankContext& rank) -> absl::Status {
      EK_RETURN_IF_ERROR(Load(rank, disk, {.may_be_missing = {"loss_scale"}}));
      return Check(rank.model->loss_scale() == 4096, "the scale of the options");
    }));
  }
}

}  // namespace
}  // namespace evenkeel::zero3
