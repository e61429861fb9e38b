#include "evenkeel/tools/auto_order.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/capacity.h"
#include "evenkeel/moe/exchange_levels.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::tools {
namespace {

// Orders that a model with replicated tokens can run.
absl::StatusOr<std::vector<std::string>> Choices(bool over_nodes) {
  std::vector<std::string> names;
  for (const std::string& name : over_nodes ? moe::OrderNamesOverNodes() : moe::OrderNames()) {
    EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(name));
    if (order.input.placement == moe::Placement::kInvariant && order.output.placement == moe::Placement::kInvariant) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace

absl::StatusOr<moe::OrderSizes> LayerSizes(const testutil::TrainingConfig& base) {
  const testutil::LanguageModelConfig& model = base.model;
  moe::OrderSizes sizes;
  sizes.tokens = model.tokens();
  sizes.hidden = model.hidden;
  sizes.ffn = model.ffn;
  sizes.experts = model.experts;
  sizes.top_k = model.top_k;
  sizes.dtype = model.dtype;
  sizes.tp = base.mesh.tp;
  sizes.ep = base.mesh.ep;
  moe::CapacityOptions options;
  options.min_capacity = model.min_capacity;
  // Without drops the buffers grow with the fullest expert; balanced routing is assumed here.
  options.factor = model.capacity_factor.is_zero() ? *moe::Rational::Create(1, 1) : model.capacity_factor;
  const moe::CapacityInput input{.tokens = sizes.tokens, .experts = sizes.experts, .top_k = sizes.top_k};
  EK_ASSIGN_OR_RETURN(sizes.capacity, moe::ComputeCapacity(options, input, sizes.tp,
                                                           [](int64_t need) { return absl::StatusOr<int64_t>(need); }));
  return sizes;
}

absl::StatusOr<moe::OrderPlan> PlanOnBackend(const comm::Mesh& mesh, const moe::OrderSizes& sizes,
                                             comm::Backend& backend) {
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->CreateStream("calibration"));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> tp,
                      backend.CreateGroup(mesh.GroupOf(comm::Axis::kTp, backend.rank())));
  const comm::Group ep = mesh.GroupOf(comm::Axis::kEp, backend.rank());
  const absl::StatusOr<moe::ExchangeLevels> levels = moe::LevelsOf(ep, backend.topology(), backend.rank());
  // Nodes that are no equal blocks count as one.
  const bool over_nodes = levels.ok() && levels->peers.size() > 1;
  std::unique_ptr<comm::Communicator> near, peers;
  EK_ASSIGN_OR_RETURN(near, backend.CreateGroup(over_nodes ? levels->node : ep));
  if (over_nodes) {
    EK_ASSIGN_OR_RETURN(peers, backend.CreateGroup(levels->peers));
  }
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> all,
                      backend.CreateGroup(comm::WorldGroup(backend.size())));
  EK_ASSIGN_OR_RETURN(
      const moe::CostModel model,
      moe::CalibrateCostModel({.tp = tp.get(), .ep = near.get(), .ep_peers = peers.get(), .all = all.get()},
                              device.get(), Clock::Real(), *stream));
  moe::OrderSizes own = sizes;
  if (over_nodes) own.ep_per_node = levels->node.size();
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, Choices(over_nodes));
  return moe::PlanOrder(names, moe::ExpertLayout::kTensorParallel, own, model);
}

absl::StatusOr<moe::OrderPlan> PlanOnThreads(const comm::Mesh& mesh, const moe::OrderSizes& sizes, int ranks_per_node) {
  comm::InProcessOptions options;
  options.world_size = mesh.world_size();
  if (ranks_per_node > 0) {
    EK_ASSIGN_OR_RETURN(options.topology, comm::Topology::Blocks(options.world_size, ranks_per_node));
  }
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::InProcessWorld> world, comm::InProcessWorld::Create(options));
  absl::StatusOr<moe::OrderPlan> plan = absl::UnknownError("rank 0 made no plan");
  const std::vector<absl::Status> statuses = comm::RunRanks(*world, [&](comm::Backend& backend) -> absl::Status {
    absl::StatusOr<moe::OrderPlan> mine = PlanOnBackend(mesh, sizes, backend);
    const absl::Status status = mine.status();
    if (backend.rank() == 0) plan = std::move(mine);
    return status;
  });
  EK_RETURN_IF_ERROR(comm::FirstFailure(statuses));
  return plan;
}

}  // namespace evenkeel::tools
