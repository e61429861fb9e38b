// Runs one MoE layer on threads (or simulated ranks), forward and backward, and a naive dense layer in double beside
// it. For tests.
//
//   LayerCase c{.tp = 2, .ep = 2, .experts = 4, .top_k = 2};
//   ASSERT_OK_AND_ASSIGN(LayerRun run, RunLayer(c, *FindOrder("fused")));
//   DenseResult dense = RunDense(c, run);
#ifndef EVENKEEL_MOE_TESTING_LAYER_HARNESS_H_
#define EVENKEEL_MOE_TESTING_LAYER_HARNESS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/mesh.h"
#include "evenkeel/moe/moe_layer.h"
#include "evenkeel/moe/router_config.h"
#include "evenkeel/moe/routing_decision.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/device/work_counters.h"

namespace evenkeel::moe {

// One layer on a world of tp * dp ranks. Data are keyed by global indices, so they do not depend on the layout.
struct LayerCase {
  int tp = 1;
  int ep = 1;
  int dp = 0;          // 0: ep
  bool whole = false;  // experts without TP
  int experts = 4;
  int top_k = 2;
  int64_t tokens = 6;  // of each data-parallel replica
  int64_t hidden = 8;
  int64_t ffn = 8;
  double capacity_factor = 1.25;
  CapacityMode mode = CapacityMode::kFactor;
  int64_t min_capacity = 1;
  ExpertActivation activation = ExpertActivation::kGelu;
  bool bias = false;
  bool recompute = false;
  bool canonical = false;
  DType dtype = DType::kF64;
  bool worker_stream = false;
  bool poison = true;
  uint64_t seed = 1;
  // Tokens of one replica, where they differ. Null: `tokens`.
  std::function<int64_t(int replica)> tokens_of = nullptr;
  // Forces experts: added to the data so that routing is skewed. -1: none.
  int favourite_expert = -1;
  bool control_groups = true;
  int ranks_per_node = 0;              // consecutive world ranks; 0: one node
  std::vector<int> node_of_rank = {};  // instead of that
  bool simulated = false;              // a simulated world instead of threads
  enum class LevelGroups { kRight, kNone, kNodeTwice };
  LevelGroups level_groups = LevelGroups::kRight;  // what an order by levels is given
  // Changes the router's configuration. Null: top-k softmax as above.
  std::function<void(RouterConfig*)> router = nullptr;
  // Per data-parallel replica: 1 for the tokens that count. Null: all.
  std::function<std::vector<uint8_t>(int replica)> mask = nullptr;
  // Per replica: routes to be used instead of choosing. Null: none.
  std::function<const RoutingDecision*(int replica)> replay = nullptr;
  // Puts the number of another place into a place of "x", "dy", "router", "w_in", ... (indices as in DataAt), so that
  // tokens can be permuted and experts renamed. Null: each its own.
  std::function<int64_t(const std::string& name, int64_t index)> taken_from = nullptr;
  // Forward and backward passes of the ranks of a replica, where they differ. Null: 1.
  std::function<int(int replica)> passes_of = nullptr;
  int64_t deadline_ms = 20000;  // of every collective call
  // Added to one element before the run: for finite differences.
  std::string perturb = {};  // "x", "router", "w_in", "w_gate", "w_out", "b_in", "b_gate", "b_out"
  int64_t perturb_index = 0;
  double perturb_by = 0;

  int replicas() const { return dp > 0 ? dp : ep; }
  int64_t tokens_in(int replica) const { return tokens_of ? tokens_of(replica) : tokens; }
  comm::MeshShape mesh() const { return {.tp = tp, .ep = ep, .dp = replicas(), .etp = whole ? 1 : tp}; }
};

// Everything as double, so that bits of f32 and f64 can be compared alike.
struct Values {
  std::vector<double> x, dy;  // inputs
  std::vector<double> y, dx, router;
  std::vector<double> w_in, w_gate, w_out, b_in, b_gate, b_out;  // gradients
};

struct RankRun {
  int replica = 0, lane = 0, ep_rank = 0, edp_rank = 0;
  int ep_per_node = 0;  // of an order by levels
  Values values;
  RoutingDecision decision;
  comm::LedgerCounts forward, backward;  // counted
  WorkCounts forward_work, backward_work;
  OrderTraffic predicted_forward, predicted_backward;
  OrderMemory predicted_memory;
  OrderMemory counted_memory;
  std::vector<std::string> taps;
  std::vector<Shape> tap_shapes;
};

struct LayerRun {
  std::vector<RankRun> ranks;  // by world rank
};

// The global element of a parameter or input. Names as in LayerCase::perturb; for inputs `index` counts
// (replica, token, column).
double DataAt(const LayerCase& c, const std::string& name, int64_t index);

// One replica's input: "x" or "dy".
std::vector<double> InputsOf(const LayerCase& c, const std::string& name, int replica);

// OK, or the first rank's failure.
absl::StatusOr<LayerRun> RunLayer(const LayerCase& c, const Order& order);

// The whole layer in double on one process: outputs per replica, gradients of whole parameters summed over replicas.
struct DenseResult {
  std::vector<std::vector<double>> y, dx;   // [replica]
  std::vector<std::vector<double>> router;  // [replica] this replica's contribution
  Values sums;                              // w_in [e, h, F], ...
  double loss = 0;                          // sum over replicas of <dy, y>
};

// Uses the experts, slots and (f32) weights of the run's decisions; shares no code with the layer.
DenseResult RunDense(const LayerCase& c, const LayerRun& run);

// What a rank should hold of a dense expert gradient, after the sum over the ranks that share its shard (EDP).
std::vector<double> ExpertShard(const LayerCase& c, const RankRun& rank, const std::string& name,
                                const std::vector<double>& whole);
// The gradient of that rank's shard summed over its EDP group.
std::vector<double> SumOverEdp(const LayerCase& c, const LayerRun& run, const RankRun& rank,
                               std::vector<double> Values::*member);

// The largest |a - b|; infinity when the sizes differ.
double MaxDifference(const std::vector<double>& a, const std::vector<double>& b);
double MaxAbs(const std::vector<double>& a);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_TESTING_LAYER_HARNESS_H_
