// Direct calls on the facade, on every rank of a small world: for tests that toy_training.h is too tidy for.
//
//   OnRanksConfig config;
//   config.description = ...;
//   EXPECT_OK(OnRanks(config, [](RankContext& rank) -> absl::Status {
//     EK_RETURN_IF_ERROR(rank.model->Fetch({0}).status());
//     return Check(rank.model->counts().gathers == 1, "one gather");
//   }));
#ifndef EVENKEEL_ZERO3_TESTING_ON_RANKS_H_
#define EVENKEEL_ZERO3_TESTING_ON_RANKS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace evenkeel::zero3 {

struct OnRanksConfig {
  int world_size = 2;
  ModelDescription description;
  LeafOptions leaves;  // default: every module is a leaf
  PartitionedModelOptions options;
  HostDevice::Options device = {.poison = true};
  // Options of one rank where it shall differ.
  std::function<void(int rank, PartitionedModelOptions& options)> adjust;
};

// What a rank has; dp is the whole world, every other group is of one.
struct RankContext {
  int rank = 0;
  std::unique_ptr<comm::Communicator> dp;
  std::unique_ptr<HostDevice> device;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<Stream> comm;
  std::unique_ptr<PartitionedModel> model;
};

using RankBody = std::function<absl::Status(RankContext& rank)>;

// Every rank's status; threads in process.
std::vector<absl::Status> OnRanksStatuses(const OnRanksConfig& config, const RankBody& body);
// The first error of any rank.
absl::Status OnRanks(const OnRanksConfig& config, const RankBody& body);

// Internal with `what` when the condition does not hold: rank threads return, only the main thread asserts.
absl::Status Check(bool condition, absl::string_view what);

// A parameter [elements] called `name`, normal(1).
ParameterSpec PlainParameter(const std::string& name, int64_t elements, DType dtype = DType::kF32);

// Two leaves "a" and "b" of p0 [9] and p1 [10], which share p2 [11].
ModelDescription SharedModel();
// Leaves "leaf0".. of one parameter "w0".. each.
ModelDescription ChainModel(int leaves, int64_t elements, DType dtype = DType::kF32);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_TESTING_ON_RANKS_H_
