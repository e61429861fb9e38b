// A collective order in memory: a program of steps, and the types of what flows between them.
//
// An order takes a TP group's tokens through the experts and back. Its steps are data, never code: the checker
// (order_types.h), the derived backward (order_adjoint.h), the cost (order_cost.h) and the executor (moe_layer.h) all
// read the same list.
//
//   EK_ASSIGN_OR_RETURN(Order order, ParseOrder(text, "mine.textproto"));
//   EK_ASSIGN_OR_RETURN(TypedOrder typed, CheckOrder(order, ExpertLayout::kTensorParallel));
//   for (const TypedStep& step : typed.forward) ...
//
// Placement types, per mesh axis, and the type of the matching gradient (SEMANTICS of the project, section 3.1):
//   I invariant   same on all lanes, computed identically    gradient I: identical on all lanes
//   R replicated  same on all lanes, used differently        gradient P: must be summed
//   V varying     each lane holds a slice along a dim        gradient V
//   P partial     lanes hold addends                         gradient R
#ifndef EVENKEEL_MOE_ORDER_H_
#define EVENKEEL_MOE_ORDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/mesh.h"

namespace evenkeel::moe {

enum class Placement : uint8_t { kUnset, kInvariant, kReplicated, kVarying, kPartial };

// What is sliced, gathered or filled; the first of them are forms that rows can have. kSources and kExperts occur only
// in types, never in a step. On EP a dim says where rows are: V(sources) where they came from, V(experts) at the rank
// of their expert, V(nodes) half way: on the node of that rank, at the rank with the local index of their source.
enum class Dim : uint8_t {
  kUnset,
  kTokens,
  kSlots,
  kRows,
  kDestinations,
  kSums,
  kNodes,
  kNodeSums,
  kSources,
  kExperts,
};

// How a value lies on one axis. `dim` says along what a kVarying value is sliced. On the other placements it is set
// only where ragged rows of all lanes lie together, lane by lane, after a gather: "R(rows)".
struct AxisType {
  Placement placement = Placement::kInvariant;
  Dim dim = Dim::kUnset;
  friend bool operator==(const AxisType&, const AxisType&) = default;
};

// What the rows of a value are, and how they lie on the two axes.
struct ValueType {
  Dim form = Dim::kTokens;  // kTokens to kNodeSums
  AxisType tp;
  AxisType ep = {Placement::kVarying, Dim::kSources};
  friend bool operator==(const ValueType&, const ValueType&) = default;
};

enum class StepKind : uint8_t {
  kSlice,
  kAllGather,
  kCopy,
  kAllReduce,
  kReduceScatter,
  kAllToAll,
  kAllToAllV,
  kDispatch,
  kExperts,
  kCombine,
  kExpand,
  kFold,
};

// Where experts live. kAny is for orders whose steps say `when`.
enum class ExpertLayout : uint8_t { kAny, kTensorParallel, kWhole };

enum class When : uint8_t { kAlways, kTensorParallel, kWhole };

// Which part of an exchange over EP a step is: all of it, or one of its two levels where the EP group covers several
// nodes. kPeers goes between nodes, among ranks with the same local index: V(sources) <-> V(nodes). kNode goes on
// inside a node: V(nodes) <-> V(experts).
enum class Level : uint8_t { kAll, kPeers, kNode };

struct Step {
  StepKind kind = StepKind::kCopy;
  comm::Axis axis = comm::Axis::kTp;  // kTp or kEp; set by the parser to the only choice where there is one
  Dim dim = Dim::kUnset;
  Placement to = Placement::kUnset;
  When when = When::kAlways;
  Level level = Level::kAll;  // of an exchange
  // Backward only: the transposed map of kDispatch, kCombine, kExperts, kExpand, kFold.
  bool transposed = false;
  int line = 0;  // in the file it came from, 1-based; 0: none
  friend bool operator==(const Step&, const Step&) = default;
};

struct Order {
  std::string name;
  std::string note;
  ExpertLayout expert_layout = ExpertLayout::kTensorParallel;
  AxisType input;   // of the tokens on TP: I, or V(tokens)
  AxisType output;  // likewise
  int chunks = 1;   // of each rank's experts; see OrderProto::chunks
  std::vector<Step> steps;
};

// A step with the type of the value before and after it.
struct TypedStep {
  Step step;
  ValueType before;
  ValueType after;
  int origin = 0;  // 1-based number of the step in Order::steps that it is or was derived from
};

// A well-typed order for one expert layout, with its derived backward program.
struct TypedOrder {
  Order order;
  ExpertLayout layout = ExpertLayout::kTensorParallel;  // never kAny
  std::vector<TypedStep> forward;
  std::vector<TypedStep> backward;  // gradient types, from the output's gradient to the input's

  // True when some value has no padding, so that sizes are known only after routing.
  bool is_ragged() const;
  // True when tokens travel once per destination and are folded there.
  bool is_deduplicated() const;
  // True when they travel once per node that has one, and are passed on there.
  bool sends_once_per_node() const;
  // True when some exchange goes level by level, so that the layer needs a group for each.
  bool has_levels() const;
  // The TP type of the rows that are multiplied by the route weights, in combine or in fold: that of the weights'
  // gradient.
  AxisType weighted_rows() const;
};

inline bool IsExchange(StepKind kind) { return kind == StepKind::kAllToAll || kind == StepKind::kAllToAllV; }

// The steps that an order with chunks runs chunk by chunk: from the first exchange to the last.
struct ChunkedSteps {
  int first = 0;
  int end = 0;  // equal to `first` when there is no exchange
  bool holds(int index) const { return index >= first && index < end; }
};
ChunkedSteps ChunkedStepsOf(const std::vector<TypedStep>& program);

// "I", "R", "V", "P".
absl::string_view PlacementLetter(Placement placement);
// "tokens", "slots", ...
absl::string_view DimName(Dim dim);
// "slice", "all_gather", ...
absl::string_view StepKindName(StepKind kind);
// "tensor_parallel", "whole", "any".
absl::string_view ExpertLayoutName(ExpertLayout layout);
// "all", "peers", "node".
absl::string_view LevelName(Level level);
// "I", "V(slots)".
std::string TypeName(const AxisType& type);
// "slots tp=V(slots) ep=V(experts)".
std::string TypeName(const ValueType& type);
// "all_gather(tp, slots)->R", "experts", "dispatch'(slots)", "all_to_all_v(ep.peers)".
std::string StepName(const Step& step);

// The type of the gradient of a value of this type.
AxisType GradientType(const AxisType& type);
ValueType GradientType(const ValueType& type);

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_ORDER_H_
