// Saves, crashes, damages and reloads small checkpoints on a disk that forgets what was not synced.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero3/checkpoint/manifest.h"
#include "evenkeel/zero3/checkpoint/reshard.h"
#include "evenkeel/zero3/testing/small_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(CheckpointTest, SavesAndLoadsWithMetadata) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 7));
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
  EXPECT_EQ(found.reader->step(), 7);
  EXPECT_EQ(found.reader->metadata().at("data_position"), "700");
  EXPECT_OK(CheckLoad(*found.reader, {}, 0));
  EXPECT_THAT(found.reader->Tensors(), SizeIs(6));
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

// Other people's folders between checkpoints stay, and keep no old one alive, wherever their names sort.
TEST(CheckpointTest, FoldersOfOthersAreLeftAlone) {
  DiskModel disk;
  ASSERT_OK(SaveOne(disk, 1));
  const std::vector<std::string> others = {"ckpt/a-notes", "ckpt/step-000000000002-copy", "ckpt/zz-notes"};
  for (const std::string& folder : others) ASSERT_OK(disk.MakeDirectory(folder));
  for (int64_t step = 2; step <= 4; ++step) ASSERT_OK(SaveOne(disk, step));
  ASSERT_OK_AND_ASSIGN(const std::vector<DirectoryEntry> entries, disk.List("ckpt"));
  std::vector<std::string> names;
  for (const DirectoryEntry& entry : entries) names.push_back("ckpt/" + entry.name);
  for (const std::string& folder : others) EXPECT_THAT(names, ::testing::Contains(folder));
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(CheckpointReader::Open(&disk, "ckpt/" + CheckpointFolderName(step)).ok(), step > 2) << step;
  }
}

TEST(CheckpointTest, FileNamesThatAreNotPlainAreRefused) {
  const auto check = [](const std::string& name) {
    CheckpointManifestProto manifest;
    manifest.add_file()->set_name(name);
    return ValidateManifest(manifest);
  };
  for (const char* plain : {"rank-00000-of-00001.safetensors", "a b", "~", "x"}) EXPECT_OK(check(plain)) << plain;
  for (const char* name : {"", ".", "..", ".hidden", "a/b", "/etc", "a\\b", "a\x1f", "a\n"}) {
    EXPECT_THAT(check(name), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is not plain"))) << name;
  }
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
  std::vector<SmallLayout> layouts;
  for (int dp = 1; dp <= 8; ++dp) {
    for (int ep : {1, 2, 4}) {
      if (dp % ep == 0) layouts.push_back({dp, 1, ep});
    }
  }
  layouts.push_back({4, 2, 4});
  layouts.push_back({2, 4, 1});
  uint64_t digest = 0;
  for (const SmallLayout& saved : layouts) {
    DiskModel disk;
    ASSERT_OK(SaveAtLayout(disk, saved, 3, "ckpt"));
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
    ASSERT_OK_AND_ASSIGN(const uint64_t state, found.reader->StateDigest());
    if (digest == 0) digest = state;
    EXPECT_EQ(state, digest);
    for (const SmallLayout& loaded : layouts) {
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
  const SmallState half = MakeSmallState({2, 1, 1}, 0, 1, true);
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
  const SmallState state = MakeSmallState({}, 0, 0, false);
  CheckpointPiece wanted = state.pieces[0];
  wanted.state = "second_moment";
  EXPECT_THAT(found.reader->Read(wanted), StatusIs(absl::StatusCode::kNotFound, HasSubstr("second_moment of matrix")));
  wanted = state.pieces[0];
  wanted.parameter.global_shape = {6, 9};
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
  const SmallState state = MakeSmallState({}, 0, 5, true);
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
