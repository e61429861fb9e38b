// The backend "in_process" by name.
#include <memory>
#include <utility>
#include <vector>

#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class ThreadWorld final : public NamedWorld {
 public:
  explicit ThreadWorld(std::unique_ptr<InProcessWorld> world) : world_(std::move(world)) {}
  int size() const override { return world_->size(); }
  std::vector<RankStatus> Run(const std::function<absl::Status(Backend&)>& body) override {
    return ByRank(world_->Run(body));
  }

 private:
  const std::unique_ptr<InProcessWorld> world_;
};

absl::StatusOr<std::unique_ptr<NamedWorld>> Create(const WorldOptions& options) {
  EK_ASSIGN_OR_RETURN(auto world, InProcessWorld::Create({.world_size = options.world_size,
                                                          .topology = options.topology,
                                                          .deadline = options.deadline,
                                                          .two_level = options.two_level,
                                                          .stragglers = options.stragglers}));
  return std::make_unique<ThreadWorld>(std::move(world));
}

const bool registered = RegisterBackend("in_process", Create);

}  // namespace
}  // namespace evenkeel::comm
