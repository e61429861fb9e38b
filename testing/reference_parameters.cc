#include "evenkeel/testing/reference_parameters.h"

#include "absl/strings/str_cat.h"

namespace evenkeel::testutil {

using reference::Matrix;

std::string ReferenceLayerName(int64_t layer, absl::string_view rest) {
  return absl::StrCat("layer.", layer, ".", rest);
}

ReferenceBranchConfig ReferenceBranchOf(const ReferenceConfig& config) {
  return {config.branch, config.hidden, config.branch_ffn, config.swiglu, config.expert_bias};
}

absl::Status CheckReferenceConfig(const ReferenceConfig& config) {
  const ReferenceRouterConfig& router = config.router;
  if (config.vocabulary < 1 || config.sequence < 1 || config.hidden < 1 || config.heads < 1 || config.layers < 0 ||
      config.ffn < 1 || config.hidden % config.heads != 0 || router.top_k < 1 || router.top_k > router.experts ||
      router.capacity_numerator < 0 || router.capacity_denominator < 1 || router.capacity_multiple < 1 ||
      config.capacity_replicas < 1 || (config.branch != ReferenceMix::kNone && config.branch_ffn < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("reference model: bad sizes: vocabulary ", config.vocabulary, ", sequence ", config.sequence,
                     ", hidden ", config.hidden, ", heads ", config.heads, ", layers ", config.layers, ", ffn ",
                     config.ffn, ", experts ", router.experts, ", top_k ", router.top_k, ", capacity ",
                     router.capacity_numerator, "/", router.capacity_denominator, " in multiples of ",
                     router.capacity_multiple, ", branch ffn ", config.branch_ffn));
  }
  return absl::OkStatus();
}

ReferenceTensors ZeroReferenceTensors(const ReferenceConfig& config) {
  const int64_t h = config.hidden, e = config.router.experts, f = config.ffn;
  ReferenceTensors tensors;
  tensors["embedding.token"] = Matrix(config.vocabulary, h);
  tensors["embedding.position"] = Matrix(config.sequence, h);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    tensors[ReferenceLayerName(layer, "attention.norm")] = Matrix(1, h);
    for (const char* w : {"attention.wq", "attention.wk", "attention.wv", "attention.wo"}) {
      tensors[ReferenceLayerName(layer, w)] = Matrix(h, h);
    }
    tensors[ReferenceLayerName(layer, "moe.norm")] = Matrix(1, h);
    tensors[ReferenceLayerName(layer, "moe.router")] = Matrix(e, h);
    tensors[ReferenceLayerName(layer, "moe.w_in")] = Matrix(e * h, f);
    if (config.swiglu) tensors[ReferenceLayerName(layer, "moe.w_gate")] = Matrix(e * h, f);
    tensors[ReferenceLayerName(layer, "moe.w_out")] = Matrix(e * f, h);
    if (config.expert_bias) {
      tensors[ReferenceLayerName(layer, "moe.b_in")] = Matrix(e, f);
      if (config.swiglu) tensors[ReferenceLayerName(layer, "moe.b_gate")] = Matrix(e, f);
      tensors[ReferenceLayerName(layer, "moe.b_out")] = Matrix(e, h);
    }
    AddBranchTensors(ReferenceBranchOf(config), ReferenceLayerName(layer, "moe.shared."), &tensors);
  }
  tensors["final.norm"] = Matrix(1, h);
  tensors["output"] = Matrix(h, config.vocabulary);
  return tensors;
}

absl::Status CheckReferenceTensors(const ReferenceTensors& wanted, const ReferenceTensors& found) {
  for (const auto& [name, tensor] : wanted) {
    const auto it = found.find(name);
    if (it == found.end()) return absl::InvalidArgumentError(absl::StrCat("reference model: no parameter ", name));
    if (it->second.rows != tensor.rows || it->second.cols != tensor.cols) {
      return absl::InvalidArgumentError(absl::StrCat("reference model: ", name, " is [", it->second.rows, ", ",
                                                     it->second.cols, "], wanted [", tensor.rows, ", ", tensor.cols,
                                                     "]"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> ReferenceBoundaryNames(const ReferenceConfig& config) {
  std::vector<std::string> names = {"embedding"};
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    names.push_back(ReferenceLayerName(layer, "attention"));
    names.push_back(ReferenceLayerName(layer, "moe"));
  }
  return names;
}

}  // namespace evenkeel::testutil
