#include "evenkeel/moe/interop/published_block.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/dense_branch.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/interop/published_config.h"
#include "evenkeel/moe/interop/tensor_files.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

constexpr int64_t kMaxConfigBytes = 1 << 20;

// Experts of one width, in the layout of moe/experts.h.
struct ExpertMatrices {
  Tensor w_in, w_gate, w_out;

  ExpertWeights weights() const {
    ExpertWeights weights;
    weights.w_in = w_in.const_view();
    weights.w_gate = w_gate.const_view();
    weights.w_out = w_out.const_view();
    return weights;
  }
};

absl::StatusOr<ExpertMatrices> Allocate(Device* device, int64_t experts, int64_t hidden, int64_t ffn) {
  ExpertMatrices matrices;
  EK_ASSIGN_OR_RETURN(const Shape up, Shape::Create({experts, hidden, ffn}));
  EK_ASSIGN_OR_RETURN(const Shape down, Shape::Create({experts, ffn, hidden}));
  EK_ASSIGN_OR_RETURN(matrices.w_in, Tensor::Create(device, DType::kF32, up));
  EK_ASSIGN_OR_RETURN(matrices.w_gate, Tensor::Create(device, DType::kF32, up));
  EK_ASSIGN_OR_RETURN(matrices.w_out, Tensor::Create(device, DType::kF32, down));
  return matrices;
}

// Stored [out, in], computed with as [in, out]: each is transposed once, here.
absl::Status ReadExpert(const TensorFiles& files, const PublishedNames& names, const std::string& prefix, int64_t index,
                        int64_t hidden, int64_t ffn, ExpertMatrices* matrices) {
  const int64_t at = index * hidden * ffn;
  EK_RETURN_IF_ERROR(files.ReadMatrix(prefix + names.gate, ffn, hidden, true, matrices->w_gate.data<float>() + at));
  EK_RETURN_IF_ERROR(files.ReadMatrix(prefix + names.up, ffn, hidden, true, matrices->w_in.data<float>() + at));
  return files.ReadMatrix(prefix + names.down, hidden, ffn, true, matrices->w_out.data<float>() + at);
}

class Block final : public PublishedBlock {
 public:
  Block(PublishedConfig config, Device* device) : published_(std::move(config)), device_(device) {}

  absl::Status Read(const TensorFiles& files, const PublishedBlockOptions& options) {
    const PublishedNames names = NamesOf(published_, options.layer);
    const int64_t experts = published_.router.experts, hidden = published_.router.hidden;
    EK_ASSIGN_OR_RETURN(router_, Tensor::Create(device_, DType::kF32, Shape({experts, hidden})));
    EK_RETURN_IF_ERROR(files.ReadMatrix(names.router, experts, hidden, false, router_.data<float>()));
    if (files.Find(names.selection_bias) != nullptr) {
      selection_bias_.resize(experts);
      EK_RETURN_IF_ERROR(files.ReadMatrix(names.selection_bias, 1, experts, false, selection_bias_.data()));
    }
    EK_ASSIGN_OR_RETURN(experts_, Allocate(device_, experts, hidden, published_.ffn));
    for (int64_t i = 0; i < experts; ++i) {
      EK_RETURN_IF_ERROR(
          ReadExpert(files, names, absl::StrCat(names.expert_prefix, i, "."), i, hidden, published_.ffn, &experts_));
    }
    if (has_shared_expert()) EK_RETURN_IF_ERROR(ReadShared(files, names));
    MoeConfig config;
    config.router = published_.router;
    config.router.layer = absl::StrCat("model.layers.", options.layer);
    config.ffn = published_.ffn;
    config.activation = ExpertActivation::kSwiGlu;
    EK_ASSIGN_OR_RETURN(const Order order, FindOrder(options.order));
    EK_ASSIGN_OR_RETURN(layer_, MoeLayer::Create(config, order, {}, device_));
    return absl::OkStatus();
  }

  int64_t hidden() const override { return published_.router.hidden; }
  const std::string& family() const override { return published_.family; }
  const MoeConfig& config() const override { return layer_->config(); }
  bool has_shared_expert() const override { return published_.shared_ffn > 0; }
  const RoutingDecision& decision() const override { return tape_.decision(); }

  absl::Status Forward(ConstTensorView x, TensorView y, Stream& stream) override {
    MoeWeights weights;
    weights.router = router_.const_view();
    weights.experts = experts_.weights();
    MoeCall call;
    call.step.training = false;
    call.selection_bias = selection_bias_.empty() ? nullptr : selection_bias_.data();
    EK_RETURN_IF_ERROR(layer_->Forward(weights, x, y, call, &tape_, stream));
    if (branch_ == nullptr) return stream.Synchronize();
    DenseBranchWeights shared;
    shared.mlp = shared_.weights();
    if (published_.gated_shared) shared.mix = shared_gate_.const_view();
    DenseBranchTape branch_tape;
    EK_RETURN_IF_ERROR(branch_->Forward(shared, x, y, y, &branch_tape, stream));
    return stream.Synchronize();  // before the tape goes
  }

 private:
  absl::Status ReadShared(const TensorFiles& files, const PublishedNames& names) {
    DenseBranchConfig config;
    config.hidden = hidden();
    config.ffn = published_.shared_ffn;
    config.activation = ExpertActivation::kSwiGlu;
    config.mix = published_.gated_shared ? BranchMix::kSigmoid : BranchMix::kAdd;
    EK_ASSIGN_OR_RETURN(branch_, DenseBranch::Create(config, nullptr, device_));
    EK_ASSIGN_OR_RETURN(shared_, Allocate(device_, 1, hidden(), config.ffn));
    EK_RETURN_IF_ERROR(ReadExpert(files, names, names.shared_prefix, 0, hidden(), config.ffn, &shared_));
    if (!published_.gated_shared) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(shared_gate_, Tensor::Create(device_, DType::kF32, Shape({1, hidden()})));
    return files.ReadMatrix(names.shared_gate, 1, hidden(), false, shared_gate_.data<float>());
  }

  const PublishedConfig published_;
  Device* const device_;
  Tensor router_;
  std::vector<float> selection_bias_;
  ExpertMatrices experts_, shared_;
  Tensor shared_gate_;
  std::unique_ptr<DenseBranch> branch_;  // null without a shared expert
  std::unique_ptr<MoeLayer> layer_;
  MoeTape tape_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PublishedBlock>> PublishedBlock::Load(FileSystem* fs, const std::string& folder,
                                                                     const PublishedBlockOptions& options,
                                                                     Device* device) {
  EK_ASSIGN_OR_RETURN(const std::string json, ReadFile(*fs, absl::StrCat(folder, "/config.json"), kMaxConfigBytes));
  EK_ASSIGN_OR_RETURN(PublishedConfig config, ParsePublishedConfig(json, options.family));
  EK_ASSIGN_OR_RETURN(const TensorFiles files, TensorFiles::Open(fs, folder));
  auto block = std::make_unique<Block>(std::move(config), device);
  EK_RETURN_IF_ERROR(block->Read(files, options));
  return block;
}

}  // namespace evenkeel::moe
