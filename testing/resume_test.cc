// A run that was stopped and resumed from its checkpoint has the bits of one that was not, and its state survives every
// change of layout.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/testing/corpus.h"
#include "evenkeel/testing/training_config.h"
#include "evenkeel/testing/training_run.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero3/checkpoint/model_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;
using Kind = zero3::OptimizerOptions::Kind;

struct Job {
  comm::MeshShape mesh = {.tp = 2, .ep = 2, .dp = 4, .etp = 2};
  std::string order = "fused";
  std::string policy = "flat";
  Kind optimizer = Kind::kAdamW;
  DType dtype = DType::kF32;
  std::string load_from = {};  // root of a checkpoint, or empty: from the start
  int64_t end = 0;             // runs steps [loaded step, end)
  std::string save_to = {};
};

const Corpus& Text() {
  static const Corpus* corpus = new Corpus(*Corpus::Read(kDefaultCorpus));
  return *corpus;
}

absl::StatusOr<TrainingConfig> ConfigOf(const Job& job) {
  TrainingConfig config;
  config.model.sequence = 8;
  config.model.hidden = 16;
  config.model.ffn = 24;
  config.model.experts = 4;
  config.model.layers = 1;
  config.model.dtype = job.dtype;
  EK_ASSIGN_OR_RETURN(config.order, moe::FindOrder(job.order));
  config.mesh = MeshForOrder(job.mesh, config.order);
  config.zero3.policy = job.policy;
  config.zero3.optimizer.kind = job.optimizer;
  config.zero3.optimizer.momentum = 0.9;
  config.zero3.optimizer.learning_rate = 0.01;
  return config;
}

absl::Status RunRank(const Job& job, FileSystem& fs, comm::Backend& backend) {
  EK_ASSIGN_OR_RETURN(const TrainingConfig config, ConfigOf(job));
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("checkpoint"));
  EK_ASSIGN_OR_RETURN(const auto world, backend.CreateGroup(comm::WorldGroup(backend.size())));
  EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(config, &Text(), &backend));
  zero3::PartitionedModel& model = run->mutable_parameters();
  if (!job.load_from.empty()) {
    EK_ASSIGN_OR_RETURN(const zero3::FoundCheckpoint found, zero3::FindLatestCheckpoint(&fs, job.load_from));
    EK_RETURN_IF_ERROR(zero3::LoadModel(*found.reader, {}, world.get(), *stream, &model));
  }
  while (model.step() < job.end) EK_RETURN_IF_ERROR(run->Step(model.step(), nullptr).status());
  EK_ASSIGN_OR_RETURN(const auto writer,
                      zero3::CheckpointWriter::Create(&fs, world.get(), stream.get(), {.root = job.save_to}));
  std::map<std::string, std::string> metadata = zero3::ModelMetadata(model);
  metadata["data_position"] = absl::StrCat(model.step());
  EK_RETURN_IF_ERROR(writer->Start(model.step(), metadata, zero3::ModelPieces(model, run->lane())));
  return writer->Finish();
}

// Runs the job and returns the digest of the whole state that it saved.
absl::StatusOr<uint64_t> RunJob(const Job& job, FileSystem& fs) {
  EK_ASSIGN_OR_RETURN(const auto world, comm::InProcessWorld::Create({.world_size = job.mesh.tp * job.mesh.dp}));
  EK_RETURN_IF_ERROR(
      comm::FirstFailure(comm::RunRanks(*world, [&](comm::Backend& backend) { return RunRank(job, fs, backend); })));
  EK_ASSIGN_OR_RETURN(const zero3::FoundCheckpoint found, zero3::FindLatestCheckpoint(&fs, job.save_to));
  return found.reader->StateDigest();
}

TEST(ResumeTest, C56_ResumedRunHasTheBitsOfAnUninterruptedOne) {
  for (const auto& [optimizer, dtype] : std::vector<std::pair<Kind, DType>>{{Kind::kAdamW, DType::kF32},
                                                                            {Kind::kSgd, DType::kF32},
                                                                            {Kind::kAdamW, DType::kBF16},
                                                                            {Kind::kAdamW, DType::kF16}}) {
    DiskModel disk;
    ASSERT_OK_AND_ASSIGN(const uint64_t whole,
                         RunJob({.optimizer = optimizer, .dtype = dtype, .end = 5, .save_to = "whole"}, disk));
    ASSERT_OK(RunJob({.optimizer = optimizer, .dtype = dtype, .end = 2, .save_to = "half"}, disk).status());
    for (const std::string policy : {"flat", "per_parameter", "replicated"}) {
      ASSERT_OK_AND_ASSIGN(const uint64_t resumed, RunJob({.policy = policy,
                                                           .optimizer = optimizer,
                                                           .dtype = dtype,
                                                           .load_from = "half",
                                                           .end = 5,
                                                           .save_to = "resumed_" + policy},
                                                          disk));
      EXPECT_EQ(resumed, whole) << policy;
    }
  }
}

// Trail 47: every lane's slices are saved. 49, 50: experts' weights and moments move together. 107: states are a list.
class LayoutTest : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Optimizers, LayoutTest, ::testing::Values(Kind::kAdamW, Kind::kSgd));

TEST_P(LayoutTest, C52_Trail47_49_50_107_StateSurvivesEveryChangeOfLayout) {
  DiskModel disk;
  ASSERT_OK_AND_ASSIGN(const uint64_t saved, RunJob({.optimizer = GetParam(), .end = 2, .save_to = "saved"}, disk));
  for (const Job& job : std::vector<Job>{{.mesh = {.tp = 1, .ep = 1, .dp = 1, .etp = 1}},
                                         {.mesh = {.tp = 1, .ep = 4, .dp = 4, .etp = 1}, .policy = "coalesced"},
                                         {.mesh = {.tp = 4, .ep = 1, .dp = 2, .etp = 4}},
                                         {.mesh = {.tp = 2, .ep = 4, .dp = 2, .etp = 1}, .order = "unsharded"},
                                         {.mesh = {.tp = 1, .ep = 1, .dp = 3, .etp = 1}, .policy = "per_parameter"}}) {
    Job load = job;
    load.optimizer = GetParam();
    load.load_from = "saved";
    load.end = 2;  // no step: saved again as it was loaded
    load.save_to = absl::StrCat("layout_", job.mesh.tp, job.mesh.ep, job.mesh.dp);
    ASSERT_OK_AND_ASSIGN(const uint64_t loaded, RunJob(load, disk));
    EXPECT_EQ(loaded, saved) << load.save_to;
  }
}

TEST(ResumeTest, UnknownAndMissingStatesAreNamedOnAllRanks) {
  DiskModel disk;
  ASSERT_OK(RunJob({.end = 1, .save_to = "adam"}, disk).status());
  const absl::Status status =
      RunJob({.optimizer = Kind::kSgd, .load_from = "adam", .end = 1, .save_to = "sgd"}, disk).status();
  EXPECT_THAT(status, testutil::StatusIs(absl::StatusCode::kNotFound, HasSubstr("momentum")));
}

}  // namespace
}  // namespace evenkeel::testutil
