#include "evenkeel/moe/row_maps.h"

#include <algorithm>
#include <utility>

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

// Sums of a table [outer][inner] over one of the two.
std::vector<int64_t> SumOverInner(absl::Span<const int64_t> table, int inner) {
  std::vector<int64_t> sums(table.size() / inner, 0);
  for (size_t i = 0; i < table.size(); ++i) sums[i / inner] += table[i];
  return sums;
}
std::vector<int64_t> SumOverOuter(absl::Span<const int64_t> table, int inner) {
  std::vector<int64_t> sums(inner, 0);
  for (size_t i = 0; i < table.size(); ++i) sums[i % inner] += table[i];
  return sums;
}

}  // namespace

std::vector<int32_t> RowMaps::PlanRows(const ValueType& type, const RowNesting& nesting) const {
  // The plan's experts are by rank, chunk, and place in the chunk; a value's by rank and place.
  RowExtents extents = ExtentsOf(type, sizes, sizes.chunks == 1 ? 0 : kAllChunks);
  extents.experts /= extents.sources;
  RowNesting by_rank;
  if (IsVarying(type.tp)) by_rank.push_back(RowTag::kLane);
  for (RowTag tag : nesting) {
    if (tag == RowTag::kExpert) by_rank.push_back(RowTag::kSource);
    by_rank.push_back(tag);
  }
  RowNesting plan = {RowTag::kSource, RowTag::kChunk, RowTag::kExpert, RowTag::kLane, RowTag::kSlot};
  if (sizes.chunks == 1) plan.erase(plan.begin() + 1);
  std::vector<int32_t> rows = PermutationIndex(plan, by_rank, extents);
  if (!IsVarying(type.tp)) return rows;
  const int64_t share = static_cast<int64_t>(rows.size()) / sizes.tp;
  return std::vector<int32_t>(rows.begin() + sizes.lane * share, rows.begin() + (sizes.lane + 1) * share);
}

std::vector<int32_t> RowMaps::TokenOfRow(const ValueType& type, const RowNesting& nesting) const {
  if (once_per_node) return node_send.token_of_row;
  if (deduplicated) return dedup_send.token_of_row;
  if (ragged) return send.token_of_row;
  std::vector<int32_t> rows = PlanRows(type, nesting);
  for (int32_t& row : rows) row = padded.token_of_row[row];
  return rows;
}

std::vector<int32_t> RowMaps::RowOfRoute(const ValueType& type, const RowNesting& nesting) const {
  if (ragged) return send.row_of_route;
  const std::vector<int32_t> rows = PlanRows(type, nesting);
  std::vector<int32_t> place(padded.num_rows(), -1);
  for (size_t i = 0; i < rows.size(); ++i) place[rows[i]] = static_cast<int32_t>(i);
  std::vector<int32_t> routes = padded.row_of_route;
  for (int32_t& route : routes) {
    if (route >= 0) route = place[route];
  }
  return routes;
}

RowLists RowMaps::RowsByExpert(const ValueType& type, const RowNesting& nesting, int64_t first_token,
                               const float* weights) const {
  const std::vector<int32_t> row_of_route = RowOfRoute(type, nesting);
  const int64_t k = sizes.top_k;
  RowLists lists;
  lists.width = k;
  lists.end_key = static_cast<int32_t>(sizes.experts);
  lists.rows.assign(row_of_route.size(), -1);
  lists.keys.assign(row_of_route.size(), 0);
  if (weights != nullptr) lists.weights.assign(row_of_route.size(), 0);
  std::vector<std::pair<int32_t, int64_t>> kept;  // (expert, own route)
  for (int64_t token = 0; token * k < static_cast<int64_t>(row_of_route.size()); ++token) {
    kept.clear();
    for (int64_t route = token * k; route < (token + 1) * k; ++route) {
      if (row_of_route[route] >= 0) kept.push_back({expert_of_route[first_token * k + route], route});
    }
    std::sort(kept.begin(), kept.end());
    for (size_t i = 0; i < kept.size(); ++i) {
      const int64_t entry = token * k + static_cast<int64_t>(i);
      lists.rows[entry] = row_of_route[kept[i].second];
      lists.keys[entry] = kept[i].first;
      if (weights != nullptr) lists.weights[entry] = weights[first_token * k + kept[i].second];
    }
  }
  return lists;
}

std::vector<int32_t> RowMaps::Permutation(const ValueType& type, const RowNesting& from, const RowNesting& to,
                                          int chunk) const {
  if (!ragged) return PermutationIndex(from, to, ExtentsOf(type, sizes, chunk));
  const bool to_groups = to.front() == RowTag::kExpert;
  return to_groups ? receive[chunk].arrival_of_expert_row : receive[chunk].expert_row_of_arrival;
}

absl::Span<const int64_t> RowMaps::RowsTo(int chunk) const {
  if (deduplicated) return dedup_send.rows_to;
  return absl::MakeConstSpan(send.rows_to).subspan(int64_t{chunk} * sizes.ep, sizes.ep);
}

absl::Span<const int64_t> RowMaps::RowsFrom(int chunk) const {
  return deduplicated ? dedup_receive.rows_from : receive[chunk].rows_from;
}

absl::Span<const int64_t> RowMaps::Middle(int chunk) const {
  return absl::MakeConstSpan(middle).subspan(int64_t{chunk} * sizes.ep, sizes.ep);
}

std::vector<int32_t> RowMaps::Regrouping(const ValueType& type, int chunk, bool back) const {
  if (ragged) {
    const auto counts = type.ep.dim == Dim::kNodes ? Middle(chunk) : RowsFrom(chunk);
    return BlockTransposeIndex(counts, sizes.per_node(), back);
  }
  const int64_t experts = ChunkOfExperts(sizes.experts / sizes.ep, sizes.chunks, chunk).size;
  const int64_t block = experts * (sizes.capacity / (IsVarying(type.tp) ? sizes.tp : 1));
  return BlockTransposeIndex(std::vector<int64_t>(sizes.ep, block), sizes.per_node(), back);
}

RowMaps::ExchangeCounts RowMaps::CountsOf(const ValueType& before, Level level, int chunk) const {
  const auto copy = [](absl::Span<const int64_t> counts) { return std::vector<int64_t>(counts.begin(), counts.end()); };
  const int L = sizes.per_node();
  ExchangeCounts counts;  // on the way out
  Dim source_end = Dim::kSources;
  switch (level) {
    case Level::kAll:
      counts = {copy(RowsTo(chunk)), copy(RowsFrom(chunk))};
      break;
    case Level::kPeers:
      if (before.form == Dim::kNodes || before.form == Dim::kNodeSums) {
        counts = {node_send.rows_to, node_middle.rows_from};
        break;
      }
      counts = {SumOverInner(RowsTo(chunk), L), SumOverInner(Middle(chunk), L)};
      break;
    case Level::kNode:
      counts = {SumOverOuter(Middle(chunk), L), SumOverOuter(RowsFrom(chunk), L)};
      source_end = Dim::kNodes;
      break;
  }
  if (before.ep.dim != source_end) std::swap(counts.sent, counts.received);
  return counts;
}

std::vector<int64_t> RowMaps::RowsOfExpert(const ValueType& type, int chunk) const {
  if (deduplicated) return dedup_receive.rows_of_expert;
  if (ragged) return receive[chunk].rows_of_expert;
  const RowExtents extents = ExtentsOf(type, sizes, chunk);
  const int64_t lanes = IsVarying(type.tp) ? 1 : extents.lanes;
  return std::vector<int64_t>(extents.experts, extents.sources * lanes * extents.slots);
}

}  // namespace evenkeel::moe
