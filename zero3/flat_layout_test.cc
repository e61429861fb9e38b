#include "evenkeel/zero3/flat_layout.h"

#include <cstring>
#include <limits>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// Every element belongs to exactly one rank, ranges ascend, lie inside the shard and never cut an element.
void CheckPartition(const std::vector<FlatItem>& items, int world) {
  ASSERT_OK_AND_ASSIGN(const FlatLayout layout, FlatLayout::Create(items, world));
  int64_t used = 0;
  int64_t widest = 1;
  for (size_t i = 0; i < items.size(); ++i) {
    EXPECT_EQ(layout.offset_bytes(static_cast<int>(i)) % kParameterAlignment, 0);
    used += items[i].elements * SizeOf(items[i].dtype);
    if (items[i].elements > 0) widest = std::max(widest, SizeOf(items[i].dtype));
  }
  EXPECT_EQ(layout.used_bytes(), used);
  EXPECT_EQ(layout.total_bytes() % world, 0);
  int64_t non_empty = 0;
  for (const FlatItem& item : items) non_empty += item.elements > 0 ? 1 : 0;
  EXPECT_LE(layout.padding_bytes(), 15 * non_empty + widest * world);
  std::vector<int64_t> next(items.size(), 0);
  for (int r = 0; r < world; ++r) {
    int64_t end = 0;
    for (const FlatRange& range : layout.Ranges(r)) {
      const size_t i = static_cast<size_t>(range.item);
      ASSERT_GE(range.count, 1);
      ASSERT_EQ(range.begin, next[i]) << "world " << world << " rank " << r << " item " << i;
      next[i] += range.count;
      ASSERT_GE(range.shard_offset, end);
      ASSERT_EQ(r * layout.shard_bytes() + range.shard_offset,
                layout.offset_bytes(range.item) + range.begin * SizeOf(items[i].dtype));
      end = range.shard_offset + range.count * SizeOf(items[i].dtype);
    }
    ASSERT_LE(end, layout.shard_bytes());
  }
  for (size_t i = 0; i < items.size(); ++i) ASSERT_EQ(next[i], items[i].elements);
}

// Sizes 0 .. 3 world + 1, every dtype, alone and between others.
TEST(FlatLayoutTest, C34_EverySizeAndWorld) {
  for (int world = 1; world <= 8; ++world) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
      for (int64_t n = 0; n <= 3 * world + 1; ++n) {
        CheckPartition({{n, dtype}}, world);
        CheckPartition({{3, DType::kBF16}, {n, dtype}, {1, DType::kF32}}, world);
        CheckPartition({{n, dtype}, {0, DType::kF64}, {n, dtype}, {0, dtype}}, world);
      }
    }
  }
  CheckPartition({}, 3);
}

TEST(FlatLayoutTest, TheExampleOfTheHeader) {
  const std::vector<FlatItem> items = {{7, DType::kF32}, {5, DType::kF32}};
  ASSERT_OK_AND_ASSIGN(const FlatLayout layout, FlatLayout::Create(items, 3));
  EXPECT_EQ(layout.offset_bytes(1), 32);
  EXPECT_EQ(layout.total_bytes(), 60);
  EXPECT_EQ(layout.shard_bytes(), 20);
}

// Scatter by ranges, gather by concatenation: bit for bit what was put in, with NaN in all padding.
TEST(FlatLayoutTest, C34_GatherOfScatterIsTheIdentity) {
  for (int world : {1, 2, 3, 4, 5, 8}) {
    const std::vector<FlatItem> items = {{13, DType::kF32}, {1, DType::kF64}, {0, DType::kF32}, {7, DType::kBF16}};
    ASSERT_OK_AND_ASSIGN(const FlatLayout layout, FlatLayout::Create(items, world));
    std::vector<std::vector<uint8_t>> values;
    for (const FlatItem& item : items) {
      values.emplace_back(static_cast<size_t>(item.elements * SizeOf(item.dtype)));
      for (size_t i = 0; i < values.back().size(); ++i) values.back()[i] = static_cast<uint8_t>(values.size() * 40 + i);
    }
    std::vector<uint8_t> gathered(static_cast<size_t>(layout.total_bytes()), 0xff);
    for (int r = 0; r < world; ++r) {
      for (const FlatRange& range : layout.Ranges(r)) {
        const size_t size = static_cast<size_t>(SizeOf(items[static_cast<size_t>(range.item)].dtype));
        std::memcpy(&gathered[static_cast<size_t>(r * layout.shard_bytes() + range.shard_offset)],
                    values[static_cast<size_t>(range.item)].data() + static_cast<size_t>(range.begin) * size,
                    static_cast<size_t>(range.count) * size);
      }
    }
    for (size_t i = 0; i < items.size(); ++i) {
      if (values[i].empty()) continue;
      EXPECT_EQ(std::memcmp(&gathered[static_cast<size_t>(layout.offset_bytes(static_cast<int>(i)))], values[i].data(),
                            values[i].size()),
                0);
    }
  }
}

TEST(FlatLayoutTest, RefusesBadNumbers) {
  const std::vector<FlatItem> one = {{1, DType::kF32}};
  EXPECT_THAT(FlatLayout::Create(one, 0), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("world size 0")));
  const std::vector<FlatItem> negative = {{-1, DType::kF32}};
  EXPECT_THAT(FlatLayout::Create(negative, 2), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1 elements")));
  const std::vector<FlatItem> huge = {{std::numeric_limits<int64_t>::max() / 2, DType::kF32}};
  EXPECT_THAT(FlatLayout::Create(huge, 2), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
}

}  // namespace
}  // namespace evenkeel::zero3
