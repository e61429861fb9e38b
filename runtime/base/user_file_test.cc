#include "evenkeel/runtime/base/user_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

std::string Path(const std::string& name) { return ::testing::TempDir() + "/user_file_" + name; }

std::string WithText(const std::string& name, const std::string& text) {
  std::ofstream(Path(name), std::ios::binary) << text;
  return Path(name);
}

TEST(UserFileTest, ReadsEveryByteUpToTheLimit) {
  std::string large(3 << 20, 'x');
  large[0] = '\0';
  large[1 << 20] = '\n';
  for (const std::string& text : {std::string(), std::string("a\0b", 3), large}) {
    ASSERT_OK_AND_ASSIGN(const std::string read,
                         ReadUserFile(WithText("text", text), static_cast<int64_t>(text.size())));
    EXPECT_EQ(read, text);
  }
  EXPECT_THAT(ReadUserFile(WithText("text", "abc"), 2).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("more than 2 bytes")));
}

TEST(UserFileTest, FollowsLinks) {
  unlink(Path("link").c_str());
  ASSERT_EQ(symlink(WithText("text", "abc").c_str(), Path("link").c_str()), 0);
  ASSERT_OK_AND_ASSIGN(const std::string read, ReadUserFile(Path("link"), 10));
  EXPECT_EQ(read, "abc");
}

TEST(UserFileTest, NamesWhatIsNoFile) {
  EXPECT_THAT(ReadUserFile(Path("nothing"), 10).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(Path("nothing"))));
  EXPECT_THAT(ReadUserFile(WithText("text", "abc") + "/x", 10).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/x")));
  EXPECT_THAT(ReadUserFile("", 10).status(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("cannot read")));
  EXPECT_THAT(ReadUserFile(::testing::TempDir(), 10).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("it is a folder")));
  EXPECT_THAT(ReadUserFile("/dev/zero", 10).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("/dev/zero: it is no regular file")));
  unlink(Path("pipe").c_str());
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(ReadUserFile(Path("pipe"), 10).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("it is no regular file")));
}

}  // namespace
}  // namespace evenkeel
