#include "evenkeel/testing/language_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/dense_branch.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/norm.h"
#include "evenkeel/runtime/ops/rows.h"
#include "evenkeel/runtime/ops/softmax.h"
#include "evenkeel/testing/attention_block.h"
#include "evenkeel/testing/leaf_tensors.h"

namespace evenkeel::testutil {
namespace {

using zero3::ParameterSpec;

// What a layer's forward leaves for its backward.
struct LayerTape {
  AttentionTape attention;
  Tensor moe_normed, moe_inverse_rms;
  moe::MoeTape moe;
  moe::DenseBranchTape branch;
};

class RankModel final : public LanguageModel {
 public:
  RankModel(const LanguageModelConfig& config, const LanguageModelGroups& groups, zero3::PartitionedModel* parameters,
            Device* device, Stream* stream)
      : config_(config),
        attention_tp_(groups.attention_tp != nullptr && groups.attention_tp->size() > 1 ? groups.attention_tp
                                                                                        : nullptr),
        parameters_(*parameters),
        device_(device),
        stream_(*stream) {}

  absl::Status Prepare(const moe::Order& order, const LanguageModelGroups& groups) {
    EK_ASSIGN_OR_RETURN(attention_, AttentionBlock::Create(config_, attention_tp_, device_, &stream_));
    EK_RETURN_IF_ERROR(CreateMoeLayers(order, groups.moe));
    EK_RETURN_IF_ERROR(FindLeaves());
    return Allocate();
  }

  absl::StatusOr<ModelPass> ForwardBackward(const CorpusBatch& batch, const moe::RouterStep& step,
                                            const TapFunction& tap) override {
    tap_ = &tap;
    step_ = step;
    pass_ = {};
    EK_RETURN_IF_ERROR(TakeBatch(batch));
    EK_RETURN_IF_ERROR(EmbeddingForward());
    for (int64_t l = 0; l < config_.layers; ++l) {
      EK_RETURN_IF_ERROR(AttentionForward(l));
      EK_RETURN_IF_ERROR(MoeForward(l));
    }
    EK_RETURN_IF_ERROR(Head());
    for (int64_t l = config_.layers - 1; l >= 0; --l) {
      EK_RETURN_IF_ERROR(MoeBackward(l));
      EK_RETURN_IF_ERROR(AttentionBackward(l));
    }
    EK_RETURN_IF_ERROR(EmbeddingBackward());
    EK_RETURN_IF_ERROR(stream_.Synchronize());
    return pass_;
  }

 private:
  int64_t rows() const { return config_.tokens(); }
  DType dtype() const { return config_.dtype; }
  LayerTape& tape(int64_t layer) { return tapes_[config_.recompute ? 0 : layer]; }
  const Tensor& boundary(int64_t i) const { return boundaries_[i]; }

  absl::Status CreateMoeLayers(const moe::Order& order, const moe::MoeGroups& groups) {
    moe::MoeConfig moe = MoeConfigOf(config_);
    for (int64_t l = 0; l < config_.layers; ++l) {
      moe.router.layer = absl::StrCat("layer.", l, ".moe");
      EK_ASSIGN_OR_RETURN(std::unique_ptr<moe::MoeLayer> layer, moe::MoeLayer::Create(moe, order, groups, device_));
      moe_layers_.push_back(std::move(layer));
    }
    if (!config_.has_branch()) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(branch_, moe::DenseBranch::Create(config_.branch(), attention_tp_, device_));
    return absl::OkStatus();
  }

  absl::Status FindLeaves() {
    EK_ASSIGN_OR_RETURN(embedding_leaf_, parameters_.FindLeaf("embedding"));
    EK_ASSIGN_OR_RETURN(head_leaf_, parameters_.FindLeaf("head"));
    for (int64_t l = 0; l < config_.layers; ++l) {
      EK_ASSIGN_OR_RETURN(const zero3::LeafId attention, parameters_.FindLeaf(absl::StrCat("layer.", l, ".attention")));
      EK_ASSIGN_OR_RETURN(const zero3::LeafId moe, parameters_.FindLeaf(absl::StrCat("layer.", l, ".moe")));
      attention_leaves_.push_back(attention);
      moe_leaves_.push_back(moe);
    }
    return absl::OkStatus();
  }

  absl::Status Make(Tensor* tensor, DType type, const Shape& shape) {
    EK_ASSIGN_OR_RETURN(*tensor, Tensor::Create(device_, type, shape));
    return absl::OkStatus();
  }

  absl::Status Allocate() {
    const int64_t s = rows(), h = config_.hidden;
    boundaries_.resize(1 + 2 * config_.layers);
    for (Tensor& boundary : boundaries_) EK_RETURN_IF_ERROR(Make(&boundary, dtype(), {s, h}));
    for (Tensor* wide : {&dx_, &scratch_, &dnormed_}) EK_RETURN_IF_ERROR(Make(wide, dtype(), {s, h}));
    for (Tensor* wide : {&dmoe_, &dbranch_}) {
      if (branch_ != nullptr) EK_RETURN_IF_ERROR(Make(wide, dtype(), {s, h}));
    }
    EK_RETURN_IF_ERROR(Make(&logits_, dtype(), {s, config_.vocabulary}));
    EK_RETURN_IF_ERROR(Make(&head_inverse_rms_, config_.wide_dtype(), {s}));
    EK_RETURN_IF_ERROR(Make(&loss_, DType::kF64, {1}));
    for (Tensor* ids : {&inputs_, &targets_, &positions_}) EK_RETURN_IF_ERROR(Make(ids, DType::kI32, {s}));
    for (int64_t t = 0; t < s; ++t) positions_.data<int32_t>()[t] = static_cast<int32_t>(t % config_.sequence);
    tapes_.resize(config_.recompute ? 1 : config_.layers);
    for (LayerTape& tape : tapes_) {
      EK_RETURN_IF_ERROR(attention_->AllocateTape(&tape.attention));
      EK_RETURN_IF_ERROR(Make(&tape.moe_normed, dtype(), {s, h}));
      EK_RETURN_IF_ERROR(Make(&tape.moe_inverse_rms, config_.wide_dtype(), {s}));
    }
    return absl::OkStatus();
  }

  absl::Status TakeBatch(const CorpusBatch& batch) {
    if (static_cast<int64_t>(batch.inputs.size()) != rows() || batch.targets.size() != batch.inputs.size()) {
      return absl::InvalidArgumentError(absl::StrCat("language model: a batch of ", batch.inputs.size(), " inputs and ",
                                                     batch.targets.size(), " targets, wanted ", rows()));
    }
    std::copy(batch.inputs.begin(), batch.inputs.end(), inputs_.data<int32_t>());
    std::copy(batch.targets.begin(), batch.targets.end(), targets_.data<int32_t>());
    return absl::OkStatus();
  }

  // Shows a finished value to the tap.
  absl::Status Show(TapKind kind, absl::string_view name, ConstTensorView value) {
    if (!*tap_) return absl::OkStatus();
    EK_RETURN_IF_ERROR(stream_.Synchronize());
    (*tap_)({kind, name, value, kind == TapKind::kParameter ? 0 : static_cast<int64_t>(step_.source)});
    return absl::OkStatus();
  }

  std::string BoundaryName(int64_t i) const {
    if (i == 0) return "embedding";
    return absl::StrCat("layer.", (i - 1) / 2, i % 2 == 1 ? ".attention" : ".moe");
  }
  absl::Status ShowActivation(int64_t i) {
    return Show(TapKind::kActivation, BoundaryName(i), boundary(i).const_view());
  }
  absl::Status ShowActivationGradient(int64_t i) {
    return Show(TapKind::kActivationGradient, BoundaryName(i), dx_.const_view());
  }

  // Fetches a leaf's weights; the first time in a step its parameters are shown.
  absl::StatusOr<zero3::LeafWeights> Fetch(zero3::LeafId leaf, bool show) {
    EK_ASSIGN_OR_RETURN(zero3::LeafWeights weights, parameters_.Fetch(leaf));
    for (int i = 0; show && *tap_ && i < weights.size(); ++i) {
      const ParameterSpec& spec = parameters_.parameters()[parameters_.leaf(leaf).parameters[i]];
      EK_RETURN_IF_ERROR(Show(TapKind::kParameter, spec.name, weights.views()[i]));
    }
    return weights;
  }

  absl::Status EmbeddingForward() {
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(embedding_leaf_, /*show=*/true));
    const TensorView x = boundary(0).view();
    EK_RETURN_IF_ERROR(evenkeel::EmbeddingForward(weights.views()[kToken], inputs_.const_view(), x, stream_));
    EK_RETURN_IF_ERROR(
        evenkeel::EmbeddingForward(weights.views()[kPosition], positions_.const_view(), scratch_.view(), stream_));
    EK_RETURN_IF_ERROR(Add(x, scratch_.const_view(), x, stream_));
    EK_RETURN_IF_ERROR(parameters_.Release(embedding_leaf_));
    return ShowActivation(0);
  }

  absl::Status EmbeddingBackward() {
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> gradients, parameters_.Gradients(embedding_leaf_));
    EK_RETURN_IF_ERROR(evenkeel::EmbeddingBackward(inputs_.const_view(), dx_.const_view(), gradients[kToken], stream_));
    EK_RETURN_IF_ERROR(
        evenkeel::EmbeddingBackward(positions_.const_view(), dx_.const_view(), gradients[kPosition], stream_));
    return parameters_.FlushGradients(embedding_leaf_);
  }

  absl::Status AttentionForward(int64_t layer) {
    const zero3::LeafId leaf = attention_leaves_[layer];
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(leaf, /*show=*/true));
    const ConstTensorView x = boundary(2 * layer).const_view();
    EK_RETURN_IF_ERROR(attention_->Inner(x, weights.views(), &tape(layer).attention));
    EK_RETURN_IF_ERROR(attention_->Project(tape(layer).attention, weights.views()));
    EK_RETURN_IF_ERROR(parameters_.Release(leaf));
    EK_RETURN_IF_ERROR(attention_->AddOutput(x, boundary(2 * layer + 1).view()));
    return ShowActivation(2 * layer + 1);
  }

  // dx_ += the norm's input gradient for dnormed_.
  absl::Status NormBackward(ConstTensorView x, ConstTensorView weight, const Tensor& inverse_rms, TensorView dweight) {
    EK_RETURN_IF_ERROR(
        RmsNormBackward(x, weight, inverse_rms.const_view(), dnormed_.const_view(), scratch_.view(), dweight, stream_));
    return Add(dx_.const_view(), scratch_.const_view(), dx_.view(), stream_);
  }

  absl::Status AttentionBackward(int64_t layer) {
    const zero3::LeafId leaf = attention_leaves_[layer];
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(leaf, /*show=*/false));
    const absl::Span<const ConstTensorView> w = weights.views();
    AttentionTape& t = tape(layer).attention;
    const ConstTensorView x = boundary(2 * layer).const_view();
    if (config_.recompute) EK_RETURN_IF_ERROR(attention_->Inner(x, w, &t));
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> gradients, parameters_.Gradients(leaf));
    EK_RETURN_IF_ERROR(attention_->Backward(t, w, dx_.const_view(), gradients, dnormed_.view()));
    EK_RETURN_IF_ERROR(NormBackward(x, w[kAttentionNorm], t.inverse_rms, gradients[kAttentionNorm]));
    EK_RETURN_IF_ERROR(parameters_.FlushGradients(leaf));
    EK_RETURN_IF_ERROR(parameters_.Release(leaf));
    return ShowActivationGradient(2 * layer);
  }

  // Norm and experts into scratch_; `replay` when it is done again for the backward.
  absl::Status MoeInner(int64_t layer, absl::Span<const ConstTensorView> w, const moe::RoutingDecision* replay) {
    LayerTape& t = tape(layer);
    EK_RETURN_IF_ERROR(RmsNormForward(boundary(2 * layer + 1).const_view(), w[kMoeNorm], config_.norm_epsilon,
                                      t.moe_normed.view(), t.moe_inverse_rms.view(), stream_));
    moe::MoeCall call;
    call.step = step_;
    call.replay = replay;
    EK_RETURN_IF_ERROR(moe_layers_[layer]->Forward({w[kRouter], ExpertViews(config_, w)}, t.moe_normed.const_view(),
                                                   scratch_.view(), call, &t.moe, stream_));
    if (branch_ == nullptr) return absl::OkStatus();
    return branch_->Forward(BranchViews(config_, w), t.moe_normed.const_view(), scratch_.const_view(), scratch_.view(),
                            &t.branch, stream_);
  }

  // dnormed_ = what passes from dx_ through experts and branch; adds their gradients.
  absl::Status MoeInnerBackward(int64_t layer, absl::Span<const ConstTensorView> w,
                                absl::Span<const TensorView> gradients) {
    LayerTape& t = tape(layer);
    ConstTensorView dy = dx_.const_view();
    if (branch_ != nullptr) {
      EK_RETURN_IF_ERROR(branch_->Backward(BranchViews(config_, w), t.branch, t.moe_normed.const_view(), dy,
                                           dmoe_.view(), dbranch_.view(), BranchViews(config_, gradients), stream_));
      dy = dmoe_.const_view();
    }
    EK_RETURN_IF_ERROR(moe_layers_[layer]->Backward({w[kRouter], ExpertViews(config_, w)}, t.moe, dy, dnormed_.view(),
                                                    {gradients[kRouter], ExpertViews(config_, gradients)}, stream_,
                                                    static_cast<float>(parameters_.loss_scale())));
    if (branch_ == nullptr) return absl::OkStatus();
    return Add(dnormed_.const_view(), dbranch_.const_view(), dnormed_.view(), stream_);
  }

  absl::Status MoeForward(int64_t layer) {
    const zero3::LeafId leaf = moe_leaves_[layer];
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(leaf, /*show=*/true));
    EK_RETURN_IF_ERROR(MoeInner(layer, weights.views(), nullptr));
    EK_RETURN_IF_ERROR(parameters_.Release(leaf));
    pass_.routing.push_back(tape(layer).moe.decision());
    CountTraffic(tape(layer).moe.forward_traffic());
    EK_RETURN_IF_ERROR(
        Add(boundary(2 * layer + 1).const_view(), scratch_.const_view(), boundary(2 * layer + 2).view(), stream_));
    return ShowActivation(2 * layer + 2);
  }

  void CountTraffic(const moe::OrderTraffic& traffic) {
    pass_.predicted_ep_bytes += traffic.ep.bytes;
    pass_.predicted_ep_inter_node_bytes += traffic.ep.inter_node_bytes;
    pass_.predicted_tp_bytes += traffic.tp.bytes;
  }

  absl::Status MoeBackward(int64_t layer) {
    const zero3::LeafId leaf = moe_leaves_[layer];
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(leaf, /*show=*/false));
    const absl::Span<const ConstTensorView> w = weights.views();
    LayerTape& t = tape(layer);
    if (config_.recompute) {
      EK_RETURN_IF_ERROR(MoeInner(layer, w, &pass_.routing[layer]));
      CountTraffic(t.moe.forward_traffic());
    }
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> gradients, parameters_.Gradients(leaf));
    CountTraffic(t.moe.backward_traffic());
    EK_RETURN_IF_ERROR(MoeInnerBackward(layer, w, gradients));
    EK_RETURN_IF_ERROR(
        NormBackward(boundary(2 * layer + 1).const_view(), w[kMoeNorm], t.moe_inverse_rms, gradients[kMoeNorm]));
    EK_RETURN_IF_ERROR(parameters_.FlushGradients(leaf));
    EK_RETURN_IF_ERROR(parameters_.Release(leaf));
    return ShowActivationGradient(2 * layer + 1);
  }

  // Final norm, logits and loss, and at once their backward: the leaf is fetched once.
  absl::Status Head() {
    EK_ASSIGN_OR_RETURN(const zero3::LeafWeights weights, Fetch(head_leaf_, /*show=*/true));
    const absl::Span<const ConstTensorView> w = weights.views();
    const ConstTensorView x = boundaries_.back().const_view();
    EK_RETURN_IF_ERROR(
        RmsNormForward(x, w[kFinalNorm], config_.norm_epsilon, scratch_.view(), head_inverse_rms_.view(), stream_));
    EK_RETURN_IF_ERROR(Gemm(false, false, 1, scratch_.const_view(), w[kOutput], 0, logits_.view(), stream_));
    const double n = static_cast<double>(rows());
    EK_RETURN_IF_ERROR(
        CrossEntropyForward(logits_.const_view(), targets_.const_view(), n, logits_.view(), loss_.view(), stream_));
    EK_RETURN_IF_ERROR(TakeLoss());
    // From here on everything is times the loss scale (1 but for f16), a power of two.
    EK_RETURN_IF_ERROR(CrossEntropyBackward(logits_.const_view(), targets_.const_view(), n / parameters_.loss_scale(),
                                            logits_.view(), stream_));
    EK_ASSIGN_OR_RETURN(const absl::Span<const TensorView> gradients, parameters_.Gradients(head_leaf_));
    EK_RETURN_IF_ERROR(
        GemmWeightGradient(scratch_.const_view(), logits_.const_view(), {}, gradients[kOutput], stream_));
    EK_RETURN_IF_ERROR(Gemm(false, true, 1, logits_.const_view(), w[kOutput], 0, dnormed_.view(), stream_));
    EK_RETURN_IF_ERROR(RmsNormBackward(x, w[kFinalNorm], head_inverse_rms_.const_view(), dnormed_.const_view(),
                                       dx_.view(), gradients[kFinalNorm], stream_));
    EK_RETURN_IF_ERROR(parameters_.FlushGradients(head_leaf_));
    EK_RETURN_IF_ERROR(parameters_.Release(head_leaf_));
    return ShowActivationGradient(2 * config_.layers);
  }

  absl::Status TakeLoss() {
    EK_RETURN_IF_ERROR(stream_.Synchronize());
    pass_.cross_entropy = loss_.data<double>()[0];
    pass_.loss = pass_.cross_entropy;
    for (const moe::RoutingDecision& decision : pass_.routing) {
      pass_.loss += static_cast<double>(config_.balance_coefficient) * decision.balance_loss;
      pass_.loss += static_cast<double>(config_.z_coefficient) * decision.z_loss;
    }
    return Show(TapKind::kLoss, "", ConstTensorView(&pass_.loss, DType::kF64, {1}));
  }

  const LanguageModelConfig config_;
  comm::Communicator* const attention_tp_;
  zero3::PartitionedModel& parameters_;
  Device* const device_;
  Stream& stream_;
  std::unique_ptr<AttentionBlock> attention_;  // serves all layers
  std::vector<std::unique_ptr<moe::MoeLayer>> moe_layers_;
  std::unique_ptr<moe::DenseBranch> branch_;  // serves all layers; null: none
  zero3::LeafId embedding_leaf_, head_leaf_;
  std::vector<zero3::LeafId> attention_leaves_, moe_leaves_;

  std::vector<Tensor> boundaries_;  // activations of the residual stream
  std::vector<LayerTape> tapes_;
  Tensor dx_;  // gradient of the residual stream
  Tensor scratch_, dnormed_;
  Tensor dmoe_, dbranch_;  // with a branch: gradients of the experts' output and of the branch's input
  Tensor logits_, head_inverse_rms_, loss_, inputs_, targets_, positions_;

  // Of the running pass.
  const TapFunction* tap_ = nullptr;
  moe::RouterStep step_;
  ModelPass pass_;
};

}  // namespace

absl::string_view TapKindName(TapKind kind) {
  switch (kind) {
    case TapKind::kParameter:
      return "parameter";
    case TapKind::kActivation:
      return "activation";
    case TapKind::kLoss:
      return "loss";
    case TapKind::kActivationGradient:
      return "activation gradient";
    case TapKind::kGradient:
      return "gradient";
  }
  return "value";
}

absl::StatusOr<std::unique_ptr<LanguageModel>> LanguageModel::Create(const LanguageModelConfig& config,
                                                                     const moe::Order& order,
                                                                     const LanguageModelGroups& groups,
                                                                     zero3::PartitionedModel* parameters,
                                                                     Device* device, Stream* stream) {
  auto model = std::make_unique<RankModel>(config, groups, parameters, device, stream);
  EK_RETURN_IF_ERROR(model->Prepare(order, groups));
  return std::unique_ptr<LanguageModel>(std::move(model));
}

}  // namespace evenkeel::testutil
