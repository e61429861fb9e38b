#include "evenkeel/moe/gate_router.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/expert_choice.h"
#include "evenkeel/moe/gate_kernels.h"
#include "evenkeel/moe/router_agreement.h"
#include "evenkeel/moe/slot_assignment.h"
#include "evenkeel/moe/token_choice.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {
namespace {

bool IsFloatMatrix(const ConstTensorView& view, int64_t rows, int64_t columns) {
  const bool dtype = IsFloating(view.dtype());
  return dtype && view.shape().rank() == 2 && view.shape().dim(0) == rows && view.shape().dim(1) == columns;
}

std::string Describe(const ConstTensorView& view) {
  return absl::StrCat(DTypeName(view.dtype()), view.shape().ToString());
}

class GateRouter final : public Router {
 public:
  GateRouter(const RouterConfig& config, const RouterGroups& groups, Device* device)
      : config_(config), groups_(groups), device_(device) {}

  const RouterConfig& config() const override { return config_; }
  absl::StatusOr<RoutingDecision> Route(const RouterInput& input, const RouterStep& step, Stream& stream) override;
  absl::Status Backward(const RouterInput& input, const RouterStep& step, const RoutingDecision& decision,
                        ConstTensorView dweight, const RouterLossGradients& losses, TensorView dx, TensorView dgate,
                        Stream& stream) override;

 private:
  bool expert_choice() const { return config_.kind == kExpertChoice; }
  absl::Status Bad(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("router of layer \"", config_.layer, "\": ", what));
  }
  Jitter JitterOf(const RouterStep& step) const {
    return {step.training ? config_.jitter : 0.0f, PhiloxStream(RouterKey(config_, step, "jitter"))};
  }
  CapacityInput LocalNumbers(const RoutingDecision& decision) const;
  absl::Status CheckInput(const RouterInput& input) const;
  absl::Status CheckReplay(const RouterInput& input) const;
  // Everything before the ranks talk: logits, scores, chosen experts.
  absl::Status Choose(const RouterInput& input, const RouterStep& step, Stream& stream,
                      RoutingDecision* decision) const;
  // Agrees on the capacity and gives out slots; takes part in the agreement whatever `local` says.
  absl::Status PlaceRoutes(const absl::Status& local, const RouterStep& step, Stream& stream,
                           RoutingDecision* decision) const;

  const RouterConfig config_;
  const RouterGroups groups_;
  Device* const device_;
};

CapacityInput GateRouter::LocalNumbers(const RoutingDecision& decision) const {
  int64_t fullest = 0;
  for (const int64_t count : decision.assigned) fullest = std::max(fullest, count);
  return {
      .tokens = decision.active_tokens, .experts = config_.experts, .top_k = config_.top_k, .fullest_expert = fullest};
}

absl::Status GateRouter::CheckInput(const RouterInput& input) const {
  const int64_t tokens = input.x.shape().rank() == 2 ? input.x.shape().dim(0) : 0;
  if (!IsFloatMatrix(input.x, tokens, config_.hidden)) {
    return Bad(absl::StrCat("x must be f32, bf16, f16 or f64 [tokens, ", config_.hidden, "], got ", Describe(input.x)));
  }
  if (!IsFloatMatrix(input.gate, config_.experts, config_.hidden)) {
    return Bad(absl::StrCat("the gate must be f32, bf16, f16 or f64 [", config_.experts, ", ", config_.hidden,
                            "], got ", Describe(input.gate)));
  }
  return input.replay != nullptr ? CheckReplay(input) : absl::OkStatus();
}

absl::Status GateRouter::CheckReplay(const RouterInput& input) const {
  const RoutingDecision& replay = *input.replay;
  if (replay.num_tokens != input.x.shape().dim(0) || replay.num_experts != config_.experts ||
      (!expert_choice() && replay.top_k != config_.top_k)) {
    return Bad(absl::StrCat("the recorded routing has ", replay.num_tokens, " tokens, ", replay.num_experts,
                            " experts, k ", replay.top_k, "; this call has ", input.x.shape().dim(0), ", ",
                            config_.experts, ", ", config_.top_k));
  }
  return replay.Validate();
}

absl::Status GateRouter::Choose(const RouterInput& input, const RouterStep& step, Stream& stream,
                                RoutingDecision* decision) const {
  EK_RETURN_IF_ERROR(CheckInput(input));
  RoutingDecision& d = *decision;
  if (input.replay != nullptr) d = *input.replay;
  d.num_tokens = input.x.shape().dim(0);
  d.num_experts = config_.experts;
  if (input.replay == nullptr) {
    d.top_k = config_.top_k;
    d.dropless = config_.capacity.mode == CapacityMode::kDropless;
    if (input.token_mask != nullptr) d.token_mask.assign(input.token_mask, input.token_mask + d.num_tokens);
  }
  EK_ASSIGN_OR_RETURN(Tensor logits, Tensor::Create(device_, DType::kF32, {d.num_tokens, config_.experts}));
  float* const out = logits.data<float>();
  const absl::Status launched = stream.Launch([&input, out, jitter = JitterOf(step)] {
    GateLogits(input.x, input.gate, jitter, out);
    return absl::OkStatus();
  });
  EK_RETURN_IF_ERROR(stream.Synchronize());
  EK_RETURN_IF_ERROR(launched);
  EK_RETURN_IF_ERROR(ScoreTokens(config_, out, decision));
  if (input.replay != nullptr) return absl::OkStatus();
  if (!expert_choice()) return ChooseExperts(config_, step, out, input.selection_bias, decision);
  EK_ASSIGN_OR_RETURN(const int64_t tokens_per_expert, LocalCapacityNeed(config_.capacity, LocalNumbers(d)));
  return ChooseTokens(tokens_per_expert, decision);
}

absl::Status GateRouter::PlaceRoutes(const absl::Status& local, const RouterStep& step, Stream& stream,
                                     RoutingDecision* decision) const {
  const auto agree = [&](int64_t need) {
    return AgreeOnCapacity(config_.layer, local, need, groups_.ep, groups_.tp, device_, stream);
  };
  if (!local.ok()) return CapacityNeedsAgreement(config_.capacity) ? agree(0).status() : local;
  EK_ASSIGN_OR_RETURN(decision->capacity,
                      ComputeCapacity(config_.capacity, LocalNumbers(*decision), groups_.tp_size, agree));
  return expert_choice() ? absl::OkStatus() : AssignSlots(config_, step, decision);
}

absl::StatusOr<RoutingDecision> GateRouter::Route(const RouterInput& input, const RouterStep& step, Stream& stream) {
  RoutingDecision decision;
  absl::Status local = Choose(input, step, stream, &decision);
  if (local.ok() && input.replay == nullptr) {
    // What could fail inside ComputeCapacity must be known before the ranks talk.
    local = LocalCapacityNeed(config_.capacity, LocalNumbers(decision)).status();
  }
  if (input.replay == nullptr) local = PlaceRoutes(local, step, stream, &decision);
  if (local.ok()) {
    ComputeWeights(config_, &decision);
    ComputeLosses(config_, &decision);
  }
  EK_RETURN_IF_ERROR(CompareOverLanes(config_.layer, local, decision, groups_.tp, device_, stream));
  return decision;
}

absl::Status GateRouter::Backward(const RouterInput& input, const RouterStep& step, const RoutingDecision& decision,
                                  ConstTensorView dweight, const RouterLossGradients& losses, TensorView dx,
                                  TensorView dgate, Stream& stream) {
  EK_RETURN_IF_ERROR(CheckInput(input));
  const int64_t tokens = input.x.shape().dim(0);
  if (decision.num_tokens != tokens || decision.num_experts != config_.experts ||
      static_cast<int64_t>(decision.score.size()) != tokens * config_.experts) {
    return Bad(absl::StrCat("the decision is of ", decision.num_tokens, " tokens and ", decision.num_experts,
                            " experts, x is ", Describe(input.x)));
  }
  const Shape routes{tokens, decision.top_k};
  if (dweight.shape() != routes || (dweight.dtype() != DType::kF32 && dweight.dtype() != DType::kF64)) {
    return Bad(absl::StrCat("dweight must be f32 or f64 ", routes.ToString(), ", got ", Describe(dweight)));
  }
  if (!IsFloatMatrix(dx, tokens, config_.hidden) || !IsFloatMatrix(dgate, config_.experts, config_.hidden)) {
    return Bad(
        absl::StrCat("dx and dgate must have the shapes of x and gate, got ", Describe(dx), " and ", Describe(dgate)));
  }
  EK_ASSIGN_OR_RETURN(Tensor dlogits, Tensor::Create(device_, DType::kF32, {tokens, config_.experts}));
  return stream.Launch(
      [this, input, &decision, dweight, losses, dx, dgate, jitter = JitterOf(step), dlogits = std::move(dlogits)] {
        std::vector<float> narrowed;
        if (dweight.dtype() == DType::kF64) {
          narrowed.assign(dweight.data<double>(), dweight.data<double>() + dweight.num_elements());
        }
        const float* route_gradient = dweight.dtype() == DType::kF64 ? narrowed.data() : dweight.data<float>();
        float* const out = dlogits.data<float>();
        LogitGradients(config_, decision, route_gradient, losses.balance, losses.z, out);
        GateBackward(input.x, input.gate, jitter, out, dx, dgate);
        return absl::OkStatus();
      });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Router>> CreateGateRouter(const RouterConfig& config, const RouterGroups& groups,
                                                         Device* device) {
  return std::make_unique<GateRouter>(config, groups, device);
}

}  // namespace evenkeel::moe
