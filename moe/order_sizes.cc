#include "evenkeel/moe/order_sizes.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

// What goes elsewhere when rows are spread evenly over ranks, nodes and local indices.
void SpreadEvenly(const OrderSizes& sizes, RaggedRows* rows) {
  const int64_t per_rank = rows->sent / sizes.ep, per_index = rows->sent / sizes.per_node();
  rows->arrived = rows->middle = rows->sent;
  rows->sent_remote = rows->arrived_remote = per_rank * (sizes.ep - 1);
  rows->sent_far = rows->arrived_far = rows->middle_far = per_rank * (sizes.ep - sizes.per_node());
  rows->arrived_across = rows->middle_across = per_index * (sizes.per_node() - 1);
}

constexpr int64_t RaggedRows::*kRowFields[] = {
    &RaggedRows::sent,           &RaggedRows::sent_remote,   &RaggedRows::sent_far,       &RaggedRows::arrived,
    &RaggedRows::arrived_remote, &RaggedRows::arrived_far,   &RaggedRows::arrived_across, &RaggedRows::middle,
    &RaggedRows::middle_far,     &RaggedRows::middle_across, &RaggedRows::gathered,       &RaggedRows::gathered_before};

// The part of each number that experts [begin, begin + size) of `of` have: parts of all chunks add up.
RaggedRows ShareOf(const RaggedRows& rows, const ExpertRange& range, int64_t of) {
  RaggedRows share;
  for (int64_t RaggedRows::*field : kRowFields) {
    const auto up_to = [&](int64_t experts) {
      return static_cast<int64_t>(static_cast<__int128>(rows.*field) * experts / std::max<int64_t>(1, of));
    };
    share.*field = up_to(range.begin + range.size) - up_to(range.begin);
  }
  // Rounding must not push a lane's rows out of those of all lanes.
  share.gathered = std::max(share.gathered, share.arrived);
  share.gathered_before = std::min(share.gathered_before, share.gathered - share.arrived);
  return share;
}

// The chance that none of k distinct random experts is among `here` of all.
double ChanceOfNone(const OrderSizes& sizes, int64_t here) {
  double none = 1;
  for (int64_t j = 0; j < sizes.top_k && j < sizes.experts; ++j) {
    none *=
        static_cast<double>(std::max<int64_t>(0, sizes.experts - here - j)) / static_cast<double>(sizes.experts - j);
  }
  return none;
}

}  // namespace

RaggedRows& RaggedRows::operator+=(const RaggedRows& other) {
  for (int64_t RaggedRows::*field : kRowFields) this->*field += other.*field;
  return *this;
}

bool DispatchesOwnTokens(const TypedOrder& order) {
  for (const TypedStep& typed : order.forward) {
    if (typed.step.kind == StepKind::kDispatch) return IsVarying(typed.before.tp);
  }
  return false;
}

absl::Status CheckOrderSizes(const TypedOrder& order, const OrderSizes& sizes) {
  const int64_t extents[] = {sizes.tokens, sizes.hidden, sizes.experts, sizes.top_k, sizes.capacity, sizes.ffn};
  if (*std::min_element(std::begin(extents), std::end(extents)) < 0 || sizes.tp < 1 || sizes.ep < 1) {
    return absl::InvalidArgumentError(absl::StrCat("order sizes must not be negative: tokens ", sizes.tokens,
                                                   ", hidden ", sizes.hidden, ", experts ", sizes.experts, ", top_k ",
                                                   sizes.top_k, ", capacity ", sizes.capacity, ", ffn ", sizes.ffn,
                                                   ", tp ", sizes.tp, ", ep ", sizes.ep));
  }
  if (sizes.lane < 0 || sizes.lane >= sizes.tp) {
    return absl::InvalidArgumentError(absl::StrCat("lane ", sizes.lane, " is not in a TP group of ", sizes.tp));
  }
  if (sizes.experts % sizes.ep != 0) {
    return absl::InvalidArgumentError(absl::StrCat(sizes.experts, " experts are not divisible by ep ", sizes.ep));
  }
  if (sizes.ep_per_node < 0 || sizes.ep % sizes.per_node() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ep ", sizes.ep, " is not divisible by ", sizes.ep_per_node, " ranks of it per node"));
  }
  // One chunk may be of no experts at all.
  if (order.order.chunks > std::max<int64_t>(1, sizes.experts / sizes.ep)) {
    return absl::InvalidArgumentError(absl::StrCat("order '", order.order.name, "' wants ", order.order.chunks,
                                                   " chunks of a rank's experts; there are ",
                                                   sizes.experts / sizes.ep));
  }
  if (!order.is_ragged() && sizes.capacity % sizes.tp != 0) {
    return absl::InvalidArgumentError(absl::StrCat("capacity ", sizes.capacity, " is not a multiple of tp ", sizes.tp));
  }
  // The largest product anywhere below: rows * width * element, a few times over.
  EK_ASSIGN_OR_RETURN(int64_t padded, CheckedMul(sizes.experts, sizes.capacity));
  EK_ASSIGN_OR_RETURN(int64_t routed, CheckedMul(sizes.tokens, std::max<int64_t>(1, sizes.top_k)));
  int64_t rows = std::max(padded, routed);
  for (const std::optional<RaggedRows>* flow : {&sizes.rows, &sizes.destinations, &sizes.nodes}) {
    if (!flow->has_value()) continue;
    rows = std::max({rows, (*flow)->gathered, (*flow)->arrived, (*flow)->sent, (*flow)->middle});
  }
  EK_ASSIGN_OR_RETURN(int64_t elements, CheckedMul(rows, std::max(sizes.hidden, sizes.ffn)));
  EK_ASSIGN_OR_RETURN(int64_t group, CheckedMul(elements, int64_t{sizes.tp} * sizes.ep));
  return CheckedMul(group, 64 * 8).status();
}

RaggedRows RowsOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.rows.has_value()) return *sizes.rows;
  const bool own = DispatchesOwnTokens(order);
  // Where tokens are deduplicated these are records, and each lane tells of all lanes' tokens.
  const bool all = !own || (order.is_deduplicated() && order.layout == ExpertLayout::kTensorParallel);
  const int64_t tokens = all ? sizes.tokens : OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size();
  RaggedRows rows;
  rows.sent = tokens * sizes.top_k;
  SpreadEvenly(sizes, &rows);
  rows.gathered = own && order.layout == ExpertLayout::kTensorParallel ? sizes.tokens * sizes.top_k : rows.arrived;
  rows.gathered_before = OwnTokens(sizes.tokens, sizes.tp, sizes.lane).begin * sizes.top_k;
  return rows;
}

RaggedRows DestinationsOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.destinations.has_value()) return *sizes.destinations;
  const bool own = DispatchesOwnTokens(order);
  const double none = ChanceOfNone(sizes, sizes.experts / sizes.ep);
  const auto rows_of = [&](int64_t tokens) {
    return static_cast<int64_t>(static_cast<double>(tokens) * sizes.ep * (1 - none) + 0.5);
  };
  const TokenRange tokens = OwnTokens(sizes.tokens, sizes.tp, sizes.lane);
  RaggedRows rows;
  rows.sent = rows_of(own ? tokens.size() : sizes.tokens);
  SpreadEvenly(sizes, &rows);
  const bool gathers = own && order.layout == ExpertLayout::kTensorParallel;
  rows.gathered = gathers ? rows_of(sizes.tokens) : rows.arrived;
  rows.gathered_before = gathers ? rows_of(tokens.begin) : 0;
  return rows;
}

RaggedRows NodesOrExpected(const TypedOrder& order, const OrderSizes& sizes) {
  if (sizes.nodes.has_value()) return *sizes.nodes;
  const int64_t nodes = sizes.num_nodes();
  const int64_t tokens =
      DispatchesOwnTokens(order) ? OwnTokens(sizes.tokens, sizes.tp, sizes.lane).size() : sizes.tokens;
  const double some = 1 - ChanceOfNone(sizes, sizes.experts / nodes);
  RaggedRows rows;
  rows.sent = rows.middle = static_cast<int64_t>(static_cast<double>(tokens * nodes) * some + 0.5);
  rows.sent_far = rows.middle_far = rows.sent / nodes * (nodes - 1);
  return rows;
}

DType ElementType(Dim form, DType dtype, bool backward) {
  const bool sums =
      form == (backward ? Dim::kDestinations : Dim::kSums) || form == (backward ? Dim::kNodes : Dim::kNodeSums);
  return sums ? WideDType(dtype) : dtype;
}

OrderRows::OrderRows(const TypedOrder& order, const OrderSizes& sizes)
    : sizes_(sizes),
      rows_(RowsOrExpected(order, sizes)),
      destinations_(DestinationsOrExpected(order, sizes)),
      nodes_(NodesOrExpected(order, sizes)),
      chunks_(sizes.chunk_rows) {
  sizes_.chunks = order.order.chunks;
  if (sizes_.chunks == 1) chunks_ = {rows_};
  const int64_t local = sizes.experts / sizes.ep;
  for (int chunk = 0; chunk < sizes_.chunks && static_cast<int>(chunks_.size()) < sizes_.chunks; ++chunk) {
    chunks_.push_back(ShareOf(rows_, ChunkOfExperts(local, sizes_.chunks, chunk), local));
  }
}

const RaggedRows& OrderRows::Flow(Dim form, int chunk) const {
  if (form == Dim::kNodes || form == Dim::kNodeSums) return nodes_;
  if (form != Dim::kRows) return destinations_;
  return chunk == kAllChunks ? rows_ : chunks_[chunk];
}

RowCount OrderRows::Count(const ValueType& type, int chunk) const {
  const int64_t E = sizes_.ep, L = sizes_.per_node();
  if (type.form == Dim::kTokens) {
    return {.rows = IsVarying(type.tp) ? OwnTokens(sizes_.tokens, sizes_.tp, sizes_.lane).size() : sizes_.tokens};
  }
  if (type.form == Dim::kSlots) {
    const int64_t local = sizes_.experts / E;
    const int64_t experts = chunk == kAllChunks ? local : ChunkOfExperts(local, sizes_.chunks, chunk).size;
    const int64_t per_rank = experts * (sizes_.capacity / (IsVarying(type.tp) ? sizes_.tp : 1));
    return {.rows = per_rank * E,
            .remote = per_rank * (E - 1),
            .far = per_rank * (E - L),
            .across = per_rank * (E - E / L)};
  }
  const RaggedRows& flow = Flow(type.form, chunk);
  if (type.ep.dim == Dim::kNodes) {
    return {.rows = flow.middle, .far = flow.middle_far, .across = flow.middle_across};
  }
  if (type.ep.dim != Dim::kExperts) return {.rows = flow.sent, .remote = flow.sent_remote, .far = flow.sent_far};
  if (type.tp.dim != Dim::kUnset && !IsVarying(type.tp)) return {.rows = flow.gathered};
  return {.rows = flow.arrived, .remote = flow.arrived_remote, .far = flow.arrived_far, .across = flow.arrived_across};
}

}  // namespace evenkeel::moe
