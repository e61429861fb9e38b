// C54: a checkpoint of every format version that was ever written is in testdata, and loads with every bit. A new
// version adds a folder (write_golden.cc) and never touches the old ones.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/manifest.h"
#include "evenkeel/zero3/testing/small_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A copy: test data is reached through links, which checkpoints do not follow.
std::string Root(int version) {
  const std::string name = absl::StrCat("v", version);
  const std::string copy = absl::StrCat(::testing::TempDir(), "/", name);
  std::filesystem::copy(absl::StrCat("zero3/checkpoint/testdata/", name), copy,
                        std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  return copy;
}

// Of the whole state: the same for every version, as the files hold the same state.
constexpr uint64_t kStateDigest = 5453026982379305179u;

TEST(GoldenTest, C54_EveryVersionLoadsBitExactly) {
  for (int version = 1; version <= kCheckpointVersion; ++version) {
    FileSystem* fs = FileSystem::Real();
    ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(fs, Root(version)));
    EXPECT_THAT(found.skipped, IsEmpty());
    ASSERT_OK_AND_ASSIGN(const std::string manifest,
                         ReadFile(*fs, found.reader->folder() + "/" + kManifestName, 1 << 20));
    EXPECT_THAT(manifest, HasSubstr(absl::StrCat("evenkeel-checkpoint version=", version, " ")));
    EXPECT_EQ(found.reader->step(), 42);
    EXPECT_EQ(found.reader->metadata().at("data_position"), "4200");
    EXPECT_THAT(found.reader->Tensors(), SizeIs(6));
    for (const SmallLayout& layout : std::vector<SmallLayout>{{}, {2, 2, 2}, {4, 1, 4}, {3, 1, 1}}) {
      for (int rank = 0; rank < layout.world(); ++rank) EXPECT_OK(CheckLoad(*found.reader, layout, rank)) << version;
    }
    ASSERT_OK_AND_ASSIGN(const uint64_t digest, found.reader->StateDigest());
    EXPECT_EQ(digest, kStateDigest) << version;
  }
}

// What a newer program wrote, and says that this one cannot read.
TEST(GoldenTest, C54_NewerVersionIsRefusedWithBothVersions) {
  FileSystem* fs = FileSystem::Real();
  EXPECT_THAT(CheckpointReader::Open(fs, Root(9) + "/" + CheckpointFolderName(42)).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("written as version 9"), HasSubstr("needs a reader of version 8"),
                             HasSubstr(absl::StrCat("this one reads ", kCheckpointVersion)))));
  EXPECT_THAT(FindLatestCheckpoint(fs, Root(9)).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("needs a reader of version 8")));
}

// A newer version that old readers may read is read.
TEST(GoldenTest, C54_NewerVersionForOldReadersIsRead) {
  ASSERT_OK_AND_ASSIGN(const FoundCheckpoint found, FindLatestCheckpoint(FileSystem::Real(), Root(1)));
  std::string text = RenderManifest(found.reader->manifest());
  const std::string body = text.substr(text.find('\n') + 1);
  const std::string versions = "evenkeel-checkpoint version=7 min_reader=1";
  const uint64_t digest = Digest64(absl::StrCat(versions, "\n", body));
  EXPECT_OK(ParseManifest(absl::StrCat(versions, " xxh3=", absl::Hex(digest, absl::kZeroPad16), "\n", body)));
}

}  // namespace
}  // namespace evenkeel::zero3
