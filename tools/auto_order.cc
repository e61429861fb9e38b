#include "evenkeel/tools/auto_order.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/runtime/base/clock.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::tools {
namespace {

// Orders that a model with replicated tokens can run.
absl::StatusOr<std::vector<std::string>> Choices() {
  std::vector<std::string> names;
  for (const std::string& name : moe::OrderNames()) {
    EK_ASSIGN_OR_RETURN(const moe::Order order, moe::FindOrder(name));
    if (order.input.placement == moe::Placement::kInvariant && order.output.placement == moe::Placement::kInvariant) {
      names.push_back(name);
    }
  }
  return names;
}

}  // namespace

absl::StatusOr<moe::OrderPlan> PlanOnBackend(const comm::Mesh& mesh, const moe::OrderSizes& sizes,
                                             comm::Backend& backend) {
  const std::unique_ptr<HostDevice> device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, device->CreateStream("calibration"));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> tp,
                      backend.CreateGroup(mesh.GroupOf(comm::Axis::kTp, backend.rank())));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> ep,
                      backend.CreateGroup(mesh.GroupOf(comm::Axis::kEp, backend.rank())));
  EK_ASSIGN_OR_RETURN(const moe::CostModel model,
                      moe::CalibrateCostModel(tp.get(), ep.get(), device.get(), Clock::Real(), *stream));
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, Choices());
  return moe::PlanOrder(names, moe::ExpertLayout::kTensorParallel, sizes, model);
}

absl::StatusOr<moe::OrderPlan> PlanOnThreads(const comm::Mesh& mesh, const moe::OrderSizes& sizes) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<comm::InProcessWorld> world,
                      comm::InProcessWorld::Create({.world_size = mesh.world_size()}));
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
