#include "evenkeel/moe/row_maps.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }

}  // namespace

std::vector<int32_t> RowMaps::PlanRows(const ValueType& type, const RowNesting& nesting) const {
  const RowExtents extents = ExtentsOf(type, sizes);
  if (!IsVarying(type.tp)) {
    return PermutationIndex({RowTag::kExpert, RowTag::kLane, RowTag::kSlot}, nesting, extents);
  }
  std::vector<int32_t> rows;
  rows.reserve(extents.experts * extents.slots);
  for (int64_t expert = 0; expert < extents.experts; ++expert) {
    const int64_t first = expert * sizes.capacity + sizes.lane * extents.slots;
    for (int64_t slot = 0; slot < extents.slots; ++slot) rows.push_back(static_cast<int32_t>(first + slot));
  }
  return rows;
}

std::vector<int32_t> RowMaps::TokenOfRow(const ValueType& type, const RowNesting& nesting) const {
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

std::vector<int32_t> RowMaps::Permutation(const ValueType& type, const RowNesting& from, const RowNesting& to) const {
  if (!ragged) return PermutationIndex(from, to, ExtentsOf(type, sizes));
  const bool to_groups = to.front() == RowTag::kExpert;
  return to_groups ? receive.arrival_of_expert_row : receive.expert_row_of_arrival;
}

std::vector<int64_t> RowMaps::RowsOfExpert(const ValueType& type) const {
  if (deduplicated) return dedup_receive.rows_of_expert;
  if (ragged) return receive.rows_of_expert;
  const RowExtents extents = ExtentsOf(type, sizes);
  const int64_t lanes = IsVarying(type.tp) ? 1 : extents.lanes;
  return std::vector<int64_t>(extents.experts, extents.sources * lanes * extents.slots);
}

}  // namespace evenkeel::moe
