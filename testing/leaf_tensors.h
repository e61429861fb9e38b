// The parameters of the language model's leaves, picked out of what zero3 hands over: weights or gradients. Internal to
// the model.
#ifndef EVENKEEL_TESTING_LEAF_TENSORS_H_
#define EVENKEEL_TESTING_LEAF_TENSORS_H_

#include <cstddef>

#include "absl/types/span.h"
#include "evenkeel/moe/dense_branch.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::testutil {

// Places of the parameters in their leaves, as DescribeLanguageModel lists them.
enum EmbeddingPlace { kToken, kPosition };
enum AttentionPlace { kAttentionNorm, kWq, kWk, kWv, kWo };
enum MoePlace { kMoeNorm, kRouter, kFirstExpertTensor };
enum HeadPlace { kFinalNorm, kOutput };

// What the model's MoE layers are made with; the layer's name is to be set.
moe::MoeConfig MoeConfigOf(const LanguageModelConfig& config);

// The expert tensors of a leaf, in the order in which DescribeLanguageModel lists them.
template <typename View>
moe::ExpertTensors<View> ExpertViews(const LanguageModelConfig& config, absl::Span<const View> views) {
  const bool gated = config.activation == moe::ExpertActivation::kSwiGlu;
  moe::ExpertTensors<View> experts;
  int i = kFirstExpertTensor;
  experts.w_in = views[i++];
  experts.w_out = views[i++];
  if (gated) experts.w_gate = views[i++];
  if (config.expert_bias) {
    experts.b_in = views[i++];
    experts.b_out = views[i++];
    if (gated) experts.b_gate = views[i++];
  }
  return experts;
}

// The branch's tensors, which follow the experts'. An MLP is a stack of one expert.
template <typename View>
moe::DenseBranchTensors<View> BranchViews(const LanguageModelConfig& model, absl::Span<const View> views) {
  const moe::DenseBranchConfig config = model.branch();
  const bool gated = config.activation == moe::ExpertActivation::kSwiGlu;
  size_t i = kFirstExpertTensor + (gated ? 3 : 2) * (config.bias ? 2 : 1);
  const auto matrix = [&] {
    const View& view = views[i++];
    return view.Reshaped({1, view.shape().dim(0), view.shape().dim(1)});
  };
  const auto vector = [&] {
    const View& view = views[i++];
    return view.Reshaped({1, view.shape().dim(0)});
  };
  moe::DenseBranchTensors<View> branch;
  branch.mlp.w_in = matrix();
  branch.mlp.w_out = matrix();
  if (gated) branch.mlp.w_gate = matrix();
  if (config.bias) {
    branch.mlp.b_in = vector();
    branch.mlp.b_out = vector();
    if (gated) branch.mlp.b_gate = vector();
  }
  if (config.mix_rows() > 0) branch.mix = views[i++];
  if (config.mix == moe::BranchMix::kSoftmax) branch.mix_bias = views[i++];
  return branch;
}

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_TESTING_LEAF_TENSORS_H_
