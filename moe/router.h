// Routers: which experts a token goes to, with what weight, and the gradient of that.
//
// Arithmetic is f32 for every input dtype (f64 inputs are rounded to f32 first): logits = f32(x) * f32(gate)^T. Every
// sum has one fixed order that depends neither on the number of tokens nor on the CPU, so all lanes of a TP group, all
// orders, and a recomputation get the same bits.
//
//   g        softmax or sigmoid of the logits
//   choice   the top_k largest logits (+ noise); with a selection bias the largest g + bias; ties: lowest expert id
//   weight   g of the kept routes, normalised over them, times route_scale
//   balance  e * sum_j mean(g_j) * mean(mask_j) over active tokens, masks before the drop; sigmoid scores are first
//            divided by their sum. (Switch Transformer, arXiv 2101.03961 eq. 4; k > 2 divides by k)
//   z-loss   mean over active tokens of log(sum_j exp(logit_j))^2 (ST-MoE, arXiv 2202.08906 eq. 5)
// Both losses are per source: never averaged over ranks here.
//
//   EK_ASSIGN_OR_RETURN(auto router, CreateRouter(config, {.tp = tp, .ep = ep}, device));
//   EK_ASSIGN_OR_RETURN(RoutingDecision decision, router->Route({.x = x, .gate = gate}, step, stream));
//   ...
//   router->Backward({.x = x, .gate = gate}, step, decision, dweight, {.balance = 0.01f}, dx, dgate, stream);
#ifndef EVENKEEL_MOE_ROUTER_H_
#define EVENKEEL_MOE_ROUTER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"

namespace evenkeel::moe {

// The groups a router talks over; null means a group of one. What travels is control data: the capacity (one i64, MAX
// over `ep`, only if CapacityNeedsAgreement) and a digest of the decision (four i64 gathered over `tp`). Give it groups
// of their own with axis kOther where the ledger of payload must stay equal to an order's closed form.
// Expert groups that span lanes are fine: a maximum does not mind duplicates.
struct RouterGroups {
  comm::Communicator* tp = nullptr;
  comm::Communicator* ep = nullptr;
  int tp_size =
      1;  // T: capacities are multiples of it. Used as it is when `tp` is null, else it must equal tp->size().
};

// x: [s, hidden] and gate: [experts, hidden], f32, bf16, f16 or f64.
struct RouterInput {
  ConstTensorView x;
  ConstTensorView gate;
  const float* selection_bias = nullptr;    // [experts], added to the scores for selection only; null: none
  const uint8_t* token_mask = nullptr;      // [s], 0 excludes a token from everything; null: all tokens count
  const RoutingDecision* replay = nullptr;  // experts, slots and capacity as recorded; scores and weights are computed
};

// Gradients of the total loss with respect to the two router losses: coefficient times loss scale.
struct RouterLossGradients {
  float balance = 0;
  float z = 0;
};

// One layer's router on one rank. Implementations are stateless between calls. Not thread-safe: it shares its
// communicators with other calls.
class Router {
 public:
  virtual ~Router() = default;
  virtual const RouterConfig& config() const = 0;

  // Routes the tokens of `input`. All ranks of both groups call it, in the same order, also with zero tokens. Host
  // planning needs the result, so this waits for `stream`. Errors:
  //   InvalidArgument     shapes, dtypes, non-finite logits (layer, token and expert are named)
  //   FailedPrecondition  lanes decided differently (the first such token is named), or a peer failed to route
  virtual absl::StatusOr<RoutingDecision> Route(const RouterInput& input, const RouterStep& step, Stream& stream) = 0;

  // Adds the router's gradients: dx [s, hidden] += .., dgate [experts, hidden] += .. (f32 or f64; dx any input dtype).
  // `input` and `step` are those of Route; dweight: [s, k] f32, gradient of the loss with respect to decision.weight.
  // Enqueued on `stream`; everything passed must outlive the work. No communication: all lanes compute the same.
  virtual absl::Status Backward(const RouterInput& input, const RouterStep& step, const RoutingDecision& decision,
                                ConstTensorView dweight, const RouterLossGradients& losses, TensorView dx,
                                TensorView dgate, Stream& stream) = 0;
};

// The router named config.kind. InvalidArgument when the configuration is bad; NotFound listing the linked routers.
absl::StatusOr<std::unique_ptr<Router>> CreateRouter(const RouterConfig& config, const RouterGroups& groups,
                                                     Device* device);

using RouterFactory = std::function<absl::StatusOr<std::unique_ptr<Router>>(
    const RouterConfig& config, const RouterGroups& groups, Device* device)>;
// Makes a user's router known under `name`; dies when the name is taken. Called while static objects are initialised:
//   static const bool registered = RegisterRouter("mine", CreateMine);      (library with alwayslink)
bool RegisterRouter(absl::string_view name, RouterFactory factory);
// All names, sorted.
std::vector<std::string> RouterNames();

// The update of a selection bias that balances load without a loss (DeepSeek-V3, arXiv 2412.19437 section 2.1.2):
// bias[e] += rate where expert e had fewer than the mean number of routes, -= rate where more. `assigned` is the sum
// over all sources, equal on all ranks, so the bias stays equal too. Exact comparison in integers.
void UpdateSelectionBias(absl::Span<const int64_t> assigned, float rate, absl::Span<float> bias);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ROUTER_H_
