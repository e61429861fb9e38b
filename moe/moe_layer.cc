#include "evenkeel/moe/moe_layer.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/moe/canonical_blocks.h"
#include "evenkeel/moe/layer_checks.h"
#include "evenkeel/moe/moe_tape_state.h"
#include "evenkeel/moe/order_executor.h"
#include "evenkeel/moe/order_schedule.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/moe/routing_exchange.h"
#include "evenkeel/moe/row_maps.h"
#include "evenkeel/moe/wide_moe_layer.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/tensor/tensor.h"

namespace evenkeel::moe {

MoeTape::MoeTape() : state_(std::make_unique<MoeTapeState>()) {}
MoeTape::MoeTape(MoeTape&&) noexcept = default;
MoeTape& MoeTape::operator=(MoeTape&&) noexcept = default;
MoeTape::~MoeTape() = default;
const RoutingDecision& MoeTape::decision() const { return state_->decision; }
const OrderTraffic& MoeTape::forward_traffic() const { return state_->forward_traffic; }
const OrderTraffic& MoeTape::backward_traffic() const { return state_->backward_traffic; }
const OrderMemory& MoeTape::memory() const { return state_->memory; }

namespace {

int SizeOfGroup(const comm::Communicator* group) { return group == nullptr ? 1 : group->size(); }

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

absl::Status CheckRows(const char* name, const ConstTensorView& view, DType dtype, int64_t rows, int64_t hidden) {
  if (view.dtype() == dtype && view.shape() == Shape({rows, hidden})) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("moe: ", name, " is ", DTypeName(view.dtype()), " ",
                                                 view.shape().ToString(), ", wants ", DTypeName(dtype), " [", rows,
                                                 ", ", hidden, "]"));
}

class MoeLayerImpl final : public MoeLayer {
 public:
  MoeLayerImpl(MoeConfig config, TypedOrder order, const MoeGroups& groups, std::unique_ptr<Router> router,
               Device* device)
      : config_(std::move(config)),
        order_(std::move(order)),
        groups_(groups),
        router_(std::move(router)),
        device_(device),
        exchange_(order_, {.ep = groups.ep,
                           .control_ep = control_ep(),
                           .tp_size = tp_size(),
                           .lane = lane(),
                           .local_experts = config_.router.experts / ep_size(),
                           .dropless_positions = canonical() ? kDroplessPositions : 0}) {
    const bool sliced = order_.layout == ExpertLayout::kTensorParallel;
    experts_ = {.local_experts = config_.router.experts / ep_size(),
                .hidden = config_.router.hidden,
                .ffn = sliced ? config_.ffn / tp_size() : config_.ffn,
                .activation = config_.activation,
                .bias = config_.bias,
                .adds_output_bias = !sliced || lane() == 0,
                .dtype = config_.dtype,
                .numerics = config_.numerics,
                .tp = sliced ? tp_size() : 1};
  }

  const TypedOrder& order() const override { return order_; }
  const MoeConfig& config() const override { return config_; }
  const ExpertShape& expert_shape() const override { return experts_; }
  void SetObserver(std::function<void(const MoeTap&)> observer) override { observer_ = std::move(observer); }

  absl::Status Forward(const MoeWeights& weights, ConstTensorView x, TensorView y, const MoeCall& call, MoeTape* tape,
                       Stream& stream) override {
    MoeTapeState& state = tape->state();
    state = MoeTapeState();
    EK_RETURN_IF_ERROR(CheckTokens(x, y));
    EK_ASSIGN_OR_RETURN(const ConstTensorView all_tokens, GatherTokens(x, &state, stream));
    state.step = call.step;
    state.router_input = {.x = all_tokens,
                          .gate = weights.router,
                          .selection_bias = call.selection_bias,
                          .token_mask = call.token_mask,
                          .replay = call.replay};
    EK_ASSIGN_OR_RETURN(state.decision, router_->Route(state.router_input, call.step, stream));
    EK_RETURN_IF_ERROR(state.decision.Validate());  // a user's router may be wrong
    EK_RETURN_IF_ERROR(Plan(all_tokens.shape().dim(0), &state, stream));
    if (order_.order.chunks > 1 && ep_size() > 1 && !stream.is_inline() && exchange_stream_ == nullptr) {
      EK_ASSIGN_OR_RETURN(exchange_stream_, device_->CreateStream("moe.exchange"));
    }

    OrderExecutor executor(Input(order_.forward, state.schedules.forward, weights, &state, false), device_,
                           &state.indices, &stream);
    EK_RETURN_IF_ERROR(executor.Run(x, y));
    for (const auto& pair : state.schedules.carried) {
      if (pair.first > kOutputBuffer) state.carried.push_back({pair.second, executor.Take(pair.first)});
    }
    state.ready = true;
    return absl::OkStatus();
  }

  absl::Status Backward(const MoeWeights& weights, MoeTape& tape, ConstTensorView dy, TensorView dx,
                        const MoeGradients& gradients, Stream& stream, float loss_scale) override {
    MoeTapeState& state = tape.state();
    if (!state.ready) return absl::FailedPreconditionError("moe: backward without a forward, or a second one");
    state.ready = false;
    EK_RETURN_IF_ERROR(CheckTokens(dy, dx));
    state.route_gradient.assign(state.decision.num_routes(), 0.0f);
    state.fold_gradient.assign(state.maps.dedup_receive.expert_rows_of_arrival.rows.size(), 0.0f);

    ExecutorInput input = Input(order_.backward, state.schedules.backward, weights, &state, true);
    input.gradients = gradients.experts;
    OrderExecutor executor(std::move(input), device_, &state.indices, &stream);
    for (auto& carried : state.carried) executor.Give(carried.first, std::move(carried.second));
    state.carried.clear();
    EK_RETURN_IF_ERROR(executor.Run(dy, dx));

    if (state.maps.deduplicated) {
      EK_RETURN_IF_ERROR(exchange_.ReturnFoldGradient(state.maps, state.fold_gradient, &state.route_gradient, stream));
    }
    EK_RETURN_IF_ERROR(CompleteRouteGradient(&state, stream));
    const RouterLossGradients losses = {.balance = config_.balance_coefficient * loss_scale,
                                        .z = config_.z_coefficient * loss_scale};
    state.router_input.gate = weights.router;
    const ConstTensorView dweight(state.route_gradient.data(), DType::kF32,
                                  Shape({state.decision.num_tokens, state.decision.top_k}));
    const auto router_backward = [&](TensorView into) {
      return router_->Backward(state.router_input, state.step, state.decision, dweight, losses, into, gradients.router,
                               stream);
    };
    return takes_own_tokens() ? AddOwnRows(router_backward, state.all_tokens.shape(), dx, stream) : router_backward(dx);
  }

 private:
  bool canonical() const { return config_.numerics == ExpertNumerics::kCanonical; }
  int tp_size() const { return SizeOfGroup(groups_.tp); }
  int ep_size() const { return SizeOfGroup(groups_.ep); }
  // Whole experts: the EP group spans the lanes.
  int replicas_of_ep() const {
    return order_.layout == ExpertLayout::kWhole ? std::max(1, ep_size() / tp_size()) : ep_size();
  }
  int lane() const { return groups_.tp == nullptr ? 0 : groups_.tp->rank(); }
  comm::Communicator* control_tp() const { return groups_.control_tp != nullptr ? groups_.control_tp : groups_.tp; }
  comm::Communicator* control_ep() const { return groups_.control_ep != nullptr ? groups_.control_ep : groups_.ep; }

  // A sequence-parallel caller: each lane brings its own tokens.
  bool takes_own_tokens() const { return IsVarying(order_.order.input) && tp_size() > 1; }

  // All tokens of the TP group (`x` itself where the lanes have them all), for the router: which routes are kept is
  // decided on all of them. Lanes own tokens as OwnTokens says; anything else is FailedPrecondition on all lanes.
  absl::StatusOr<ConstTensorView> GatherTokens(ConstTensorView x, MoeTapeState* state, Stream& stream) {
    if (!takes_own_tokens()) return x;
    const int64_t own = x.shape().dim(0);
    std::vector<int64_t> counts(tp_size());
    EK_RETURN_IF_ERROR(control_tp()->AllGather(ConstTensorView(&own, DType::kI64, Shape({1})),
                                               TensorView(counts.data(), DType::kI64, Shape({tp_size()})), stream));
    EK_RETURN_IF_ERROR(stream.Synchronize());
    const int64_t tokens = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    for (int lane = 0; lane < tp_size(); ++lane) {
      const int64_t wanted = OwnTokens(tokens, tp_size(), lane).size();
      if (counts[lane] == wanted) continue;
      return absl::FailedPreconditionError(absl::StrCat("moe: lane ", lane, " brings ", counts[lane], " of ", tokens,
                                                        " tokens, wants ", wanted,
                                                        " (equal shares, longer ones first)"));
    }
    const int64_t hidden = config_.router.hidden;
    EK_ASSIGN_OR_RETURN(state->all_tokens, Tensor::Create(device_, config_.dtype, Shape({tokens, hidden})));
    for (int64_t& count : counts) count *= hidden;
    EK_RETURN_IF_ERROR(control_tp()->AllGatherV(x, state->all_tokens.view(), counts, stream));
    return state->all_tokens.const_view();
  }

  // dx += this lane's rows of a gradient of all tokens that `backward` adds into zeros.
  absl::Status AddOwnRows(const std::function<absl::Status(TensorView)>& backward, const Shape& shape, TensorView dx,
                          Stream& stream) {
    EK_ASSIGN_OR_RETURN(Tensor all, Tensor::Create(device_, config_.dtype, shape));
    EK_RETURN_IF_ERROR(stream.Fill(all.view().raw(), 0, all.view().num_bytes()));
    EK_RETURN_IF_ERROR(backward(all.view()));
    const TokenRange own = OwnTokens(shape.dim(0), tp_size(), lane());
    EK_RETURN_IF_ERROR(Add(dx, all.view().Rows(own.begin, own.size()), dx, stream));
    return stream.Synchronize();  // `all` goes now
  }

  absl::Status CheckTokens(const ConstTensorView& in, const TensorView& out) const {
    if (in.shape().rank() != 2) return CheckRows("tokens", in, config_.dtype, -1, config_.router.hidden);
    EK_RETURN_IF_ERROR(CheckRows("input", in, config_.dtype, in.shape().dim(0), config_.router.hidden));
    return CheckRows("output", out, config_.dtype, in.shape().dim(0), config_.router.hidden);
  }

  // Everything that follows from the decision: row maps, schedules, predictions.
  absl::Status Plan(int64_t tokens, MoeTapeState* state, Stream& stream) {
    const RoutingDecision& decision = state->decision;
    RowMaps& maps = state->maps;
    maps.sizes = {.tokens = tokens,
                  .hidden = config_.router.hidden,
                  .experts = config_.router.experts,
                  .top_k = decision.top_k,
                  .capacity = decision.capacity,
                  .ffn = config_.ffn,
                  .gated = experts_.gated(),
                  .recompute = config_.recompute_experts,
                  .canonical_sources = experts_.canonical() ? replicas_of_ep() : 0,
                  .dtype = config_.dtype,
                  .tp = tp_size(),
                  .ep = ep_size(),
                  .ep_per_node = groups_.ep_node != nullptr ? groups_.ep_node->size() : groups_.ep_per_node,
                  .lane = lane(),
                  .slot_classes = decision.slot_classes,
                  .chunks = order_.order.chunks};
    if (canonical()) maps.expert_of_route = decision.expert;
    EK_RETURN_IF_ERROR(CheckOrderSizes(order_, maps.sizes));
    EK_RETURN_IF_ERROR(exchange_.Plan(decision, &maps, stream));
    EK_RETURN_IF_ERROR(CheckOrderSizes(order_, maps.sizes));  // again with the rows
    if (canonical() && order_.layout == ExpertLayout::kWhole && ep_size() < tp_size()) PlanLaneMerge(decision, &maps);
    state->schedules = BuildSchedules(order_, maps.sizes);
    state->forward_traffic = ComputeTraffic(order_, maps.sizes, false);
    state->backward_traffic = ComputeTraffic(order_, maps.sizes, true);
    state->memory = state->schedules.memory();
    AddGatheredTokens(tokens, state);
    if (maps.sizes.merges_lanes) {  // x and dy
      AxisTraffic& control = state->backward_traffic.control_tp;
      control.bytes +=
          2 * maps.lane_merge.rows_of_lane[lane()] * config_.router.hidden * SizeOf(config_.dtype) * (tp_size() - 1);
      control.collectives += 2;
    }
    return absl::OkStatus();
  }

  void PlanLaneMerge(const RoutingDecision& decision, RowMaps* maps) const {
    maps->lane_merge =
        MergeLanes(decision, {.tp = tp_size(), .ep = ep_size(), .lane = lane(), .padded = !order_.is_ragged()});
    maps->sizes.merges_lanes = true;
    maps->sizes.gathered_rows = maps->lane_merge.num_gathered();
    maps->sizes.merged_rows = maps->lane_merge.num_merged();
  }

  // What GatherTokens and AddOwnRows add to the predictions.
  void AddGatheredTokens(int64_t tokens, MoeTapeState* state) const {
    if (!takes_own_tokens()) return;
    const int64_t bytes = tokens * config_.router.hidden * SizeOf(config_.dtype);
    const int64_t own = OwnTokens(tokens, tp_size(), lane()).size();
    state->forward_traffic.control_tp.bytes +=
        (8 + own * config_.router.hidden * SizeOf(config_.dtype)) * (tp_size() - 1);
    state->forward_traffic.control_tp.collectives += 2;
    OrderMemory& memory = state->memory;
    memory.forward_peak += bytes;
    memory.tape += bytes;
    // At the end: the tokens, their gradient, and the router's own logits.
    memory.backward_peak = std::max(memory.backward_peak + bytes, 2 * bytes + tokens * config_.router.experts * 4);
  }

  ExecutorInput Input(const std::vector<TypedStep>& program, const Schedule& schedule, const MoeWeights& weights,
                      MoeTapeState* state, bool backward) {
    ExecutorInput input;
    input.program = &program;
    input.schedule = &schedule;
    input.maps = &state->maps;
    input.tp = groups_.tp;
    input.ep = groups_.ep;
    input.control_tp = control_tp();
    input.ep_node = groups_.ep_node;
    input.ep_peers = groups_.ep_peers;
    input.exchange_stream = exchange_stream_.get();
    input.events = &state->events;
    input.experts = experts_;
    input.weights = weights.experts;
    const Shape routes({state->decision.num_routes()});
    input.route_weights = ConstTensorView(state->decision.weight.data(), DType::kF32, routes);
    if (backward && state->maps.deduplicated) {
      input.fold_weight_gradient = TensorView(state->fold_gradient.data(), DType::kF32,
                                              Shape({static_cast<int64_t>(state->fold_gradient.size())}));
    }
    if (backward) input.route_weight_gradient = TensorView(state->route_gradient.data(), DType::kF32, routes);
    if (observer_) {
      input.observer = [this, &program, backward](int step, ConstTensorView value) {
        const std::string name = StepName(program[step].step);
        observer_({.backward = backward, .index = step, .name = name, .value = value});
      };
    }
    return input;
  }

  // The route weights' gradient lies as combine's rows do; the router needs all of it on every lane.
  absl::Status CompleteRouteGradient(MoeTapeState* state, Stream& stream) {
    const AxisType type = order_.weighted_rows();
    if (tp_size() == 1 || type.placement == Placement::kInvariant) return absl::OkStatus();
    const RoutingDecision& decision = state->decision;
    const TensorView all(state->route_gradient.data(), DType::kF32, Shape({decision.num_routes()}));
    if (!IsVarying(type) || type.dim == Dim::kSlots) {
      return control_tp()->AllReduce(all, all, comm::ReduceOp::kSum, stream);
    }
    std::vector<int64_t> counts;
    for (int lane = 0; lane < tp_size(); ++lane) {
      counts.push_back(OwnTokens(decision.num_tokens, tp_size(), lane).size() * decision.top_k);
    }
    const TokenRange own = OwnTokens(decision.num_tokens, tp_size(), lane());
    return control_tp()->AllGatherV(all.Rows(own.begin * decision.top_k, own.size() * decision.top_k), all, counts,
                                    stream);
  }

  const MoeConfig config_;
  const TypedOrder order_;
  const MoeGroups groups_;
  const std::unique_ptr<Router> router_;
  Device* const device_;
  ExpertShape experts_;
  const RoutingExchange exchange_;
  std::unique_ptr<Stream> exchange_stream_;  // of orders with chunks, beside a worker stream
  std::function<void(const MoeTap&)> observer_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<MoeLayer>> MoeLayer::Create(const MoeConfig& config, const Order& order,
                                                           const MoeGroups& groups, Device* device) {
  const int tp = SizeOfGroup(groups.tp), ep = SizeOfGroup(groups.ep);
  const GroupSizes sizes = {.tp = tp, .ep = ep, .expert_tp = groups.expert_tp};
  EK_RETURN_IF_ERROR(CheckConfig(config, sizes));
  EK_ASSIGN_OR_RETURN(const ExpertLayout layout, LayoutOf(order, sizes));
  const bool canonical = config.numerics == ExpertNumerics::kCanonical;
  EK_ASSIGN_OR_RETURN(TypedOrder typed, CheckOrder(canonical ? CanonicalOrder(order) : order, layout));
  EK_RETURN_IF_ERROR(CheckNumerics(config, typed, sizes));
  EK_RETURN_IF_ERROR(CheckLevels(typed, groups));
  if (canonical && IsHalf(config.dtype)) {
    return CreateWideMoeLayer(config, [&](const MoeConfig& wide) { return Create(wide, order, groups, device); });
  }
  MoeConfig own = config;
  // A multiple of every T, so that no T drops other routes.
  if (canonical) own.router.capacity.multiple = kCanonicalBlocks;
  if (!typed.is_ragged() && own.router.capacity.mode == CapacityMode::kDropless) {
    // Padded buffers that drop nothing are as wide as the fullest expert needs.
    own.router.capacity.mode = CapacityMode::kNoDrop;
  }
  const RouterGroups router_groups = {.tp = groups.control_tp != nullptr ? groups.control_tp : groups.tp,
                                      .ep = groups.control_ep != nullptr ? groups.control_ep : groups.ep,
                                      .tp_size = tp};
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Router> router, CreateRouter(own.router, router_groups, device));
  return std::unique_ptr<MoeLayer>(
      std::make_unique<MoeLayerImpl>(std::move(own), std::move(typed), groups, std::move(router), device));
}

}  // namespace evenkeel::moe
