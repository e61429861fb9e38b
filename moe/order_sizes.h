// The sizes of one layer on one rank, and how many rows a value of an order has there.
//
//   OrderSizes sizes{.tokens = 4096, .hidden = 4096, .experts = 8, .top_k = 2, .capacity = 1280, .tp = 2, .ep = 4};
//   OrderRows rows(typed, sizes);
//   rows.Count(typed.forward[2].before).far;    // rows that this exchange sends to other nodes
//
// Nodes: an EP group of E ranks covers N nodes with L = E / N consecutive ranks each.
#ifndef EVENKEEL_MOE_ORDER_SIZES_H_
#define EVENKEEL_MOE_ORDER_SIZES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/moe/order.h"
#include "evenkeel/moe/ragged_plan.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::moe {

// Real rows, for orders without padding; from the routing at hand. "Far" is on another node, "across" at another local
// index of any node.
struct RaggedRows {
  int64_t sent = 0;             // rows this rank dispatches
  int64_t sent_remote = 0;      // of them, to other ranks of the EP group
  int64_t sent_far = 0;         // of these, to other nodes
  int64_t arrived = 0;          // rows the exchange brings to this rank
  int64_t arrived_remote = 0;   // of them, from other ranks
  int64_t arrived_far = 0;      // of these, from other nodes
  int64_t arrived_across = 0;   // of `arrived`, from sources with another local index
  int64_t middle = 0;           // rows at this rank half way: V(nodes)
  int64_t middle_far = 0;       // of them, from other nodes
  int64_t middle_across = 0;    // of `middle`, to destinations with another local index
  int64_t gathered = 0;         // R: rows at this rank's experts; `arrived` where nothing is gathered over TP
  int64_t gathered_before = 0;  // of them, those of lanes before this one

  RaggedRows& operator+=(const RaggedRows& other);
};

// A value.
struct OrderSizes {
  int64_t tokens = 0;  // s
  int64_t hidden = 0;
  int64_t experts = 0;
  int64_t top_k = 1;
  int64_t capacity = 0;       // c: slots per expert and source; padded orders only
  int64_t ffn = 0;            // F: full width of an expert; for memory only
  bool gated = false;         // SwiGLU; for memory only
  bool recompute = false;     // the experts' middle is computed again in backward; for memory only
  int canonical_sources = 0;  // canonical numerics: replicas of the EP group; 0: fast numerics. For memory only
  // Canonical numerics, whole experts with E < T: the experts' backward runs on the rows of several lanes
  // (lane_merge.h). For memory only.
  bool merges_lanes = false;
  int64_t gathered_rows = 0;
  int64_t merged_rows = 0;
  DType dtype = DType::kF32;
  int tp = 1;
  int ep = 1;
  int ep_per_node = 0;  // L; 0: the EP group is on one node
  int lane = 0;
  int slot_classes = 1;                         // of the router's decisions
  int chunks = 1;                               // of the order: set by whoever has it (the functions below do)
  std::optional<RaggedRows> rows = {};          // none: balanced routing without drops is assumed
  std::vector<RaggedRows> chunk_rows = {};      // `rows` chunk by chunk; empty: in proportion to the chunks' experts
  std::optional<RaggedRows> destinations = {};  // the same of rows per (token, destination), where tokens travel so
  std::optional<RaggedRows> nodes = {};         // and per (token, node); sent, middle and what is far of them

  int per_node() const { return ep_per_node > 0 ? ep_per_node : ep; }
  int num_nodes() const { return ep / per_node(); }
};

// InvalidArgument when the sizes do not fit: a negative extent, E that does not divide e, nodes that do not divide E, a
// capacity that is not a multiple of T, more chunks than local experts, or numbers that overflow.
absl::Status CheckOrderSizes(const TypedOrder& order, const OrderSizes& sizes);

// `sizes.rows`, or what balanced routing without drops gives this rank.
RaggedRows RowsOrExpected(const TypedOrder& order, const OrderSizes& sizes);
// `sizes.destinations`, or what routing to k experts at random gives this rank.
RaggedRows DestinationsOrExpected(const TypedOrder& order, const OrderSizes& sizes);
// `sizes.nodes`, or likewise.
RaggedRows NodesOrExpected(const TypedOrder& order, const OrderSizes& sizes);
// The element type of a value of that form: partial sums of 16-bit rows are f32.
DType ElementType(Dim form, DType dtype, bool backward);
// True when each lane dispatches its own tokens only.
bool DispatchesOwnTokens(const TypedOrder& order);

inline constexpr int kAllChunks = -1;

// Rows of a value on this rank, and how many of them an exchange sends away.
struct RowCount {
  int64_t rows = 0;
  int64_t remote = 0;  // to other ranks
  int64_t far = 0;     // to other nodes
  int64_t across = 0;  // to other local indices
};

// Immutable value. `sizes` passed CheckOrderSizes.
class OrderRows {
 public:
  OrderRows(const TypedOrder& order, const OrderSizes& sizes);

  // Of one chunk, or of all together.
  RowCount Count(const ValueType& type, int chunk = kAllChunks) const;
  // Rows of one way: of rows, per destination, or per node.
  const RaggedRows& Flow(Dim form, int chunk = kAllChunks) const;

 private:
  OrderSizes sizes_;
  RaggedRows rows_;
  RaggedRows destinations_;
  RaggedRows nodes_;
  std::vector<RaggedRows> chunks_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_SIZES_H_
