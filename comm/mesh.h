// The layout of ranks and the groups that follow from it. Pure values: no
// communication.
//
// Rank numbering: the TP lane is fastest. world = tp * dp.
//   tp   consecutive ranks: [0..T-1], [T..2T-1], ...
//   dp   lane-wise: ranks of one lane (stride T)
//   etp == tp  (experts are tensor-parallel too): the dp list of a lane, cut
//   into chunks of E, gives the ep groups;
//              the j-th members of all chunks of a lane form an edp group. E
//              must divide dp. world 8, tp 2, ep 4: ep [0,2,4,6] [1,3,5,7], edp
//              singletons.
//   etp == 1   (whole experts): ep groups are E consecutive ranks and span TP
//   lanes; edp has stride E.
//              E must divide the world size.
// Semantics of the two layouts: DeepSpeed deepspeed/utils/groups.py ("E + M +
// D" and "E + D").
#ifndef EVENKEEL_COMM_MESH_H_
#define EVENKEEL_COMM_MESH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::comm {

// The values index ledgers: append only.
enum class Axis : uint8_t { kWorld = 0, kTp = 1, kDp = 2, kEp = 3, kEdp = 4, kEtp = 5, kOther = 6 };
inline constexpr int kNumAxes = 7;
// "world", "tp", "dp", "ep", "edp", "etp", "other".
absl::string_view AxisName(Axis axis);
// Inverse of AxisName; InvalidArgument otherwise.
absl::StatusOr<Axis> ParseAxis(absl::string_view name);

// An ordered set of world ranks. The position in `ranks` is the rank inside the
// group.
struct Group {
  Axis axis = Axis::kOther;
  std::string name;        // for messages: "ep"; not a key
  std::vector<int> ranks;  // world ranks, all different, in group order

  int size() const { return static_cast<int>(ranks.size()); }
  // The position of `world_rank`, or -1.
  int IndexOf(int world_rank) const;
  friend bool operator==(const Group&, const Group&) = default;
};

// What the caller chooses. Every field >= 1.
struct MeshShape {
  int tp = 1;
  int ep = 1;
  int dp = 1;
  int etp = 1;  // 1 or tp

  friend bool operator==(const MeshShape&, const MeshShape&) = default;
};

// A validated layout. Immutable value.
class Mesh {
 public:
  // InvalidArgument naming the numbers when etp is neither 1 nor tp, or ep does
  // not divide dp (etp == tp) or the world size (etp == 1 < tp). Never clamps.
  static absl::StatusOr<Mesh> Create(const MeshShape& shape);

  const MeshShape& shape() const { return shape_; }
  int world_size() const { return shape_.tp * shape_.dp; }
  // Size of every group of `axis`.
  int size(Axis axis) const;
  // All groups of `axis`: a partition of the world, in order of their first
  // rank.
  std::vector<Group> Groups(Axis axis) const;
  // The group of `axis` that holds `world_rank`.
  Group GroupOf(Axis axis, int world_rank) const;
  // The position of `world_rank` in its group of `axis` (its lane for kTp).
  int Coordinate(Axis axis, int world_rank) const;

 private:
  explicit Mesh(const MeshShape& shape) : shape_(shape) {}
  MeshShape shape_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESH_H_
