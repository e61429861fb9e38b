#include "evenkeel/comm/mesh.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr Axis kAllAxes[] = {Axis::kWorld, Axis::kTp, Axis::kDp, Axis::kEp, Axis::kEdp, Axis::kEtp, Axis::kOther};
constexpr int kMaxWorldSize = 1 << 20;

// A family of groups as arithmetic: member i of the group that starts at rank `first` is first + i * stride.
struct Stride {
  int size = 1;
  int stride = 1;
};

bool WholeExperts(const MeshShape& shape) { return shape.etp == 1 && shape.tp > 1; }

Stride StrideOf(const MeshShape& shape, Axis axis) {
  const int world = shape.tp * shape.dp;
  switch (axis) {
    case Axis::kWorld:
      return {world, 1};
    case Axis::kTp:
      return {shape.tp, 1};
    case Axis::kDp:
      return {shape.dp, shape.tp};
    case Axis::kEp:
      return {shape.ep, WholeExperts(shape) ? 1 : shape.tp};
    case Axis::kEdp:
      return WholeExperts(shape) ? Stride{world / shape.ep, shape.ep}
                                 : Stride{shape.dp / shape.ep, shape.tp * shape.ep};
    case Axis::kEtp:
      return {shape.etp, 1};
    case Axis::kOther:
      return {1, 1};
  }
  return {1, 1};
}

absl::Status CheckShape(const MeshShape& shape) {
  const auto text = [&shape] {
    return absl::StrCat("mesh tp=", shape.tp, " ep=", shape.ep, " dp=", shape.dp, " etp=", shape.etp);
  };
  if (shape.tp < 1 || shape.ep < 1 || shape.dp < 1 || shape.etp < 1) {
    return absl::InvalidArgumentError(absl::StrCat(text(), ": every size must be at least 1"));
  }
  if (shape.tp > kMaxWorldSize / shape.dp) {
    return absl::InvalidArgumentError(absl::StrCat(text(), ": more than ", kMaxWorldSize, " ranks"));
  }
  if (shape.etp != 1 && shape.etp != shape.tp) {
    return absl::InvalidArgumentError(
        absl::StrCat(text(), ": etp=", shape.etp, " must be 1 or equal to tp=", shape.tp));
  }
  const int world = shape.tp * shape.dp;
  if (WholeExperts(shape)) {
    if (world % shape.ep != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(text(), ": ep=", shape.ep, " does not divide the world size ", world));
    }
  } else if (shape.dp % shape.ep != 0) {
    return absl::InvalidArgumentError(absl::StrCat(text(), ": ep=", shape.ep, " does not divide dp=", shape.dp));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view AxisName(Axis axis) {
  switch (axis) {
    case Axis::kWorld:
      return "world";
    case Axis::kTp:
      return "tp";
    case Axis::kDp:
      return "dp";
    case Axis::kEp:
      return "ep";
    case Axis::kEdp:
      return "edp";
    case Axis::kEtp:
      return "etp";
    case Axis::kOther:
      return "other";
  }
  return "unknown";
}

absl::StatusOr<Axis> ParseAxis(absl::string_view name) {
  std::string known;
  for (const Axis axis : kAllAxes) {
    if (AxisName(axis) == name) return axis;
    absl::StrAppend(&known, known.empty() ? "" : ", ", AxisName(axis));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown axis '", name, "'; known: ", known));
}

int Group::IndexOf(int world_rank) const {
  const auto found = std::find(ranks.begin(), ranks.end(), world_rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

absl::StatusOr<Mesh> Mesh::Create(const MeshShape& shape) {
  EK_RETURN_IF_ERROR(CheckShape(shape));
  return Mesh(shape);
}

int Mesh::size(Axis axis) const { return StrideOf(shape_, axis).size; }

Group Mesh::GroupOf(Axis axis, int world_rank) const {
  EK_CHECK(world_rank >= 0 && world_rank < world_size());
  const Stride family = StrideOf(shape_, axis);
  const int first = world_rank - Coordinate(axis, world_rank) * family.stride;
  Group group{.axis = axis, .name = std::string(AxisName(axis)), .ranks = std::vector<int>(family.size)};
  for (int i = 0; i < family.size; ++i) group.ranks[i] = first + i * family.stride;
  return group;
}

int Mesh::Coordinate(Axis axis, int world_rank) const {
  const Stride family = StrideOf(shape_, axis);
  return (world_rank / family.stride) % family.size;
}

std::vector<Group> Mesh::Groups(Axis axis) const {
  std::vector<Group> groups;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (Coordinate(axis, rank) == 0) groups.push_back(GroupOf(axis, rank));
  }
  return groups;
}

}  // namespace evenkeel::comm
