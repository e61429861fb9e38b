#include "evenkeel/comm/mesh.h"

#include <algorithm>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Axis kAxes[] = {Axis::kWorld, Axis::kTp, Axis::kDp, Axis::kEp, Axis::kEdp, Axis::kEtp, Axis::kOther};

std::vector<std::vector<int>> Lists(const Mesh& mesh, Axis axis) {
  std::vector<std::vector<int>> lists;
  for (const Group& group : mesh.Groups(axis)) lists.push_back(group.ranks);
  return lists;
}

Mesh MakeMesh(int tp, int ep, int dp, int etp) {
  auto mesh = Mesh::Create({.tp = tp, .ep = ep, .dp = dp, .etp = etp});
  EK_CHECK_OK(mesh);
  return *mesh;
}

TEST(MeshTest, TensorParallelExpertsStayInTheirLane) {
  const Mesh mesh = MakeMesh(2, 4, 4, 2);
  EXPECT_THAT(Lists(mesh, Axis::kTp),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(Lists(mesh, Axis::kEp), ElementsAre(ElementsAre(0, 2, 4, 6), ElementsAre(1, 3, 5, 7)));
  EXPECT_EQ(mesh.Groups(Axis::kEdp).size(), 8u);
  EXPECT_EQ(mesh.size(Axis::kEdp), 1);
}

TEST(MeshTest, SixteenRanksOfTheDefaultJob) {
  const Mesh mesh = MakeMesh(2, 4, 8, 2);
  EXPECT_THAT(Lists(mesh, Axis::kEp), ElementsAre(ElementsAre(0, 2, 4, 6), ElementsAre(1, 3, 5, 7),
                                                  ElementsAre(8, 10, 12, 14), ElementsAre(9, 11, 13, 15)));
  EXPECT_THAT(mesh.GroupOf(Axis::kEdp, 11).ranks, ElementsAre(3, 11));
  EXPECT_THAT(mesh.GroupOf(Axis::kDp, 3).ranks, ElementsAre(1, 3, 5, 7, 9, 11, 13, 15));
}

TEST(MeshTest, WholeExpertsSpanLanes) {
  const Mesh mesh = MakeMesh(2, 4, 4, 1);
  EXPECT_THAT(Lists(mesh, Axis::kEp), ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  EXPECT_THAT(Lists(mesh, Axis::kEdp),
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6), ElementsAre(3, 7)));
  EXPECT_EQ(mesh.size(Axis::kEtp), 1);
}

// Every legal shape up to 16 ranks: groups partition the world, a rank is at its coordinate, sizes are as stated, and
// tp x dp and etp x ep x edp both cover the world exactly once.
TEST(MeshTest, EveryShapePartitionsTheWorld) {
  int shapes = 0;
  for (int tp = 1; tp <= 8; ++tp) {
    for (int dp = 1; tp * dp <= 16; ++dp) {
      for (int ep = 1; ep <= 16; ++ep) {
        for (const int etp : {1, tp}) {
          const auto mesh = Mesh::Create({.tp = tp, .ep = ep, .dp = dp, .etp = etp});
          const bool legal = (etp == tp ? dp : tp * dp) % ep == 0;
          ASSERT_EQ(mesh.ok(), legal) << tp << " " << ep << " " << dp << " " << etp;
          if (!legal) continue;
          ++shapes;
          for (const Axis axis : kAxes) {
            std::vector<int> seen;
            for (const Group& group : mesh->Groups(axis)) {
              EXPECT_EQ(group.size(), mesh->size(axis));
              EXPECT_EQ(group.axis, axis);
              for (int i = 0; i < group.size(); ++i) {
                const int rank = group.ranks[i];
                seen.push_back(rank);
                EXPECT_EQ(mesh->Coordinate(axis, rank), i);
                EXPECT_EQ(mesh->GroupOf(axis, rank), group);
              }
            }
            std::sort(seen.begin(), seen.end());
            ASSERT_EQ(static_cast<int>(seen.size()), mesh->world_size());
            for (int rank = 0; rank < mesh->world_size(); ++rank) EXPECT_EQ(seen[rank], rank);
          }
          EXPECT_EQ(mesh->size(Axis::kTp) * mesh->size(Axis::kDp), mesh->world_size());
          EXPECT_EQ(mesh->size(Axis::kEtp) * mesh->size(Axis::kEp) * mesh->size(Axis::kEdp), mesh->world_size());
        }
      }
    }
  }
  EXPECT_GT(shapes, 100);
}

TEST(MeshTest, RefusesAndNamesTheNumbers) {
  const auto status = [](int tp, int ep, int dp, int etp) {
    return Mesh::Create({.tp = tp, .ep = ep, .dp = dp, .etp = etp}).status();
  };
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(status(2, 3, 4, 2), StatusIs(kBad, HasSubstr("ep=3 does not divide dp=4")));
  EXPECT_THAT(status(2, 3, 4, 1), StatusIs(kBad, HasSubstr("ep=3 does not divide the world size 8")));
  EXPECT_THAT(status(4, 1, 2, 2), StatusIs(kBad, HasSubstr("etp=2 must be 1 or equal to tp=4")));
  EXPECT_THAT(status(0, 1, 1, 1), StatusIs(kBad, HasSubstr("at least 1")));
  EXPECT_THAT(status(1, -2, 1, 1), StatusIs(kBad, HasSubstr("ep=-2")));
  EXPECT_THAT(status(1 << 16, 1, 1 << 16, 1), StatusIs(kBad, HasSubstr("more than")));
}

TEST(MeshTest, AxisNamesParseBack) {
  for (const Axis axis : kAxes) {
    ASSERT_OK_AND_ASSIGN(const Axis parsed, ParseAxis(AxisName(axis)));
    EXPECT_EQ(parsed, axis);
  }
  EXPECT_THAT(ParseAxis("pp"), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("known: world, tp, dp")));
}

}  // namespace
}  // namespace evenkeel::comm
