// `--candidate=auto`: measures the links for a moment and picks the order that the cost model says is fastest.
#ifndef EVENKEEL_TOOLS_AUTO_ORDER_H_
#define EVENKEEL_TOOLS_AUTO_ORDER_H_

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/order_cost.h"
#include "evenkeel/moe/order_planner.h"
#include "evenkeel/testing/training_config.h"

namespace evenkeel::tools {

// What the planner needs of one MoE layer of the run. Where nothing is dropped, balanced routing is assumed.
absl::StatusOr<moe::OrderSizes> LayerSizes(const testutil::TrainingConfig& base);

// Calibrates over the mesh's TP and EP groups, between nodes apart where the backend's topology has several, and ranks
// the orders of tensor-parallel experts with replicated tokens: the registered ones, and over nodes what is made of
// them. All ranks of the backend's world call it and get the same plan.
absl::StatusOr<moe::OrderPlan> PlanOnBackend(const comm::Mesh& mesh, const moe::OrderSizes& sizes,
                                             comm::Backend& backend);

// The same on one thread per rank, so many of them on each (virtual) node; 0: one node.
absl::StatusOr<moe::OrderPlan> PlanOnThreads(const comm::Mesh& mesh, const moe::OrderSizes& sizes, int ranks_per_node);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_AUTO_ORDER_H_
