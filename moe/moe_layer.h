// One MoE layer on one rank: a router, the experts, and an order that moves the rows between them.
//
// The layer only interprets the order (order.h): its steps walk buffers, forward with a tape and backward by the
// derived program. There is no code per order.
//
//   EK_ASSIGN_OR_RETURN(Order order, FindOrder("fused"));
//   EK_ASSIGN_OR_RETURN(auto layer, MoeLayer::Create(config, order, groups, device));
//   MoeTape tape;
//   EK_RETURN_IF_ERROR(layer->Forward(weights, x, y, {.step = step}, &tape, stream));
//   EK_RETURN_IF_ERROR(layer->Backward(weights, tape, dy, dx, gradients, stream));
//
// Where bytes land: tokens [s, h] are the same on all lanes of a TP group (orders with SLICED_TOKENS: each lane has its
// own), experts are in the layout the order asks for, and every gradient is a sum over this rank's tokens only: the
// router's is identical on the lanes of a TP group and must not be summed over TP; expert gradients already hold all
// sources of the EP group.
#ifndef EVENKEEL_MOE_MOE_LAYER_H_
#define EVENKEEL_MOE_MOE_LAYER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/experts.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/router.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// A value.
struct MoeConfig {
  RouterConfig router;  // hidden, experts, top_k and capacity are here
  int64_t ffn = 0;      // full width F of an expert
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = false;
  DType dtype = DType::kF32;  // tokens and experts: f32, f64, bf16, f16
  // Keeps only the experts' input for the backward and computes their middle again there: F columns per row less memory
  // between the two, one product more, the same bits.
  bool recompute_experts = false;
  // kCanonical: output and every gradient (dW after the sum over EDP) have the same bits for every order, expert layout
  // and power-of-two TP and EP size, as long as each source has the same tokens. TP divides kCanonicalBlocks and those
  // divide ffn. Capacities are multiples of kCanonicalBlocks, and
  // the sum over a token's experts follows a tree over expert ids. 16-bit tokens and weights are computed, and travel,
  // as f32 rows (the predictions say so). Costs copies and scratch: docs/numerics.md.
  ExpertNumerics numerics = ExpertNumerics::kFast;
  float balance_coefficient = 0;  // of the load-balance loss in this rank's loss
  float z_coefficient = 0;        // of the router's z-loss
};

// The groups of this rank; null is a group of one. They must outlive the layer.
struct MoeGroups {
  comm::Communicator* tp = nullptr;
  comm::Communicator* ep = nullptr;
  int expert_tp = 1;  // size of the expert TP group: 1 or tp->size()
  // For orders that exchange by level: the ranks of `ep` on this node, and those with this one's local index on every
  // node (exchange_levels.h). Others need neither.
  comm::Communicator* ep_node = nullptr;
  comm::Communicator* ep_peers = nullptr;
  // Consecutive ranks of `ep` on each node, for predictions by link class. 0: as ep_node says, else all of them.
  int ep_per_node = 0;
  // For what is not payload: capacity, digests, row counts, route-weight gradients. Null: tp and ep themselves, whose
  // ledgers then hold that traffic too.
  comm::Communicator* control_tp = nullptr;
  comm::Communicator* control_ep = nullptr;
};

struct MoeWeights {
  ConstTensorView router;  // [e, h], f32, bf16, f16 or f64
  ExpertWeights experts;
};

struct MoeGradients {
  TensorView router;  // [e, h], f32 or f64
  ExpertGradients experts;
};

// What a call is given besides tensors.
struct MoeCall {
  RouterStep step;
  const float* selection_bias = nullptr;
  const uint8_t* token_mask = nullptr;
  const RoutingDecision* replay = nullptr;
};

// What an observer sees after each step of the program.
struct MoeTap {
  bool backward = false;
  int index = 0;           // in TypedOrder::forward or ::backward
  absl::string_view name;  // "all_gather(tp, slots)->R"
  ConstTensorView value;   // [rows, h]; valid during the call
};

struct MoeTapeState;  // moe_layer_internal

// What a forward leaves for its backward. Movable. Not thread-safe.
class MoeTape {
 public:
  MoeTape();
  MoeTape(MoeTape&&) noexcept;
  MoeTape& operator=(MoeTape&&) noexcept;
  ~MoeTape();

  // The forward's; valid until the next Forward with this tape.
  const RoutingDecision& decision() const;
  // Predicted payload of the forward and of the backward on this rank, for the routing at hand.
  const OrderTraffic& forward_traffic() const;
  const OrderTraffic& backward_traffic() const;
  // Predicted device memory of the layer's own buffers, above what was live before the call.
  const OrderMemory& memory() const;

  MoeTapeState& state() { return *state_; }

 private:
  std::unique_ptr<MoeTapeState> state_;
};

// Not thread-safe. All ranks of the groups make the same calls in the same order.
class MoeLayer {
 public:
  // InvalidArgument for a configuration that does not fit the groups (naming the numbers), an ill-typed order, or an
  // order for another expert layout.
  static absl::StatusOr<std::unique_ptr<MoeLayer>> Create(const MoeConfig& config, const Order& order,
                                                          const MoeGroups& groups, Device* device);
  virtual ~MoeLayer() = default;

  virtual const TypedOrder& order() const = 0;
  virtual const MoeConfig& config() const = 0;
  // What this rank's experts are: the shapes of its weights.
  virtual const ExpertShape& expert_shape() const = 0;
  // Called after every step, in stream order of an inline stream. Empty: none.
  virtual void SetObserver(std::function<void(const MoeTap&)> observer) = 0;

  // y = the layer's output for x; both [s, h] (own tokens where the order says SLICED_TOKENS), no overlap. x, weights
  // and call.replay live unchanged until the backward is done. Waits for `stream` once, because routing decides sizes.
  // InvalidArgument when shapes do not fit, logits are not finite, ...; errors of the communicators.
  virtual absl::Status Forward(const MoeWeights& weights, ConstTensorView x, TensorView y, const MoeCall& call,
                               MoeTape* tape, Stream& stream) = 0;

  // dx is overwritten, gradients are added to. `tape` is used up. The router's losses enter with the configured
  // coefficients times `loss_scale`.
  virtual absl::Status Backward(const MoeWeights& weights, MoeTape& tape, ConstTensorView dy, TensorView dx,
                                const MoeGradients& gradients, Stream& stream, float loss_scale = 1.0f) = 0;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_MOE_LAYER_H_
