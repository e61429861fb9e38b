// A stranger's program that links the zero3 component and no other: two ranks on
// threads shard a model of two leaves, fetch, add gradients and step, and must
// end with the same bits whichever way leaves are fetched.
//
//   bazel run //:zero3_only         exit status 0 when the bits are equal

#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "evenkeel/zero3/leaf_selection.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/partitioned_model.h"

namespace stranger {
namespace {

using evenkeel::zero3::LeafId;
using evenkeel::zero3::ModelDescription;
using evenkeel::zero3::ParameterSpec;
using evenkeel::zero3::PartitionedModel;

constexpr int kRanks = 2, kSteps = 3, kExperts = 5;

// A block of many small parameters, which is one leaf, and a head.
ModelDescription Describe() {
  ModelDescription model;
  model.root.name = "model";
  model.root.type = "Model";
  const auto add = [&](const std::string& name, const evenkeel::Shape& shape) {
    ParameterSpec spec;
    spec.name = name;
    spec.shape = shape;
    spec.initializer = evenkeel::zero3::Initializer::Normal(0.1);
    model.parameters.push_back(spec);
    return static_cast<int>(model.parameters.size()) - 1;
  };
  evenkeel::zero3::ModuleNode block, head;
  block.name = "block";
  block.type = "MoeBlock";
  for (int expert = 0; expert < kExperts; ++expert) {
    block.parameters.push_back(add("block.w" + std::to_string(expert), evenkeel::Shape({3, 7})));
  }
  head.name = "head";
  head.type = "Linear";
  head.parameters.push_back(add("head.w", evenkeel::Shape({11})));
  model.root.children = {block, head};
  return model;
}

// The digest of all weights of one rank after a few steps.
absl::StatusOr<uint64_t> Train(evenkeel::comm::Backend& rank, const std::string& policy) {
  auto device = evenkeel::HostDevice::Create();
  EK_ASSIGN_OR_RETURN(auto stream, device->CreateStream("compute"));
  evenkeel::comm::Group everyone = evenkeel::comm::WorldGroup(rank.size());
  everyone.axis = evenkeel::comm::Axis::kDp;
  EK_ASSIGN_OR_RETURN(auto dp, rank.CreateGroup(everyone));

  const ModelDescription description = Describe();
  evenkeel::zero3::LeafOptions leaves;
  leaves.rules.push_back(evenkeel::zero3::LeafRule::Type("MoeBlock"));
  EK_ASSIGN_OR_RETURN(auto selection, evenkeel::zero3::SelectLeaves(description, leaves));
  evenkeel::zero3::PartitionedModelOptions options;
  options.policy = policy;
  options.max_gradient_norm = 1.0;
  EK_ASSIGN_OR_RETURN(auto model, PartitionedModel::Create(description.parameters, selection, options,
                                                           {.dp = dp.get(), .edp = dp.get()}, device.get(),
                                                           stream.get(), stream.get()));
  for (int step = 0; step < kSteps; ++step) {
    for (int leaf = 0; leaf < model->num_leaves(); ++leaf) {
      const LeafId id{leaf};
      EK_ASSIGN_OR_RETURN(auto weights, model->Fetch(id));
      EK_ASSIGN_OR_RETURN(auto gradients, model->Gradients(id));
      for (int i = 0; i < weights.size(); ++i) {
        // The gradient of sum(w^2) / 2, seen through a scale of this rank's own.
        EK_ASSIGN_OR_RETURN(evenkeel::ConstTensorView weight, weights.Get(i));
        const float* w = weight.data<float>();
        float* g = gradients[i].data<float>();
        for (int64_t j = 0; j < weight.num_elements(); ++j) g[j] += (1.0f + 0.5f * rank.rank()) * w[j];
      }
      EK_RETURN_IF_ERROR(model->FlushGradients(id));
      EK_RETURN_IF_ERROR(model->Release(id));
    }
    EK_ASSIGN_OR_RETURN(evenkeel::zero3::StepResult result, model->Step());
    if (!result.stepped) return absl::InternalError("a finite step was skipped");
  }
  uint64_t digest = 0;
  for (size_t i = 0; i < description.parameters.size(); ++i) {
    EK_ASSIGN_OR_RETURN(evenkeel::Tensor whole,
                        evenkeel::Tensor::Create(device.get(), evenkeel::DType::kF32, description.parameters[i].shape));
    EK_RETURN_IF_ERROR(model->ReadTensor(static_cast<int>(i), evenkeel::zero3::TensorKind::kWeight, "", whole.view()));
    digest = evenkeel::CombineDigests(
        digest, evenkeel::Digest64(whole.data<float>(), static_cast<size_t>(whole.view().num_bytes())));
  }
  return digest;
}

absl::Status Run() {
  uint64_t expected = 0;
  for (const char* policy : {"replicated", "per_parameter", "coalesced", "flat"}) {
    evenkeel::comm::InProcessOptions options;
    options.world_size = kRanks;
    EK_ASSIGN_OR_RETURN(auto world, evenkeel::comm::InProcessWorld::Create(options));
    std::vector<uint64_t> digests(kRanks);
    EK_RETURN_IF_ERROR(evenkeel::comm::FirstFailure(
        evenkeel::comm::RunRanks(*world, [&](evenkeel::comm::Backend& rank) -> absl::Status {
          EK_ASSIGN_OR_RETURN(digests[rank.rank()], Train(rank, policy));
          return absl::OkStatus();
        })));
    if (expected == 0) expected = digests[0];
    for (int rank = 0; rank < kRanks; ++rank) {
      std::printf("%-13s rank %d: %016lx\n", policy, rank, digests[rank]);
      if (digests[rank] != expected) return absl::DataLossError("the bits differ");
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace stranger

int main() {
  const absl::Status status = stranger::Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
