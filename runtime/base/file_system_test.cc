#include "evenkeel/runtime/base/file_system.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/base/testing/disk_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::DiskModel;
using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

// The real disk and the model keep the same contract.
struct Place {
  FileSystem* fs;
  std::string root;
};

class FileSystemTest : public ::testing::TestWithParam<bool> {
 protected:
  Place MakePlace(const std::string& name) {
    if (GetParam()) return {&disk_, ""};
    const std::string root = std::string(std::getenv("TEST_TMPDIR")) + "/" + name;
    EXPECT_OK(FileSystem::Real()->MakeDirectory(root));
    return {FileSystem::Real(), root};
  }
  DiskModel disk_;
};

INSTANTIATE_TEST_SUITE_P(RealAndModel, FileSystemTest, ::testing::Bool());

absl::Status WriteWhole(FileSystem& fs, const std::string& path, const std::string& bytes) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, fs.Create(path));
  EK_RETURN_IF_ERROR(file->Append(bytes));
  EK_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

TEST_P(FileSystemTest, WritesReadsRenamesAndRemoves) {
  const Place at = MakePlace("basic");
  ASSERT_OK(at.fs->MakeDirectory(at.root + "/a"));
  ASSERT_OK(WriteWhole(*at.fs, at.root + "/a/x", "hello"));
  ASSERT_OK_AND_ASSIGN(const std::string middle, at.fs->Read(at.root + "/a/x", 1, 3));
  EXPECT_EQ(middle, "ell");
  EXPECT_OK(at.fs->SyncDirectory(at.root + "/a"));
  EXPECT_THAT(at.fs->Create(at.root + "/a/x").status(), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("/a/x")));
  EXPECT_THAT(at.fs->MakeDirectory(at.root + "/a"), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("/a")));
  EXPECT_THAT(at.fs->Read(at.root + "/a/x", 2, 9), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("5 bytes")));
  EXPECT_THAT(at.fs->FileSize(at.root + "/a/y"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/a/y")));
  EXPECT_THAT(at.fs->FileSize(at.root + "/a"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("regular")));
  EXPECT_THAT(ReadFile(*at.fs, at.root + "/a/x", 4), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("limit")));
  ASSERT_OK(WriteWhole(*at.fs, at.root + "/a/taken", ""));
  EXPECT_THAT(at.fs->Rename(at.root + "/a/x", at.root + "/a/taken"),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("taken")));
  EXPECT_OK(at.fs->Rename(at.root + "/a/x", at.root + "/a/z"));
  ASSERT_OK_AND_ASSIGN(const std::vector<DirectoryEntry> entries, at.fs->List(at.root + "/a"));
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[1].name, "z");
  EXPECT_TRUE(entries[1].is_regular_file);
  EXPECT_THAT(at.fs->RemoveDirectory(at.root + "/a"), StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("/a")));
  EXPECT_OK(RemoveTree(*at.fs, at.root + "/a"));
  EXPECT_OK(RemoveTree(*at.fs, at.root + "/a"));
}

TEST_P(FileSystemTest, LockIsExclusiveUntilItsHolderGoes) {
  const Place at = MakePlace("lock");
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<FileLock> lock, at.fs->Lock(at.root + "/lock"));
  EXPECT_THAT(at.fs->Lock(at.root + "/lock"), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("lock")));
  lock.reset();
  EXPECT_OK(at.fs->Lock(at.root + "/lock"));
}

TEST(RealFileSystemTest, RefusesLinksAndPipes) {
  const std::string root = std::string(std::getenv("TEST_TMPDIR")) + "/links";
  ASSERT_OK(FileSystem::Real()->MakeDirectory(root));
  ASSERT_OK(WriteWhole(*FileSystem::Real(), root + "/secret", "s"));
  ASSERT_EQ(symlink((root + "/secret").c_str(), (root + "/link").c_str()), 0);
  ASSERT_EQ(mkfifo((root + "/pipe").c_str(), 0600), 0);
  for (const char* name : {"/link", "/pipe"}) {
    EXPECT_THAT(FileSystem::Real()->Read(root + name, 0, 1),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)));
  }
  EXPECT_OK(RemoveTree(*FileSystem::Real(), root));
}

// Two appends and the name of the file are volatile: a crash may keep any of the eight combinations, and no other.
TEST(DiskModelTest, CrashKeepsAnySubsetOfWhatWasNotSynced) {
  std::set<std::string> seen;
  for (int bits = 0; bits < 8; ++bits) {
    DiskModel disk;
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<WritableFile> file, disk.Create("f"));
    ASSERT_OK(file->Append("AA"));
    ASSERT_OK(file->Append("BB"));
    EXPECT_EQ(disk.volatile_items(), 3);
    int asked = 0;
    disk.Crash([&](int) { return bits >> asked++ & 1; });
    EXPECT_THAT(file->Append("x"), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("crash")));
    const auto content = ReadFile(disk, "f", 100);
    seen.insert(content.ok() ? *content : "absent");
  }
  EXPECT_THAT(seen, UnorderedElementsAre("absent", "", "AA", std::string("\0\0BB", 4), "AABB"));
}

TEST(DiskModelTest, SyncedFileInASyncedFolderSurvives) {
  DiskModel disk;
  ASSERT_OK(WriteWhole(disk, "f", "data"));
  ASSERT_OK(disk.SyncDirectory(""));
  ASSERT_OK(disk.Rename("f", "g"));
  disk.Crash([](int) { return 0; });
  EXPECT_OK(disk.FileSize("f"));
  ASSERT_OK(disk.Rename("f", "g"));
  disk.Crash([](int) { return 1; });
  EXPECT_OK(disk.FileSize("g"));
  EXPECT_FALSE(disk.FileSize("f").ok());
}

TEST(DiskModelTest, FailsTheChosenOperationOnly) {
  DiskModel disk;
  disk.FailAt(1, absl::ResourceExhaustedError("full"));
  EXPECT_THAT(WriteWhole(disk, "f", "data"), StatusIs(absl::StatusCode::kResourceExhausted, "full"));
  EXPECT_OK(WriteWhole(disk, "g", "data"));
  disk.LimitBytes(6);
  EXPECT_THAT(WriteWhole(disk, "h", "data"), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("space")));
}

}  // namespace
}  // namespace evenkeel
