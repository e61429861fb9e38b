// The first ranks of a world as a world of their own, for a run that needs fewer than there are.
#ifndef EVENKEEL_TESTING_FIRST_RANKS_H_
#define EVENKEEL_TESTING_FIRST_RANKS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/topology.h"

namespace evenkeel::testutil {

// As comm::Backend says; made by ranks below `size` only. The ledger is the whole world's. Thread-safe as
// that world is.
class FirstRanks final : public comm::Backend {
 public:
  // `world` has at least `size` ranks and outlives this.
  FirstRanks(comm::Backend* world, int size) : world_(*world), topology_(NodesOf(*world, size)) {}

  absl::string_view name() const override { return world_.name(); }
  int rank() const override { return world_.rank(); }
  int size() const override { return topology_.world_size(); }
  const comm::Topology& topology() const override { return topology_; }
  comm::ByteLedger& ledger() override { return world_.ledger(); }
  absl::StatusOr<std::unique_ptr<comm::Communicator>> CreateGroup(const comm::Group& group) override {
    return world_.CreateGroup(group);
  }

 private:
  static std::vector<int> NodesOf(const comm::Backend& world, int size) {
    std::vector<int> nodes;
    for (int rank = 0; rank < size; ++rank) nodes.push_back(world.topology().node(rank));
    return nodes;
  }

  comm::Backend& world_;
  const comm::Topology topology_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_FIRST_RANKS_H_
