#include "evenkeel/zero3/policy_layouts.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/zero3/parameter_spec.h"
#include "evenkeel/zero3/unit_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

ParameterSpec Parameter(int64_t elements, DType dtype, bool trainable) {
  ParameterSpec spec;
  spec.name = absl::StrCat("p", elements);
  spec.shape = Shape({elements});
  spec.dtype = dtype;
  spec.trainable = trainable;
  return spec;
}

// What UnitLayout promises, for any policy.
void CheckLayout(const std::vector<ParameterSpec>& parameters, const UnitLayout& layout) {
  std::vector<int64_t> next(parameters.size(), 0);
  std::vector<int64_t> sums(parameters.size(), 0);
  for (size_t r = 0; r < layout.fragments.size(); ++r) {
    int64_t gradient_end = 0;
    int64_t weight_end = 0;
    for (const ShardFragment& f : layout.fragments[r]) {
      const size_t p = static_cast<size_t>(f.parameter);
      const int64_t size = SizeOf(parameters[p].dtype);
      ASSERT_GE(f.count, 1);
      if (!layout.replicated) {
        ASSERT_EQ(f.begin, next[p]);
      }
      next[p] = f.begin + f.count;
      sums[p] += f.count;
      ASSERT_EQ(f.weight_offset % size, 0);
      ASSERT_GE(f.weight_offset, weight_end);
      weight_end = f.weight_offset + f.count * size;
      ASSERT_LE(weight_end, layout.shard_bytes);
      ASSERT_EQ(f.gradient_offset >= 0, parameters[p].trainable);
      if (f.gradient_offset < 0) continue;
      ASSERT_GE(f.gradient_offset, gradient_end);
      gradient_end = f.gradient_offset + f.count;
      ASSERT_LE(gradient_end, layout.gradient_counts[r]);
    }
  }
  const int64_t copies = layout.replicated ? layout.world_size : 1;
  for (size_t p = 0; p < parameters.size(); ++p) EXPECT_EQ(sums[p], copies * parameters[p].num_elements());
  if (!layout.gradient_is_rank_major || layout.replicated) return;
  int64_t start = 0;
  for (size_t r = 0; r < layout.fragments.size(); ++r) {
    for (const ShardFragment& f : layout.fragments[r]) {
      if (f.gradient_offset < 0) continue;
      ASSERT_EQ(start + f.gradient_offset, layout.gradient_starts[static_cast<size_t>(f.parameter)] + f.begin);
    }
    start += layout.gradient_counts[r];
  }
  EXPECT_EQ(start, layout.gradient_elements);
}

// Frozen, empty, tiny and mixed-dtype parameters in one unit.
TEST(PolicyLayoutsTest, Trail77_EveryMixIsAPartition) {
  for (int world = 1; world <= 8; ++world) {
    for (int64_t n = 0; n <= 2 * world + 1; ++n) {
      const std::vector<std::vector<ParameterSpec>> units = {
          {Parameter(n, DType::kF32, true)},
          {Parameter(n, DType::kBF16, true), Parameter(5, DType::kBF16, true), Parameter(0, DType::kBF16, true)},
          {Parameter(3, DType::kBF16, false), Parameter(n, DType::kF32, true), Parameter(1, DType::kBF16, true)},
          {Parameter(n, DType::kF32, false), Parameter(7, DType::kF32, true), Parameter(n, DType::kF32, false)},
          {Parameter(n, DType::kF32, false)},
      };
      for (const auto& unit : units) {
        int64_t bytes = 0;
        for (const ParameterSpec& spec : unit) bytes += spec.num_bytes();
        ASSERT_OK_AND_ASSIGN(const UnitLayout flat, FlatUnitLayout(unit, world));
        CheckLayout(unit, flat);
        ASSERT_OK_AND_ASSIGN(const UnitLayout each, PerParameterUnitLayout(unit, world));
        CheckLayout(unit, each);
        EXPECT_EQ(each.gathered_bytes, bytes);
        EXPECT_GE(flat.gathered_bytes, bytes);
        ASSERT_OK_AND_ASSIGN(const UnitLayout all, ReplicatedUnitLayout(unit, world));
        CheckLayout(unit, all);
        EXPECT_EQ(all.gathered_bytes, 0);
      }
    }
  }
}

TEST(PolicyLayoutsTest, UniformUnitsReduceInEqualShards) {
  const std::vector<ParameterSpec> unit = {Parameter(7, DType::kBF16, true), Parameter(6, DType::kBF16, true)};
  ASSERT_OK_AND_ASSIGN(const UnitLayout layout, FlatUnitLayout(unit, 3));
  EXPECT_EQ(layout.gathered_bytes, 30);  // 7 elements, one of padding, 6, one more to divide by 3
  for (int64_t count : layout.gradient_counts) EXPECT_EQ(count, 5);
}

// numel 5 over 4 ranks: shards of 2, 2, 1, 0; several ranks may own nothing.
TEST(PolicyLayoutsTest, Trail74_PerParameterShardsCutPadding) {
  const std::vector<ParameterSpec> unit = {Parameter(5, DType::kF32, true)};
  ASSERT_OK_AND_ASSIGN(const UnitLayout layout, PerParameterUnitLayout(unit, 4));
  std::vector<int64_t> counts;
  for (const auto& fragments : layout.fragments) counts.push_back(fragments.empty() ? 0 : fragments[0].count);
  EXPECT_THAT(counts, ::testing::ElementsAre(2, 2, 1, 0));
}

}  // namespace
}  // namespace evenkeel::zero3
