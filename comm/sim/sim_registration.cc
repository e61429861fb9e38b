// The backend "sim" by name.
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class SimulatedWorld final : public NamedWorld {
 public:
  SimulatedWorld(std::unique_ptr<SimWorld> world, int size) : world_(std::move(world)), size_(size) {}
  int size() const override { return size_; }
  std::vector<RankStatus> Run(const std::function<absl::Status(Backend&)>& body) override {
    return ByRank(world_->Run(body));
  }

 private:
  const std::unique_ptr<SimWorld> world_;
  const int size_;
};

absl::StatusOr<std::unique_ptr<NamedWorld>> Create(const WorldOptions& options) {
  SimOptions sim{.world_size = options.world_size,
                 .topology = options.topology,
                 .deadline = options.deadline,
                 .seed = options.seed,
                 .two_level = options.two_level};
  const auto silent = sim.stragglers.report;
  sim.stragglers = options.stragglers;
  if (sim.stragglers.report == nullptr) sim.stragglers.report = silent;  // time there is nobody's
  EK_ASSIGN_OR_RETURN(auto world, SimWorld::Create(sim));
  return std::make_unique<SimulatedWorld>(std::move(world), options.world_size);
}

const bool registered = RegisterBackend("sim", Create);

}  // namespace
}  // namespace evenkeel::comm
