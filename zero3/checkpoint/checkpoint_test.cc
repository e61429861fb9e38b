// Saves, crashes, damages and reloads small checkpoints on a disk that forgets what was not synced.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero3/checkpoint/manifest.h"
#include "evenkeel/zero3/checkpoint/reshard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::evenkeel::testutil::StatusIs;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// A model's state at one layout: a dense matrix cut over TP and sharded over DP, a replicated vector, experts cut over
// EP and sharded over EDP, each with one optimizer state. Values are unique by position, state and step.
struct Layout {
  int dp = 1, tp = 1, ep = 1;
  int world() const { return dp * tp; }
};

struct State {
  std::vector<CheckpointPiece> pieces;
  std::vector<std::unique_ptr<std::vector<float>>> memory;
};

constexpr int64_t kRows = 6, kColumns = 8, kExperts = 4, kWidth = 5;

float ValueAt(const std::string& name, const std::string& state, int64_t step, int64_t global_index) {
  return static_cast<float>(name.size() * 1000 + state.size() * 100 + step * 10000) +
         static_cast<float>(global_index) / 64;
}

// Elements [rank * n, (rank + 1) * n) of the box, n = ceil(elements / world): a ZeRO shard without its padding.
void AddShard(const std::string& name, std::vector<int64_t> global, Piece box, int shard, int shards, int64_t step,
              bool fill, State* state) {
  int64_t elements = 1;
  for (int64_t extent : box.shape) elements *= extent;
  const int64_t each = (elements + shards - 1) / shards;
  box.begin = std::min(elements, shard * each);
  box.end = std::min(elements, box.begin + each);
  for (const std::string optimizer_state : {"weight", "momentum"}) {
    CheckpointPiece piece;
    piece.parameter = {name, global, name == "experts" ? 0 : -1, name == "experts" ? 2 : name == "matrix" ? 1 : -1};
    piece.state = optimizer_state;
    piece.piece = box;
    state->memory.push_back(std::make_unique<std::vector<float>>(box.num_elements(), -1.0f));
    piece.data = state->memory.back()->data();
    if (fill) {
      std::vector<float>& values = *state->memory.back();
      ForEachCommonRun(box, WholePiece(global), [&](int64_t from, int64_t to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) values[from + i] = ValueAt(name, optimizer_state, step, to + i);
      });
    }
    state->pieces.push_back(std::move(piece));
  }
}

State MakeState(const Layout& layout, int rank, int64_t step, bool fill) {
  State state;
  const int lane = rank % layout.tp, replica = rank / layout.tp;
  const int64_t columns = kColumns / layout.tp, experts = kExperts / layout.ep;
  AddShard("matrix", {kRows, kColumns}, {{0, lane * columns}, {kRows, columns}, 0, 0}, replica, layout.dp, step, fill,
           &state);
  // Equal on all lanes: lane 0 saves it, every lane loads it.
  if (lane == 0 || !fill) AddShard("norm", {kWidth}, {{0}, {kWidth}, 0, 0}, replica, layout.dp, step, fill, &state);
  const int expert_rank = replica % layout.ep, expert_replica = replica / layout.ep;
  AddShard("experts", {kExperts, kWidth, kColumns},
           {{expert_rank * experts, 0, lane * columns}, {experts, kWidth, columns}, 0, 0}, expert_replica,
           layout.dp / layout.ep, step, fill, &state);
  return state;
}

absl::Status SaveOne(FileSystem& fs, int64_t step, const std::string& root = "ckpt") {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointWriter> writer,
                      CheckpointWriter::Create(&fs, nullptr, nullptr, {.root = root}));
  const State state = MakeState({}, 0, step, true);
  EK_RETURN_IF_ERROR(writer->Start(step, {{"data_position", absl::StrCat(step * 100)}}, state.pieces));
  return writer->Finish();
}

absl::Status CheckLoad(const CheckpointReader& reader, const Layout& layout, int rank) {
  const State state = MakeState(layout, rank, 0, false);
  for (const CheckpointPiece& piece : state.pieces) {
    EK_RETURN_IF_ERROR(reader.Read(piece));
    absl::Status compared;
    ForEachCommonRun(piece.piece, WholePiece(piece.parameter.global_shape),
                     [&](int64_t from, int64_t to, int64_t count) {
                       for (int64_t i = 0; i < count; ++i) {
                         const float expected = ValueAt(piece.parameter.name, piece.state, reader.step(), to + i);
                         const float found = static_cast<const float*>(piece.data)[from + i];
                         if (found != expected)
                           compared = absl::DataLossError(absl::StrCat(piece.parameter.name, " differs at ", to + i));
                       }
                     });
    EK_RETURN_IF_ERROR(compared);
  }
  return absl::OkStatus();
}

absl::Status SaveAtLayout(FileSystem& fs, const Layout& layout, int64_t step, const std::string& root) {
  EK_ASSIGN_OR_RETURN(const auto world, comm::InProcessWorld::Create({.world_size = layout.world()}));
  const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("checkpoint"));
    EK_ASSIGN_OR_RETURN(const auto communicator, backend.CreateGroup(comm::WorldGroup(backend.size())));
    EK_ASSIGN_OR_RETURN(const auto writer,
                        CheckpointWriter::Create(&fs, communicator.get(), stream.get(), {.root = root}));
    const State state = MakeState(layout, backend.rank(), step, true);
    EK_RETURN_IF_ERROR(writer->Start(step, {}, state.pieces));
    return writer->Finish();
  });
  return comm::FirstFailure(statuses);
}

TEST(CheckpointTest, SavesAndLoadsWithMetadata) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 7));
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  EXPECT_EQ(found.reader->step(), 7);
  EXPECT_EQ(found.reader->metadata().at("data_position"), "700");
  EXPECT_OK(CheckLoad(*found.reader, {}, 0));
  EXPECT_THAT(found.reader->Tensors(), SizeIs(6));
}

// Crashes the save of step `before` + 1 at every operation, with every choice of what survives (256 random ones where
// there are more), and loads. The third save also removes the first checkpoint. Returns the number of cases.
int64_t CrashEverywhere(int64_t before) {
  auto save_before = [before](DiskModel& disk) {
    for (int64_t step = 1; step <= before; ++step) ASSERT_OK(SaveOne(disk, step));
  };
  DiskModel probe;
  save_before(probe);
  const int64_t begin = probe.operations();
  EXPECT_OK(SaveOne(probe, before + 1));
  std::mt19937 random(11);
  int64_t cases = 0;
  for (int64_t at = begin; at <= probe.operations(); ++at) {
    DiskModel counted;
    save_before(counted);
    counted.CrashAt(at);
    SaveOne(counted, before + 1).IgnoreError();
    const int64_t items = counted.volatile_items();
    const int rounds = items <= 8 ? 1 << items : 256;
    for (int round = 0; round < rounds; ++round, ++cases) {
      DiskModel disk;
      save_before(disk);
      disk.CrashAt(at);
      const bool saved = SaveOne(disk, before + 1).ok();
      int asked = 0;
      disk.Crash([&](int) { return items <= 8 ? round >> asked++ & 1 : static_cast<int>(random() & 1); });
      const absl::StatusOr<FoundCheckpoint> found = FindLatestCheckpoint(&disk, "ckpt");
      EXPECT_OK(found.status()) << "crash at " << at << " choice " << round;
      if (!found.ok()) return cases;
      EXPECT_THAT(found->reader->step(), AnyOf(saved ? before + 1 : before, before + 1)) << "crash at " << at;
      EXPECT_OK(CheckLoad(*found->reader, {}, 0));
      EXPECT_OK(SaveOne(disk, before + 2)) << "crash at " << at << " choice " << round;
    }
  }
  return cases;
}

TEST(CheckpointTest, C44_CrashAtEveryOperationLeavesTheOldOrTheNewOneWhole) {
  EXPECT_GE(CrashEverywhere(1), 50);
  EXPECT_GE(CrashEverywhere(2), 50);
}

TEST(CheckpointTest, C45_EveryFailingCallIsReportedAndPublishesNothing) {
  DiskModel probe;
  ASSERT_OK(SaveOne(probe, 1));
  const int64_t begin = probe.operations();
  ASSERT_OK(SaveOne(probe, 2));
  for (int64_t at = begin; at < probe.operations(); ++at) {
    DiskModel disk;
    ASSERT_OK(SaveOne(disk, 1));
    disk.FailAt(at, absl::ResourceExhaustedError("no space left"));
    const absl::Status saved = SaveOne(disk, 2);
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
    ASSERT_OK(CheckLoad(*found.reader, {}, 0));
    if (!saved.ok()) {
      EXPECT_THAT(saved, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no space left"))) << at;
    } else {
      EXPECT_EQ(found.reader->step(), 2) << at;
    }
    ASSERT_OK(SaveOne(disk, 3)) << at;
  }
}

TEST(CheckpointTest, C46_KeepsTwoValidOnes) {
  DiskModel disk;
  for (int64_t step = 1; step <= 5; ++step) {
    ASSERT_OK(SaveOne(disk, step));
    int valid = 0;
    for (int64_t s = 1; s <= step; ++s) {
      valid += CheckpointReader::Open(&disk, "ckpt/" + CheckpointFolderName(s)).ok();
    }
    EXPECT_EQ(valid, std::min<int64_t>(step, 2));
  }
  // The newest is damaged: the one before it is found, and the next save does not count the damaged one.
  disk.Mutate("ckpt/" + CheckpointFolderName(5) + "/rank-00000-of-00001.safetensors",
              [](std::string& bytes) { bytes.back() ^= 1; });
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  EXPECT_EQ(found.reader->step(), 4);
  ASSERT_THAT(found.skipped, SizeIs(1));
  EXPECT_THAT(found.skipped[0], HasSubstr("step-000000000005: DATA_LOSS"));
  ASSERT_OK(SaveOne(disk, 6));
  EXPECT_OK(CheckpointReader::Open(&disk, "ckpt/" + CheckpointFolderName(4)).status());
}

TEST(CheckpointTest, C48_EveryFlippedBitIsFoundAndNamed) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 1));
  const std::string folder = "ckpt/" + CheckpointFolderName(1);
  for (const std::string file : {"/manifest.textproto", "/rank-00000-of-00001.safetensors"}) {
    ASSERT_OK_AND_ASSIGN(const int64_t size, disk.FileSize(folder + file));
    for (int64_t bit = 0; bit < size * 8; ++bit) {
      auto flip = [bit](std::string& bytes) { bytes[bit / 8] ^= static_cast<char>(1 << (bit % 8)); };
      disk.Mutate(folder + file, flip);
      const auto reader = CheckpointReader::Open(&disk, folder);
      const absl::Status status = reader.ok() ? (*reader)->Verify() : reader.status();
      ASSERT_FALSE(status.ok()) << file << " bit " << bit;
      ASSERT_THAT(std::string(status.message()), HasSubstr(folder)) << file << " bit " << bit;
      disk.Mutate(folder + file, flip);
    }
  }
  EXPECT_OK(FindLatestCheckpoint(&disk, "ckpt").status());
}

TEST(CheckpointTest, C47_EveryCutIsNamedWithBothLengths) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 1));
  const std::string path = "ckpt/" + CheckpointFolderName(1) + "/rank-00000-of-00001.safetensors";
  ASSERT_OK_AND_ASSIGN(const std::string whole, ReadFile(disk, path, 1 << 20));
  for (size_t length = 0; length <= whole.size() + 3; ++length) {
    if (length == whole.size()) continue;
    disk.Mutate(path, [&](std::string& bytes) {
      bytes = whole;
      bytes.resize(length, 'x');
    });
    ASSERT_THAT(CheckpointReader::Open(&disk, "ckpt/" + CheckpointFolderName(1)).status(),
                StatusIs(absl::StatusCode::kDataLoss,
                         HasSubstr(absl::StrCat("expected ", whole.size(), " bytes, found ", length))));
  }
}

TEST(CheckpointTest, C52_EveryLayoutLoadsIntoEveryOther) {
  std::vector<Layout> layouts;
  for (int dp = 1; dp <= 8; ++dp) {
    for (int ep : {1, 2, 4}) {
      if (dp % ep == 0) layouts.push_back({dp, 1, ep});
    }
  }
  layouts.push_back({4, 2, 4});
  layouts.push_back({2, 4, 1});
  uint64_t digest = 0;
  for (const Layout& saved : layouts) {
    DiskModel disk;
    ASSERT_OK(SaveAtLayout(disk, saved, 3, "ckpt"));
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
    ASSERT_OK_AND_ASSIGN(const uint64_t state, found.reader->StateDigest());
    if (digest == 0) digest = state;
    EXPECT_EQ(state, digest);
    for (const Layout& loaded : layouts) {
      for (int rank = 0; rank < loaded.world(); ++rank) ASSERT_OK(CheckLoad(*found.reader, loaded, rank));
    }
  }
}

TEST(CheckpointTest, ReshardingKeepsTheState) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 4));
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint source, FindLatestCheckpoint(&disk, "ckpt"));
  ASSERT_OK_AND_ASSIGN(const uint64_t digest, source.reader->StateDigest());
  for (const CheckpointLayout& layout :
       std::vector<CheckpointLayout>{{1, 1, 1}, {8, 4, 2}, {6, 1, 2}, {5, 1, 1}, {8, 2, 1}}) {
    const std::string root = absl::StrCat("out-", layout.world, "-", layout.ep, "-", layout.tp);
    ASSERT_OK(ReshardCheckpoint(*source.reader, &disk, root, layout));
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, root));
    EXPECT_EQ(found.reader->manifest().file_size(), layout.world);
    EXPECT_EQ(found.reader->metadata().at("data_position"), "400");
    ASSERT_OK_AND_ASSIGN(const uint64_t resharded, found.reader->StateDigest());
    EXPECT_EQ(resharded, digest);
    EXPECT_OK(CheckLoad(*found.reader, {4, 2, 2}, 3));
  }
  EXPECT_THAT(ReshardCheckpoint(*source.reader, &disk, "x", {6, 4, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world 6, tp 1, ep 4")));
  EXPECT_THAT(ReshardCheckpoint(*source.reader, &disk, "x", {3, 3, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 equal parts")));
}

TEST(CheckpointTest, C45_OneRanksFullDiskIsEverybodysError) {
  DiskModel disk;
  ASSERT_OK(SaveAtLayout(disk, {4, 1, 2}, 1, "ckpt"));
  disk.FailAt(disk.operations() + 6, absl::ResourceExhaustedError("no space left"));
  EXPECT_THAT(SaveAtLayout(disk, {4, 1, 2}, 2, "ckpt"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no space left")));
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  EXPECT_EQ(found.reader->step(), 1);
}

TEST(CheckpointTest, RefusesShardsThatDoNotCover) {
  DiskModel disk;
  ASSERT_OK_AND_ASSIGN(const auto writer, CheckpointWriter::Create(&disk, nullptr, nullptr, {.root = "ckpt"}));
  const State half = MakeState({2, 1, 1}, 0, 1, true);
  ASSERT_OK(writer->Start(1, {}, half.pieces));
  EXPECT_THAT(writer->Finish(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is in no shard")));
  EXPECT_FALSE(FindLatestCheckpoint(&disk, "ckpt").ok());
}

TEST(CheckpointTest, SecondWriterIsRefused) {
  DiskModel disk;
  ASSERT_OK_AND_ASSIGN(const auto writer, CheckpointWriter::Create(&disk, nullptr, nullptr, {.root = "ckpt"}));
  EXPECT_THAT(SaveOne(disk, 1), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("lock")));
}

TEST(CheckpointTest, C54_NewerFormatIsRefusedWithVersions) {
  CheckpointManifestProto empty;
  std::string text = RenderManifest(empty);
  EXPECT_OK(ParseManifest(text));
  text.replace(text.find("min_reader=1"), 12, "min_reader=9");
  EXPECT_THAT(ParseManifest(text), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("version 9")));
}

TEST(CheckpointTest, LoadSaysWhatIsMissingOrDiffers) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 1));
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  const State state = MakeState({}, 0, 0, false);
  CheckpointPiece wanted = state.pieces[0];
  wanted.state = "second_moment";
  EXPECT_THAT(found.reader->Read(wanted), StatusIs(absl::StatusCode::kNotFound, HasSubstr("second_moment of matrix")));
  wanted = state.pieces[0];
  wanted.parameter.global_shape = {kRows, kColumns + 1};
  EXPECT_THAT(found.reader->Read(wanted), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("[6, 8]")));
  wanted = state.pieces[0];
  wanted.dtype = DType::kI32;
  EXPECT_THAT(found.reader->Read(wanted), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("f32")));
}

// A disk whose writes wait until they are let go.
class StuckDisk final : public FileSystem {
 public:
  void LetGo() { go_.Notify(); }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, disk_.Create(path));
    return std::make_unique<File>(std::move(file), &go_);
  }
  absl::StatusOr<int64_t> FileSize(const std::string& path) override { return disk_.FileSize(path); }
  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset, int64_t length) override {
    return disk_.Read(path, offset, length);
  }
  absl::Status ReadInto(const std::string& path, int64_t offset, int64_t length, void* destination) override {
    return disk_.ReadInto(path, offset, length, destination);
  }
  absl::Status MakeDirectory(const std::string& path) override { return disk_.MakeDirectory(path); }
  absl::Status SyncDirectory(const std::string& path) override { return disk_.SyncDirectory(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override { return disk_.Rename(from, to); }
  absl::Status RemoveFile(const std::string& path) override { return disk_.RemoveFile(path); }
  absl::Status RemoveDirectory(const std::string& path) override { return disk_.RemoveDirectory(path); }
  absl::StatusOr<std::vector<DirectoryEntry>> List(const std::string& path) override { return disk_.List(path); }
  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override { return disk_.Lock(path); }

 private:
  class File final : public WritableFile {
   public:
    File(std::unique_ptr<WritableFile> file, absl::Notification* go) : file_(std::move(file)), go_(go) {}
    absl::Status Append(absl::string_view bytes) override {
      go_->WaitForNotification();
      return file_->Append(bytes);
    }
    absl::Status Sync() override { return file_->Sync(); }
    absl::Status Close() override { return file_->Close(); }

   private:
    const std::unique_ptr<WritableFile> file_;
    absl::Notification* const go_;
  };

  DiskModel disk_;
  absl::Notification go_;
};

// Training goes on while the disk is stuck, and changes its weights; the checkpoint has the values of its step.
TEST(CheckpointTest, StartStallsForTheCopyOnly) {
  StuckDisk disk;
  ASSERT_OK_AND_ASSIGN(const auto writer, CheckpointWriter::Create(&disk, nullptr, nullptr, {.root = "ckpt"}));
  const State state = MakeState({}, 0, 5, true);
  ASSERT_OK(writer->Start(5, {}, state.pieces));  // returns although nothing can be written
  for (const auto& values : state.memory) std::fill(values->begin(), values->end(), -7.0f);
  EXPECT_TRUE(writer->in_progress());
  EXPECT_THAT(writer->Start(6, {}, state.pieces),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("step 5 is not finished")));
  disk.LetGo();
  ASSERT_OK(writer->Finish());
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  EXPECT_EQ(found.reader->step(), 5);
  EXPECT_OK(CheckLoad(*found.reader, {}, 0));
}

// A process that saves for ever is killed at a random moment; whatever it leaves must load.
TEST(CheckpointTest, C44_RealKillsLeaveAWholeCheckpoint) {
  const char* wanted_rounds = std::getenv("EK_KILL_ROUNDS");
  const int rounds = wanted_rounds != nullptr ? std::atoi(wanted_rounds) : 15;
  const std::string root = absl::StrCat(std::getenv("TEST_TMPDIR"), "/kills");
  ASSERT_OK(SaveOne(*FileSystem::Real(), 1, root));
  std::mt19937 random(5);
  int64_t last = 1;
  for (int round = 0; round < rounds; ++round) {
    int saved[2];  // the child writes a byte behind each save
    ASSERT_EQ(pipe(saved), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int64_t step = last + 1;; ++step) {
        if (!SaveOne(*FileSystem::Real(), step, root).ok() || write(saved[1], "x", 1) != 1) _exit(3);
      }
    }
    close(saved[1]);  // so that the read ends when the child does
    char byte = 0;
    ASSERT_EQ(read(saved[0], &byte, 1), 1);
    usleep(random() % 20000);
    kill(child, SIGKILL);
    close(saved[0]);
    int wait_status = 0;
    ASSERT_EQ(waitpid(child, &wait_status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(wait_status)) << "the saving process ended by itself";
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(FileSystem::Real(), root));
    ASSERT_GT(found.reader->step(), last);
    last = found.reader->step();
    ASSERT_OK(CheckLoad(*found.reader, {}, 0));
  }
}

}  // namespace
}  // namespace evenkeel::zero3
