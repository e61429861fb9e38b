#include "evenkeel/zero3/testing/on_ranks.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

absl::Status RunOne(const OnRanksConfig& config, const RankBody& body, comm::Backend& backend) {
  RankContext rank;
  rank.rank = backend.rank();
  EK_ASSIGN_OR_RETURN(rank.dp, backend.CreateGroup(comm::WorldGroup(backend.size())));
  rank.device = HostDevice::Create(config.device);
  EK_ASSIGN_OR_RETURN(rank.compute, rank.device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(rank.comm, rank.device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(config.description, config.leaves));
  PartitionedModelOptions options = config.options;
  if (config.adjust) config.adjust(rank.rank, options);
  EK_ASSIGN_OR_RETURN(rank.model,
                      PartitionedModel::Create(config.description.parameters, selection, options, {.dp = rank.dp.get()},
                                               rank.device.get(), rank.compute.get(), rank.comm.get()));
  return body(rank);
}

}  // namespace

std::vector<absl::Status> OnRanksStatuses(const OnRanksConfig& config, const RankBody& body) {
  absl::StatusOr<std::unique_ptr<comm::InProcessWorld>> world =
      comm::InProcessWorld::Create({.world_size = config.world_size});
  if (!world.ok()) return {world.status()};
  return comm::RunRanks(**world, [&](comm::Backend& backend) { return RunOne(config, body, backend); });
}

absl::Status OnRanks(const OnRanksConfig& config, const RankBody& body) {
  return comm::FirstFailure(OnRanksStatuses(config, body));
}

absl::Status Check(bool condition, absl::string_view what) {
  return condition ? absl::OkStatus() : absl::InternalError(what);
}

ParameterSpec PlainParameter(const std::string& name, int64_t elements, DType dtype) {
  ParameterSpec spec;
  spec.name = name;
  spec.dtype = dtype;
  spec.shape = Shape({elements});
  spec.initializer = Initializer::Normal(1.0);
  return spec;
}

ModelDescription SharedModel() {
  ModelDescription model;
  model.root.type = "Model";
  for (int i = 0; i < 3; ++i) model.parameters.push_back(PlainParameter(absl::StrCat("p", i), 9 + i));
  model.root.children.push_back({"a", "A", {0, 2}, {}, false});
  model.root.children.push_back({"b", "B", {1, 2}, {}, false});
  return model;
}

ModelDescription ChainModel(int leaves, int64_t elements, DType dtype) {
  ModelDescription model;
  model.root.type = "Model";
  for (int l = 0; l < leaves; ++l) {
    model.parameters.push_back(PlainParameter(absl::StrCat("w", l), elements, dtype));
    model.root.children.push_back({absl::StrCat("leaf", l), "Block", {l}, {}, false});
  }
  return model;
}

}  // namespace evenkeel::zero3
