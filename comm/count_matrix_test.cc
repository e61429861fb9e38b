#include "evenkeel/comm/count_matrix.h"

#include <limits>
#include <vector>

#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(CountMatrixTest, OffsetsAddUp) {
  ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> offsets, OffsetsOf({3, 0, 4}));
  EXPECT_THAT(offsets, ElementsAre(0, 3, 3, 7));
  ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> none, OffsetsOf({}));
  EXPECT_THAT(none, ElementsAre(0));
}

TEST(CountMatrixTest, C12_SumsBeyondTheLimitAreRefused) {
  EXPECT_OK(OffsetsOf({kMax - 1, 1}));
  EXPECT_THAT(OffsetsOf({kMax, 1}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
  EXPECT_THAT(OffsetsOf({1, kMax - 1, 0, 1}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("index 3")));
}

TEST(CountMatrixTest, C13_NegativeCountNamesItsIndex) {
  EXPECT_THAT(OffsetsOf({2, -1, 4}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("counts[1] is -1")));
}

std::vector<int64_t> ConsistentRows(int size, uint64_t seed) {
  const PhiloxStream random{PhiloxKey(seed)};
  std::vector<int64_t> rows(2 * size * size);
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const int64_t count = static_cast<int64_t>(random.Below(from * size + to, 10));
      rows[from * 2 * size + to] = count;
      rows[to * 2 * size + size + from] = count;
    }
  }
  return rows;
}

// C07: random matrices, one entry changed by +-1, to 0, or doubled.
TEST(CountMatrixTest, C07_EveryChangedEntryIsFoundAndNamed) {
  for (const int size : {1, 2, 3, 4, 5, 8}) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      const std::vector<int64_t> rows = ConsistentRows(size, seed);
      EXPECT_EQ(FindCountMismatch(rows, size), std::nullopt);
      for (size_t entry = 0; entry < rows.size(); ++entry) {
        for (const int64_t changed : {rows[entry] + 1, rows[entry] - 1, int64_t{0}, rows[entry] * 2}) {
          if (changed == rows[entry]) continue;
          std::vector<int64_t> odd = rows;
          odd[entry] = changed;
          const auto found = FindCountMismatch(odd, size);
          ASSERT_TRUE(found.has_value());
          ASSERT_EQ(found->findings.size(), 2u);
          const int owner = static_cast<int>(entry) / (2 * size);
          const int column = static_cast<int>(entry) % (2 * size);
          const int from = column < size ? owner : column - size;
          const int to = column < size ? column : owner;
          EXPECT_EQ(found->findings[0].rank, from);
          EXPECT_EQ(found->findings[1].rank, to);
          EXPECT_THAT(found->findings[column < size ? 0 : 1].had,
                      HasSubstr(std::string(" ") + std::to_string(changed) + " elements"));
        }
      }
    }
  }
}

TEST(CountMatrixTest, LongListsAreCut) {
  constexpr int kSize = 8;
  std::vector<int64_t> rows(2 * kSize * kSize, 0);
  for (int rank = 0; rank < kSize; ++rank) {
    for (int to = 0; to < kSize; ++to) rows[rank * 2 * kSize + to] = 1;
  }
  const auto found = FindCountMismatch(rows, kSize);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->findings.size(), 16u);
}

TEST(CountMatrixTest, CountsDifferenceNamesTheIndex) {
  const std::vector<int64_t> equal = {1, 2, 9, 9, 1, 2, 7, 7};
  EXPECT_EQ(FindCountsDifference(equal, 4, 2), std::nullopt);
  const std::vector<int64_t> odd = {1, 2, 9, 9, 1, 3, 7, 7};
  const auto found = FindCountsDifference(odd, 4, 2);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->what, "counts vectors differ at index 1");
  EXPECT_EQ(found->findings[1].had, "has counts[1] = 3");
}

}  // namespace
}  // namespace evenkeel::comm
