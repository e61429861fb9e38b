#include "evenkeel/zero3/checkpoint/piece.h"

#include <cstdint>
#include <random>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

// Global index of element `index` of a box, the slow way.
int64_t Global(const Piece& piece, const std::vector<int64_t>& global_shape, int64_t index) {
  std::vector<int64_t> at(global_shape.size());
  for (int i = static_cast<int>(at.size()) - 1; i >= 0; --i) {
    at[i] = piece.offset[i] + index % piece.shape[i];
    index /= piece.shape[i];
  }
  int64_t global = 0;
  for (size_t i = 0; i < at.size(); ++i) global = global * global_shape[i] + at[i];
  return global;
}

Piece RandomPiece(const std::vector<int64_t>& global_shape, std::mt19937& random) {
  Piece piece;
  int64_t elements = 1;
  for (int64_t extent : global_shape) {
    const int64_t begin = static_cast<int64_t>(random() % extent);
    piece.offset.push_back(begin);
    piece.shape.push_back(1 + static_cast<int64_t>(random() % (extent - begin)));
    elements *= piece.shape.back();
  }
  piece.begin = static_cast<int64_t>(random() % (elements + 1));
  piece.end = piece.begin + static_cast<int64_t>(random() % (elements - piece.begin + 1));
  return piece;
}

TEST(PieceTest, CommonRunsAreExactlyTheCommonElements) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> shape(random() % 5);
    for (int64_t& extent : shape) extent = 1 + static_cast<int64_t>(random() % 5);
    const Piece source = RandomPiece(shape, random), target = RandomPiece(shape, random);
    std::vector<int64_t> expected(target.num_elements(), -1), found(target.num_elements(), -1);
    for (int64_t t = target.begin; t < target.end; ++t) {
      for (int64_t s = source.begin; s < source.end; ++s) {
        if (Global(source, shape, s) == Global(target, shape, t)) expected[t - target.begin] = s - source.begin;
      }
    }
    int64_t last_to = -1;
    ForEachCommonRun(source, target, [&](int64_t from, int64_t to, int64_t count) {
      EXPECT_GT(to, last_to);
      last_to = to + count - 1;
      for (int64_t i = 0; i < count; ++i) found.at(to + i) = from + i;
    });
    ASSERT_EQ(found, expected) << PieceName(source) << " -> " << PieceName(target);
  }
}

TEST(PieceTest, WholeTrailingDimensionsAreOneRun) {
  Piece experts{{2, 0, 0}, {2, 64, 128}, 0, 2 * 64 * 128};
  int runs = 0;
  ForEachCommonRun(experts, WholePiece({8, 64, 128}), [&](int64_t from, int64_t to, int64_t count) {
    ++runs;
    EXPECT_EQ(from, 0);
    EXPECT_EQ(to, 2 * 64 * 128);
    EXPECT_EQ(count, 2 * 64 * 128);
  });
  EXPECT_EQ(runs, 1);
}

TEST(PieceTest, C34_CoverFindsTheMissingAndTheDoubledElement) {
  const std::vector<int64_t> shape = {4, 6};
  // Two TP halves, each cut into ZeRO shards of 5 elements.
  std::vector<Piece> pieces;
  for (int64_t lane = 0; lane < 2; ++lane) {
    for (int64_t begin = 0; begin < 12; begin += 5) {
      pieces.push_back({{0, lane * 3}, {4, 3}, begin, std::min<int64_t>(begin + 5, 12)});
    }
  }
  EXPECT_OK(CheckCover(shape, pieces, "w"));
  std::vector<Piece> missing = pieces;
  missing.erase(missing.begin() + 1);
  EXPECT_THAT(CheckCover(shape, missing, "w"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("w: element 8 is in no")));
  std::vector<Piece> doubled = pieces;
  doubled.push_back(pieces[0]);
  EXPECT_THAT(CheckCover(shape, doubled, "w"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is in two shards")));
  EXPECT_OK(CheckCover({0, 3}, {}, "empty"));
  EXPECT_OK(CheckCover({}, {WholePiece({})}, "scalar"));
  EXPECT_THAT(CheckCover({}, {}, "scalar"), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("element 0")));
}

TEST(PieceTest, RefusesPiecesOutsideTheTensor) {
  const std::vector<int64_t> shape = {4, 6};
  EXPECT_OK(ValidatePiece({{0, 3}, {4, 3}, 0, 12}, shape, "w"));
  for (const Piece& piece : std::vector<Piece>{{{0}, {4}, 0, 4},
                                               {{0, 4}, {4, 3}, 0, 12},
                                               {{-1, 0}, {4, 3}, 0, 12},
                                               {{0, 0}, {4, 3}, 0, 13},
                                               {{0, 0}, {4, 3}, 5, 4},
                                               {{INT64_MAX, 0}, {2, 3}, 0, 1}}) {
    EXPECT_THAT(ValidatePiece(piece, shape, "w"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("w: piece")));
  }
}

}  // namespace
}  // namespace evenkeel::zero3
