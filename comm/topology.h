// Which rank sits on which node, so that every byte is booked by link class.
// Nodes may be virtual.
#ifndef EVENKEEL_COMM_TOPOLOGY_H_
#define EVENKEEL_COMM_TOPOLOGY_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel::comm {

enum class LinkClass : uint8_t { kIntraNode = 0, kInterNode = 1 };
inline constexpr int kNumLinkClasses = 2;

inline absl::string_view LinkClassName(LinkClass link) {
  return link == LinkClass::kIntraNode ? "intra_node" : "inter_node";
}

// A value: world rank -> node. Immutable after creation.
class Topology {
 public:
  // Every rank on one node.
  static Topology SingleNode(int world_size) { return Topology(std::vector<int>(world_size, 0)); }
  // Consecutive blocks of `ranks_per_node` ranks; the last node may hold fewer.
  static absl::StatusOr<Topology> Blocks(int world_size, int ranks_per_node) {
    if (world_size < 1 || ranks_per_node < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot place ", world_size, " ranks on nodes of ", ranks_per_node));
    }
    std::vector<int> nodes(world_size);
    for (int rank = 0; rank < world_size; ++rank) nodes[rank] = rank / ranks_per_node;
    return Topology(std::move(nodes));
  }
  // nodes[rank] >= 0 is the node of world rank `rank`.
  explicit Topology(std::vector<int> nodes) : nodes_(std::move(nodes)) {}

  int world_size() const { return static_cast<int>(nodes_.size()); }
  int node(int rank) const { return nodes_[rank]; }
  LinkClass Link(int from, int to) const {
    return nodes_[from] == nodes_[to] ? LinkClass::kIntraNode : LinkClass::kInterNode;
  }

 private:
  std::vector<int> nodes_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TOPOLOGY_H_
