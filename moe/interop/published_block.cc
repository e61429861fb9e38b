#include "evenkeel/moe/interop/published_block.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/builtin_orders.h"
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
    if (has_shared_expert()) {
      EK_ASSIGN_OR_RETURN(shared_, Allocate(device_, 1, hidden, published_.shared_ffn));
      EK_RETURN_IF_ERROR(ReadExpert(files, names, names.shared_prefix, 0, hidden, published_.shared_ffn, &shared_));
    }
    if (published_.gated_shared) {
      shared_gate_.resize(hidden);
      EK_RETURN_IF_ERROR(files.ReadMatrix(names.shared_gate, 1, hidden, false, shared_gate_.data()));
    }
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
    if (has_shared_expert()) EK_RETURN_IF_ERROR(AddShared(x, y, stream));
    return stream.Synchronize();
  }

 private:
  // y += shared(x), times sigmoid(x . gate) where there is a gate.
  absl::Status AddShared(ConstTensorView x, TensorView y, Stream& stream) {
    const int64_t tokens = x.shape().dim(0);
    ExpertShape shape;
    shape.local_experts = 1;
    shape.hidden = hidden();
    shape.ffn = published_.shared_ffn;
    shape.activation = ExpertActivation::kSwiGlu;
    EK_ASSIGN_OR_RETURN(const Tensor pre, Tensor::Create(device_, DType::kF32, Shape({tokens, shape.ffn})));
    EK_ASSIGN_OR_RETURN(const Tensor gate, Tensor::Create(device_, DType::kF32, Shape({tokens, shape.ffn})));
    EK_ASSIGN_OR_RETURN(const Tensor middle, Tensor::Create(device_, DType::kF32, Shape({tokens, shape.ffn})));
    EK_ASSIGN_OR_RETURN(const Tensor out, Tensor::Create(device_, DType::kF32, Shape({tokens, hidden()})));
    ExpertWork work;
    work.pre = pre.view();
    work.gate = gate.view();
    work.hidden = middle.view();
    const int64_t counts[] = {tokens};
    EK_RETURN_IF_ERROR(ExpertsForward(shape, shared_.weights(), x, counts, work, out.view(), stream));
    EK_RETURN_IF_ERROR(stream.Launch([this, tokens, x, y, &out] {
      for (int64_t t = 0; t < tokens; ++t)
        AddRow(x.data<float>() + t * hidden(), out.data<float>() + t * hidden(), y.data<float>() + t * hidden());
      return absl::OkStatus();
    }));
    return stream.Synchronize();  // before the temporaries go
  }

  void AddRow(const float* x, const float* shared, float* y) const {
    double factor = 1;
    if (published_.gated_shared) {
      double dot = 0;
      for (int64_t i = 0; i < hidden(); ++i) dot += static_cast<double>(x[i]) * shared_gate_[i];
      factor = 1 / (1 + std::exp(-dot));
    }
    for (int64_t i = 0; i < hidden(); ++i) y[i] += static_cast<float>(factor * shared[i]);
  }

  const PublishedConfig published_;
  Device* const device_;
  Tensor router_;
  std::vector<float> selection_bias_;
  ExpertMatrices experts_, shared_;
  std::vector<float> shared_gate_;
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
