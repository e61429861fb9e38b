#include "evenkeel/testing/corpus.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {
namespace {

using ::testing::HasSubstr;

std::string MakeFolder(const std::string& name) {
  const char* root = std::getenv("TEST_TMPDIR");
  const std::string path = std::string(root != nullptr ? root : ".") + "/" + name;
  std::filesystem::create_directories(path);
  return path;
}

void WriteFile(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

TEST(CorpusTest, ReadsTheFilesOfAFolderInTheOrderOfTheirNames) {
  const std::string folder = MakeFolder("sorted");
  WriteFile(folder + "/b", "second");
  WriteFile(folder + "/a", "first ");
  WriteFile(folder + "/c", std::string("\0\xff", 2));
  MakeFolder("sorted/inner");
  WriteFile(folder + "/inner/x", "not read");
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::Read(folder));
  EXPECT_EQ(std::string(corpus.text()), std::string("first second\0\xff", 14));
}

TEST(CorpusTest, ReadsOneFile) {
  const std::string folder = MakeFolder("one");
  WriteFile(folder + "/a", "text");
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::Read(folder + "/a"));
  EXPECT_EQ(corpus.text(), "text");
}

TEST(CorpusTest, MissingOrEmptyIsOneClearError) {
  EXPECT_THAT(Corpus::Read("/no/such/corpus"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such/corpus does not exist")));
  const std::string folder = MakeFolder("empty");
  EXPECT_THAT(Corpus::Read(folder), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("holds no text (0 files)")));
  WriteFile(folder + "/a", "");
  EXPECT_THAT(Corpus::Read(folder), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("holds no text (1 files)")));
  EXPECT_THAT(Corpus::FromText(""), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
}

TEST(CorpusTest, ADeviceIsNoText) {
  EXPECT_THAT(Corpus::Read("/dev/zero"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/dev/zero: it is no regular file")));
}

TEST(CorpusTest, TooShortATextIsRefusedWithTheNumbers) {
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::FromText("12345678"));
  EXPECT_OK(corpus.CheckLength(7));
  EXPECT_THAT(corpus.CheckLength(8), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("8 bytes")));
  EXPECT_THAT(corpus.CheckLength(0), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 bytes")));
}

TEST(CorpusTest, TargetsAreTheNextBytes) {
  std::string text;
  for (int i = 0; i < 256; ++i) text.push_back(static_cast<char>(i));
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::FromText(text));
  const CorpusBatch batch = corpus.Batch({.seed = 3, .step = 2, .replica = 1}, 4, 9);
  ASSERT_EQ(batch.inputs.size(), 36u);
  ASSERT_EQ(batch.targets.size(), 36u);
  for (int i = 0; i < 36; ++i) {
    EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
    if (i % 9 != 0) {
      EXPECT_EQ(batch.inputs[i], batch.inputs[i - 1] + 1);
    }
  }
}

TEST(CorpusTest, BatchesDependOnSeedStepAndReplicaOnly) {
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::FromText(std::string(5000, 'a') + std::string(5000, 'b') + "c"));
  std::string text;
  for (int i = 0; i < 20000; ++i) text += std::to_string(i * 7919);
  ASSERT_OK_AND_ASSIGN(corpus, Corpus::FromText(text));
  std::set<std::vector<int32_t>> seen;
  for (uint64_t seed : {1, 2}) {
    for (int64_t step : {0, 1, 2}) {
      for (int64_t replica : {0, 1, 2}) {
        const BatchKey key{.seed = seed, .step = step, .replica = replica};
        EXPECT_EQ(corpus.Batch(key, 2, 32).inputs, corpus.Batch(key, 2, 32).inputs);
        seen.insert(corpus.Batch(key, 2, 32).inputs);
      }
    }
  }
  EXPECT_EQ(seen.size(), 18u);
}

TEST(CorpusTest, ReadsTheDefaultText) {
  ASSERT_OK_AND_ASSIGN(Corpus corpus, Corpus::Read(kDefaultCorpus));
  EXPECT_GT(corpus.size(), 10000);
  EXPECT_OK(corpus.CheckLength(32));
}

}  // namespace
}  // namespace evenkeel::testutil
