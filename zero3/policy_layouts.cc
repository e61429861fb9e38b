#include "evenkeel/zero3/policy_layouts.h"

#include <algorithm>

#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

// Starts of packed gradients, in elements: 16 bytes of f32.
constexpr int64_t kGradientAlignment = 4;

bool IsUniform(absl::Span<const ParameterSpec> parameters) {
  for (const ParameterSpec& spec : parameters) {
    if (!spec.trainable || spec.dtype != parameters[0].dtype) return false;
  }
  return true;
}

void PackGradients(absl::Span<const ParameterSpec> parameters, UnitLayout& layout) {
  int64_t end = 0;
  for (const ParameterSpec& spec : parameters) {
    if (!spec.trainable) {
      layout.gradient_starts.push_back(-1);
      continue;
    }
    layout.gradient_starts.push_back(end);
    end += (spec.num_elements() + kGradientAlignment - 1) / kGradientAlignment * kGradientAlignment;
  }
  layout.gradient_elements = end;
}

// Gradients mirror the weights: same element offsets, same cuts.
void MirrorGradients(const FlatLayout& flat, int64_t element_bytes, int world_size, UnitLayout& layout) {
  for (int i = 0; i < flat.num_items(); ++i) layout.gradient_starts.push_back(flat.offset_bytes(i) / element_bytes);
  layout.gradient_elements = flat.total_bytes() / element_bytes;
  layout.gradient_counts.assign(static_cast<size_t>(world_size), flat.shard_bytes() / element_bytes);
  for (auto& fragments : layout.fragments) {
    for (ShardFragment& f : fragments) f.gradient_offset = f.weight_offset / element_bytes;
  }
}

// Rank r's gradients begin at its first trainable element, so that the packed buffer is the shards back to back.
void CutPackedGradients(absl::Span<const ParameterSpec> parameters, UnitLayout& layout) {
  PackGradients(parameters, layout);
  layout.gradient_counts.assign(layout.fragments.size(), 0);
  int64_t end = layout.gradient_elements;
  for (size_t r = layout.fragments.size(); r-- > 0;) {
    int64_t begin = r == 0 ? 0 : end;
    for (const ShardFragment& f : layout.fragments[r]) {
      const int64_t start = layout.gradient_starts[static_cast<size_t>(f.parameter)];
      if (start >= 0) begin = std::min(begin, start + f.begin);
    }
    for (ShardFragment& f : layout.fragments[r]) {
      const int64_t start = layout.gradient_starts[static_cast<size_t>(f.parameter)];
      f.gradient_offset = start < 0 ? -1 : start + f.begin - begin;
    }
    layout.gradient_counts[r] = end - begin;
    end = begin;
  }
}

}  // namespace

DType GradientDType(const ParameterSpec& spec) { return spec.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

std::vector<FlatItem> FlatItems(absl::Span<const ParameterSpec> parameters) {
  std::vector<FlatItem> items;
  for (const ParameterSpec& spec : parameters) items.push_back({spec.num_elements(), spec.dtype});
  return items;
}

absl::StatusOr<UnitLayout> FlatUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size) {
  EK_ASSIGN_OR_RETURN(const FlatLayout flat, FlatLayout::Create(FlatItems(parameters), world_size));
  UnitLayout layout;
  layout.world_size = world_size;
  layout.shard_bytes = flat.shard_bytes();
  layout.gathered_bytes = flat.total_bytes();
  layout.planned_memory = true;
  layout.gradient_is_rank_major = true;
  for (int r = 0; r < world_size; ++r) {
    layout.fragments.emplace_back();
    for (const FlatRange& range : flat.Ranges(r)) {
      layout.fragments.back().push_back({range.item, range.begin, range.count, range.shard_offset, -1});
    }
  }
  if (!parameters.empty() && IsUniform(parameters)) {
    MirrorGradients(flat, SizeOf(parameters[0].dtype), world_size, layout);
  } else {
    CutPackedGradients(parameters, layout);
  }
  return layout;
}

absl::StatusOr<UnitLayout> PerParameterUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size) {
  UnitLayout layout;
  layout.world_size = world_size;
  layout.fragments.resize(static_cast<size_t>(world_size));
  int64_t shard_end = 0;
  int64_t gradient_end = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const ParameterSpec& spec = parameters[p];
    const int64_t size = SizeOf(spec.dtype);
    const int64_t shard = CeilDiv(spec.num_elements(), world_size);
    EK_ASSIGN_OR_RETURN(const int64_t weight_offset, CheckedRoundUp(shard_end, size));
    for (int r = 0; r < world_size; ++r) {
      const int64_t begin = std::min(spec.num_elements(), r * shard);
      const int64_t count = std::min(spec.num_elements(), begin + shard) - begin;
      if (count == 0) continue;
      layout.fragments[static_cast<size_t>(r)].push_back(
          {static_cast<int>(p), begin, count, weight_offset, spec.trainable ? gradient_end : -1});
    }
    EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(shard, size));
    EK_ASSIGN_OR_RETURN(shard_end, CheckedAdd(weight_offset, bytes));
    layout.gathered_bytes += spec.num_bytes();
    if (spec.trainable) gradient_end += shard;
  }
  EK_ASSIGN_OR_RETURN(layout.shard_bytes, CheckedRoundUp(shard_end, 8));
  PackGradients(parameters, layout);
  layout.gradient_counts.assign(static_cast<size_t>(world_size), gradient_end);
  return layout;
}

absl::StatusOr<UnitLayout> ReplicatedUnitLayout(absl::Span<const ParameterSpec> parameters, int world_size) {
  EK_ASSIGN_OR_RETURN(UnitLayout layout, FlatUnitLayout(parameters, 1));
  layout.world_size = world_size;
  layout.replicated = true;
  layout.planned_memory = false;
  layout.gathered_bytes = 0;
  layout.fragments.resize(static_cast<size_t>(world_size), layout.fragments[0]);
  layout.gradient_counts.assign(static_cast<size_t>(world_size), layout.gradient_counts[0]);
  return layout;
}

}  // namespace evenkeel::zero3
