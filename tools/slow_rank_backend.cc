// A backend as a user of the parity program would bring one: simulated ranks of which one is late twice.
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class SlowRankWorld final : public NamedWorld {
 public:
  SlowRankWorld(std::unique_ptr<SimWorld> world, int size) : world_(std::move(world)), size_(size) {}
  int size() const override { return size_; }
  std::vector<RankStatus> Run(const std::function<absl::Status(Backend&)>& body) override {
    std::vector<RankStatus> results;
    for (absl::Status& status : world_->Run(body)) {
      results.push_back({static_cast<int>(results.size()), std::move(status)});
    }
    return results;
  }

 private:
  const std::unique_ptr<SimWorld> world_;
  const int size_;
};

absl::StatusOr<std::unique_ptr<NamedWorld>> Create(const WorldOptions& options) {
  SimOptions sim{.world_size = options.world_size, .topology = options.topology, .deadline = options.deadline};
  sim.faults = {{.kind = SimFault::Kind::kStop, .rank = 2, .index = 500, .by = absl::Seconds(2)},
                {.kind = SimFault::Kind::kStop, .rank = 2, .index = 900, .by = absl::Seconds(3)}};
  sim.stragglers = options.stragglers;
  EK_ASSIGN_OR_RETURN(auto world, SimWorld::Create(sim));
  return std::make_unique<SlowRankWorld>(std::move(world), options.world_size);
}

const bool registered = RegisterBackend("slow_rank", Create);

}  // namespace
}  // namespace evenkeel::comm
