#include "evenkeel/runtime/tensor/safetensors.h"

#include <sys/resource.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

absl::StatusOr<SafetensorsHeader> Parse(const std::string& json, int64_t data_bytes) {
  return ParseSafetensorsHeader(json, 8 + static_cast<int64_t>(json.size()) + data_bytes);
}

TEST(SafetensorsTest, WhatIsBuiltIsParsedBack) {
  std::vector<SafetensorsEntry> entries = {{"layer.0.w", DType::kF32, {2, 3}, 0, 0},
                                           {"empty", DType::kI64, {0, 7}, 0, 0},
                                           {"scalar \"quoted\"\n", DType::kBF16, {}, 0, 0},
                                           {"u", DType::kU8, {5}, 0, 0}};
  ASSERT_OK_AND_ASSIGN(const std::string front, BuildSafetensorsHeader(entries, {{"step", "7"}}));
  EXPECT_EQ(front.size() % 8, 0u);
  const int64_t file_bytes = static_cast<int64_t>(front.size()) + 24 + 0 + 2 + 5;
  ASSERT_OK_AND_ASSIGN(const int64_t length, ParseSafetensorsLength(front, file_bytes));
  ASSERT_EQ(length, static_cast<int64_t>(front.size()) - 8);
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, ParseSafetensorsHeader(front.substr(8), file_bytes));
  EXPECT_EQ(header.data_offset, static_cast<int64_t>(front.size()));
  EXPECT_EQ(header.metadata.at("step"), "7");
  EXPECT_EQ(header.tensors, entries);
  EXPECT_EQ(header.Find("u")->begin, 26);
  EXPECT_EQ(header.Find("none"), nullptr);
}

// Bytes as the Python package of the format writes them for {"a": float32 zeros(2), "b": int64 [1]}.
TEST(SafetensorsTest, ReadsAFileOfThePythonPackage) {
  const std::string json =
      R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})";
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header, Parse(json, 16));
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "b");
  EXPECT_THAT(header.Find("a")->shape.dims(), ElementsAre(2));
}

TEST(SafetensorsTest, C49_RefusesHostileHeaders) {
  const std::pair<std::string, std::string> cases[] = {
      {"", "begin"},
      {"[]", "begin"},
      {"{", "JSON"},
      {"{}x", "JSON"},
      {R"({"a":1})", "number"},
      {R"({"a":null})", "null"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "doubled name"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "doubled key"},
      {R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}})", "unknown dtype 'F99'"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "negative"},
      {R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", "1.5"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}})", "overflow"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", "18446744073709551615"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", "[0, 8] for 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", "[4, 0]"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "more than 2"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "no shape"},
      {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "no dtype"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "array"},
      {R"({"a":{"dtype":{"x":1},"shape":[1],"data_offsets":[0,4]}})", "nested"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"code":"x"}})", "unknown key 'code'"},
      {R"({"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "empty name"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "hole"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       "overlap"},
      {R"({"__metadata__":{"a":1}})", "number"},
  };
  for (const auto& [json, message] : cases) EXPECT_THAT(Parse(json, 4), StatusIs(kInvalid, HasSubstr(message))) << json;
  EXPECT_THAT(Parse("{\"a\":" + std::string(1 << 20, '['), 4), StatusIs(kInvalid, HasSubstr("array")));
}

// Refusing costs no memory beyond the text itself, however large a structure it announces.
TEST(SafetensorsTest, C49_HostileHeadersStayUnderAMemoryCap) {
  auto peak_kib = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
  };
  constexpr int kBytes = 8 << 20;
  std::string shape = R"({"a":{"dtype":"F32","shape":[)";
  while (shape.size() < kBytes) shape += "1,";
  const std::string texts[] = {"{\"a\":" + std::string(kBytes, '['), "{\"a\":" + std::string(kBytes, '{'), shape,
                               "{\"a\":\"" + std::string(kBytes, 'x')};
  const int64_t before = peak_kib();
  for (const std::string& text : texts) EXPECT_FALSE(Parse(text, 4).ok());
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int64_t kCapKib = 256 << 10;  // freed memory is kept for a while, and shadowed
#else
  constexpr int64_t kCapKib = 64 << 10;
#endif
  EXPECT_LT(peak_kib() - before, kCapKib);
}

TEST(SafetensorsTest, C47_NamesExpectedAndFoundLength) {
  const std::string json = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  for (int64_t data_bytes : {0, 3, 5, 1000}) {
    EXPECT_THAT(Parse(json, data_bytes), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(absl::StrCat(data_bytes))));
  }
  EXPECT_THAT(ParseSafetensorsLength("1234567", 7), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("7 bytes")));
  EXPECT_THAT(ParseSafetensorsLength(std::string("\x09\0\0\0\0\0\0\0", 8), 16),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("9 bytes")));
  EXPECT_THAT(ParseSafetensorsLength(std::string(8, '\xff'), 1 << 20), StatusIs(kInvalid, HasSubstr("limit")));
}

TEST(SafetensorsTest, BuilderRefusesBadNames) {
  for (const char* name : {"", "__metadata__", "twice"}) {
    std::vector<SafetensorsEntry> entries = {{"twice", DType::kF32, {1}, 0, 0}, {name, DType::kF32, {1}, 0, 0}};
    EXPECT_THAT(BuildSafetensorsHeader(entries, {}), StatusIs(kInvalid, HasSubstr("name"))) << name;
  }
}

// Single-byte damage of a header is refused or gives tensors that still cover the data exactly.
TEST(SafetensorsTest, SurvivesRandomDamage) {
  std::vector<SafetensorsEntry> entries = {{"a", DType::kF32, {2, 3}, 0, 0}, {"b", DType::kI64, {4}, 0, 0}};
  ASSERT_OK_AND_ASSIGN(const std::string front, BuildSafetensorsHeader(entries, {{"k", "v"}}));
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = front.substr(8);
    for (int n = 0; n <= round % 3; ++n) damaged[random() % damaged.size()] = static_cast<char>(random());
    const absl::StatusOr<SafetensorsHeader> header = Parse(damaged, 56);
    if (!header.ok()) continue;
    int64_t at = 0;
    for (const SafetensorsEntry& entry : header->tensors) {
      ASSERT_EQ(entry.begin, at);
      at = entry.end;
    }
    ASSERT_EQ(at, 56);
  }
}

}  // namespace
}  // namespace evenkeel
