// The parameters of the language model as a rank sees them: names, slices, initial values, leaves; and its layers'
// configuration.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/testing/language_model.h"
#include "evenkeel/testing/leaf_tensors.h"

namespace evenkeel::testutil {
namespace {

using zero3::Family;
using zero3::Initializer;
using zero3::ParameterSpec;

// Describes parameters one by one, as this rank sees them.
class Describer {
 public:
  Describer(const LanguageModelConfig& config, const comm::Mesh& mesh, int rank)
      : config_(config),
        lane_(mesh.Coordinate(comm::Axis::kTp, rank)),
        expert_rank_(mesh.Coordinate(comm::Axis::kEp, rank)),
        shape_(mesh.shape()) {}

  zero3::ModelDescription Describe() {
    zero3::ModuleNode& root = description_.root;
    root = {"", "LanguageModel", {}, {}, false};
    const int64_t h = config_.hidden;
    root.children.push_back({"embedding",
                             "Embedding",
                             {Dense("embedding.token", {config_.vocabulary, h}, -1, Initializer::Normal(0.5)),
                              Dense("embedding.position", {config_.sequence, h}, -1, Initializer::Normal(0.1))},
                             {},
                             false});
    for (int64_t l = 0; l < config_.layers; ++l) {
      const std::string layer = absl::StrCat("layer.", l);
      root.children.push_back({layer, "Layer", {}, {Attention(layer), Moe(layer)}, false});
    }
    root.children.push_back(
        {"head",
         "Head",
         {Dense("final.norm", {h}, -1, Initializer::Ones()), Dense("output", {h, config_.vocabulary}, -1, Weight(h))},
         {},
         false});
    return std::move(description_);
  }

 private:
  // Keeps a product's variance: 1 / sqrt(depth).
  static Initializer Weight(int64_t depth) { return Initializer::Normal(1 / std::sqrt(static_cast<double>(depth))); }

  zero3::ModuleNode Attention(const std::string& layer) {
    const std::string prefix = layer + ".attention.";
    const int64_t h = config_.hidden;
    return {"attention",
            "Attention",
            {Dense(prefix + "norm", {h}, -1, Initializer::Ones()), Dense(prefix + "wq", {h, h}, 1, Weight(h)),
             Dense(prefix + "wk", {h, h}, 1, Weight(h)), Dense(prefix + "wv", {h, h}, 1, Weight(h)),
             Dense(prefix + "wo", {h, h}, 0, Weight(h))},
            {},
            false};
  }

  zero3::ModuleNode Moe(const std::string& layer) {
    const std::string prefix = layer + ".moe.";
    const int64_t h = config_.hidden, e = config_.experts, f = config_.ffn;
    const bool gated = config_.activation == moe::ExpertActivation::kSwiGlu;
    std::vector<int> own = {Dense(prefix + "norm", {h}, -1, Initializer::Ones()),
                            Dense(prefix + "router", {e, h}, -1, Weight(h))};
    description_.parameters[own[1]].dtype = config_.wide_dtype();
    own.push_back(Expert(prefix + "w_in", {e, h, f}, 2, Weight(h)));
    own.push_back(Expert(prefix + "w_out", {e, f, h}, 1, Weight(f)));
    if (gated) own.push_back(Expert(prefix + "w_gate", {e, h, f}, 2, Weight(h)));
    if (config_.expert_bias) {
      own.push_back(Expert(prefix + "b_in", {e, f}, 1, Initializer::Normal(0.1)));
      own.push_back(Expert(prefix + "b_out", {e, h}, -1, Initializer::Normal(0.1)));
      if (gated) own.push_back(Expert(prefix + "b_gate", {e, f}, 1, Initializer::Normal(0.1)));
    }
    if (config_.has_branch()) AddBranch(prefix + "shared.", config_.branch(), &own);
    return {"moe", "MoeBlock", own, {}, false};
  }

  // The dense MLP beside the experts, split over TP as one expert would be.
  void AddBranch(const std::string& prefix, const moe::DenseBranchConfig& branch, std::vector<int>* own) {
    const int64_t h = branch.hidden, f = branch.ffn;
    const bool gated = branch.activation == moe::ExpertActivation::kSwiGlu;
    own->push_back(Dense(prefix + "w_in", {h, f}, 1, Weight(h)));
    own->push_back(Dense(prefix + "w_out", {f, h}, 0, Weight(f)));
    if (gated) own->push_back(Dense(prefix + "w_gate", {h, f}, 1, Weight(h)));
    if (branch.bias) {
      own->push_back(Dense(prefix + "b_in", {f}, 0, Initializer::Normal(0.1)));
      own->push_back(Dense(prefix + "b_out", {h}, -1, Initializer::Normal(0.1)));
      if (gated) own->push_back(Dense(prefix + "b_gate", {f}, 0, Initializer::Normal(0.1)));
    }
    if (branch.mix_rows() > 0) own->push_back(Dense(prefix + "mix", {branch.mix_rows(), h}, -1, Weight(h)));
    if (branch.mix == moe::BranchMix::kSoftmax) {
      own->push_back(Dense(prefix + "mix_bias", {branch.mix_rows()}, -1, Initializer::Normal(0.1)));
    }
  }

  // A dense parameter, split over TP along `split` (-1: replicated on all lanes).
  int Dense(const std::string& name, std::vector<int64_t> global, int split, Initializer initializer) {
    ParameterSpec spec = Spec(name, std::move(global), std::move(initializer));
    Split(split, shape_.tp, lane_, &spec);
    spec.tp_dim = split;
    spec.tp_replicated = split < 0;
    return Add(std::move(spec));
  }

  // A stack of experts along dimension 0, split over EP there and, with expert TP, over the lanes along `split`.
  int Expert(const std::string& name, std::vector<int64_t> global, int split, Initializer initializer) {
    ParameterSpec spec = Spec(name, std::move(global), std::move(initializer));
    spec.family = Family::kExpert;
    spec.expert_dim = 0;
    spec.tp_dim = split;
    Split(0, shape_.ep, expert_rank_, &spec);
    if (shape_.etp > 1) Split(split, shape_.etp, lane_, &spec);
    spec.tp_replicated = shape_.etp > 1 && split < 0;
    return Add(std::move(spec));
  }

  ParameterSpec Spec(const std::string& name, std::vector<int64_t> global, Initializer initializer) const {
    ParameterSpec spec;
    spec.name = name;
    spec.dtype = config_.dtype;
    spec.global_offset.assign(global.size(), 0);
    local_ = global;
    spec.global_shape = std::move(global);
    spec.initializer = std::move(initializer);
    return spec;
  }

  void Split(int dim, int parts, int part, ParameterSpec* spec) const {
    if (dim < 0) return;
    local_[dim] = spec->global_shape[dim] / parts;
    spec->global_offset[dim] = local_[dim] * part;
  }

  int Add(ParameterSpec spec) {
    spec.shape = *Shape::Create(local_);
    description_.parameters.push_back(std::move(spec));
    return static_cast<int>(description_.parameters.size()) - 1;
  }

  const LanguageModelConfig& config_;
  const int lane_;
  const int expert_rank_;
  const comm::MeshShape shape_;
  mutable std::vector<int64_t> local_;  // of the parameter being described
  zero3::ModelDescription description_;
};

}  // namespace

zero3::ModelDescription DescribeLanguageModel(const LanguageModelConfig& config, const comm::Mesh& mesh, int rank) {
  return Describer(config, mesh, rank).Describe();
}

moe::MoeConfig MoeConfigOf(const LanguageModelConfig& config) {
  moe::MoeConfig moe;
  moe.router.hidden = config.hidden;
  moe.router.experts = config.experts;
  moe.router.top_k = config.top_k;
  moe.router.drop = config.drop;
  moe.router.score = config.score;
  moe.router.route_scale = config.route_scale;
  moe.router.groups = config.groups;
  moe.router.groups_kept = config.groups_kept;
  moe.router.group_score = config.group_score;
  moe.router.capacity.factor = config.capacity_factor;
  if (config.capacity_factor.is_zero()) moe.router.capacity.mode = moe::CapacityMode::kNoDrop;
  moe.router.capacity.min_capacity = config.min_capacity;
  moe.ffn = config.ffn;
  moe.activation = config.activation;
  moe.bias = config.expert_bias;
  moe.dtype = config.dtype;
  moe.balance_coefficient = config.balance_coefficient;
  moe.z_coefficient = config.z_coefficient;
  moe.numerics = config.numerics;
  return moe;
}

zero3::LeafOptions LanguageModelLeaves() {
  zero3::LeafOptions options;
  options.rules = {zero3::LeafRule::Type("Attention"), zero3::LeafRule::Type("MoeBlock")};
  return options;
}

}  // namespace evenkeel::testutil
