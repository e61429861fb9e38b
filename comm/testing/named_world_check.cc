#include "evenkeel/comm/testing/named_world_check.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/backend_registry.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {

absl::Status CheckNamedWorld(absl::string_view name, int world_size) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<NamedWorld> world, CreateWorld(name, {.world_size = world_size}));
  const auto results = world->Run([name](Backend& backend) -> absl::Status {
    if (backend.name() != name) return absl::InternalError(absl::StrCat("the backend is called ", backend.name()));
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
    int64_t sum = backend.rank();
    const TensorView view(&sum, DType::kI64, Shape({1}));
    EK_RETURN_IF_ERROR(group->AllReduce(view, view, ReduceOp::kSum, *stream));
    if (sum != int64_t{backend.size()} * (backend.size() - 1) / 2) return absl::InternalError("wrong sum");
    return absl::OkStatus();
  });
  if (results.empty()) return absl::InternalError("no rank has run");
  for (const RankStatus& rank : results) EK_RETURN_IF_ERROR(rank.status);
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
