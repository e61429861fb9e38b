#include "evenkeel/moe/row_nesting.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::moe {
namespace {

bool IsVarying(const AxisType& type) { return type.placement == Placement::kVarying; }
bool AtExperts(const ValueType& type) { return type.ep.dim == Dim::kExperts; }

// Which numbers of a nesting stand for a row: not those of experts that a smaller chunk does not have.
std::vector<bool> RealRows(const RowNesting& nesting, const RowExtents& extents, int64_t rows) {
  std::vector<bool> real(rows, true);
  if (extents.chunk_experts.empty()) return real;
  const int64_t largest = *std::max_element(extents.chunk_experts.begin(), extents.chunk_experts.end());
  std::vector<int64_t> at(nesting.size(), 0);
  const size_t chunk = std::find(nesting.begin(), nesting.end(), RowTag::kChunk) - nesting.begin();
  const size_t expert = std::find(nesting.begin(), nesting.end(), RowTag::kExpert) - nesting.begin();
  EK_CHECK(chunk < nesting.size() && expert < nesting.size());
  for (int64_t row = 0; row < rows; ++row) {
    real[row] = at[expert] % largest < extents.chunk_experts[at[chunk]];
    for (size_t i = nesting.size(); i-- > 0;) {
      if (++at[i] < extents.of(nesting[i])) break;
      at[i] = 0;
    }
  }
  return real;
}

}  // namespace

bool Holds(const RowNesting& nesting, RowTag tag) {
  return std::find(nesting.begin(), nesting.end(), tag) != nesting.end();
}

RowNesting Without(RowNesting nesting, RowTag tag) {
  nesting.erase(std::remove(nesting.begin(), nesting.end(), tag), nesting.end());
  return nesting;
}

RowNesting InFront(RowTag tag, RowNesting nesting) {
  nesting = Without(std::move(nesting), tag);
  nesting.insert(nesting.begin(), tag);
  return nesting;
}

RowNesting Grouped(const RowNesting& nesting) {
  RowNesting grouped = {RowTag::kExpert, RowTag::kSource};
  if (Holds(nesting, RowTag::kLane)) grouped.push_back(RowTag::kLane);
  grouped.push_back(RowTag::kSlot);
  return grouped;
}

RowNesting Customary(const ValueType& type) {
  if (type.form == Dim::kTokens) return {};
  const bool lanes = !IsVarying(type.tp) && (type.form == Dim::kSlots || type.tp.dim != Dim::kUnset);
  RowNesting nesting;
  if (lanes && type.form != Dim::kSlots) nesting.push_back(RowTag::kLane);
  if (AtExperts(type)) nesting.push_back(RowTag::kSource);
  nesting.push_back(RowTag::kExpert);
  if (lanes && type.form == Dim::kSlots) nesting.push_back(RowTag::kLane);
  nesting.push_back(RowTag::kSlot);
  return nesting;
}

std::string NestingName(const RowNesting& nesting) {
  return absl::StrJoin(nesting, ",", [](std::string* out, RowTag tag) {
    constexpr const char* kNames[] = {"lane", "source", "expert", "slot", "chunk"};
    out->append(kNames[static_cast<int>(tag)]);
  });
}

int64_t RowExtents::of(RowTag tag) const {
  switch (tag) {
    case RowTag::kLane:
      return lanes;
    case RowTag::kSource:
      return sources;
    case RowTag::kExpert:
      return experts;
    case RowTag::kSlot:
      return slots;
    case RowTag::kChunk:
      return chunks;
  }
  return 1;
}

RowExtents ExtentsOf(const ValueType& type, const OrderSizes& sizes, int chunk) {
  const int64_t local = sizes.experts / sizes.ep;
  RowExtents extents = {
      .lanes = sizes.tp, .sources = sizes.ep, .slots = sizes.capacity / sizes.tp, .chunks = sizes.chunks};
  extents.experts = ChunkOfExperts(local, sizes.chunks, std::max(0, chunk)).size;  // the first chunk is the largest
  if (!AtExperts(type)) extents.experts *= sizes.ep;
  if (chunk != kAllChunks || local % sizes.chunks == 0) return extents;
  for (int c = 0; c < sizes.chunks; ++c) extents.chunk_experts.push_back(ChunkOfExperts(local, sizes.chunks, c).size);
  return extents;
}

bool SameRows(const RowNesting& from, const RowNesting& to, const RowExtents& extents) {
  RowNesting a, b;
  std::copy_if(from.begin(), from.end(), std::back_inserter(a), [&](RowTag tag) { return extents.of(tag) != 1; });
  std::copy_if(to.begin(), to.end(), std::back_inserter(b), [&](RowTag tag) { return extents.of(tag) != 1; });
  return a == b;
}

std::vector<int32_t> PermutationIndex(const RowNesting& from, const RowNesting& to, const RowExtents& extents) {
  // The stride of each tag in `from`, in the nesting of `to`.
  std::vector<int64_t> stride(to.size(), 0), extent(to.size(), 1), at(to.size(), 0);
  int64_t rows = 1;
  for (size_t i = from.size(); i-- > 0;) {
    const auto place = std::find(to.begin(), to.end(), from[i]);
    EK_CHECK(place != to.end());
    stride[place - to.begin()] = rows;
    extent[place - to.begin()] = extents.of(from[i]);
    rows *= extents.of(from[i]);
  }
  std::vector<int32_t> index(rows);
  int64_t source = 0;
  for (int64_t row = 0; row < rows; ++row) {
    index[row] = static_cast<int32_t>(source);
    for (size_t i = to.size(); i-- > 0;) {
      source += stride[i];
      if (++at[i] < extent[i]) break;
      source -= stride[i] * extent[i];
      at[i] = 0;
    }
  }
  if (extents.chunk_experts.empty()) return index;
  // Leave out what is not there, and count without it.
  const std::vector<bool> real = RealRows(from, extents, rows);
  std::vector<int32_t> number(rows), compact;
  int32_t next = 0;
  for (int64_t row = 0; row < rows; ++row) number[row] = real[row] ? next++ : -1;
  for (int32_t row : index) {
    if (real[row]) compact.push_back(number[row]);
  }
  return compact;
}

std::vector<int32_t> BlockTransposeIndex(absl::Span<const int64_t> counts, int64_t inner, bool back) {
  const int64_t outer = inner == 0 ? 0 : static_cast<int64_t>(counts.size()) / inner;
  std::vector<int64_t> first(counts.size());
  int64_t rows = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    first[i] = rows;
    rows += counts[i];
  }
  std::vector<int32_t> index;
  index.reserve(rows);
  for (int64_t i = 0; i < inner; ++i) {
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t row = 0; row < counts[o * inner + i]; ++row) {
        index.push_back(static_cast<int32_t>(first[o * inner + i] + row));
      }
    }
  }
  if (!back) return index;
  std::vector<int32_t> inverse(rows);
  for (int64_t row = 0; row < rows; ++row) inverse[index[row]] = static_cast<int32_t>(row);
  return inverse;
}

}  // namespace evenkeel::moe
