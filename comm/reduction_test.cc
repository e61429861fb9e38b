#include "evenkeel/comm/reduction.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The order of the tree as text, made by the stated rule alone.
std::string TreeText(int begin, int length) {
  if (length == 1) return absl::StrCat(begin);
  int split = 1;
  while (2 * split < length) split *= 2;
  return absl::StrCat("(", TreeText(begin, split), " ", TreeText(begin + split, length - split), ")");
}

TEST(ReductionTest, TreeShape) {
  EXPECT_EQ(TreeText(0, 3), "((0 1) 2)");
  EXPECT_EQ(TreeText(0, 5), "(((0 1) (2 3)) 4)");
  EXPECT_EQ(TreeText(0, 6), "(((0 1) (2 3)) (4 5))");
  EXPECT_EQ(TreeText(0, 7), "(((0 1) (2 3)) ((4 5) 6))");
  for (int length = 2; length < 40; ++length) {
    const int split = CanonicalSplit(length);
    EXPECT_LT(split, length);
    EXPECT_GE(2 * split, length);
    EXPECT_EQ(split & (split - 1), 0);
  }
}

// The oracle: one element at a time, by the rule, in the accumulator type.
template <typename A>
A Combine(ReduceOp op, A a, A b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      if constexpr (std::is_integral_v<A>) {  // wraps
        return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
      }
      return static_cast<A>(a + b);
    case ReduceOp::kMax:
      if constexpr (std::is_floating_point_v<A>) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
        if (a == b) return std::signbit(a) ? b : a;
      }
      return a > b ? a : b;
    case ReduceOp::kMin:
      if constexpr (std::is_floating_point_v<A>) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
        if (a == b) return std::signbit(a) ? a : b;
      }
      return a < b ? a : b;
    case ReduceOp::kBitOr:
      if constexpr (std::is_integral_v<A>) return static_cast<A>(a | b);
  }
  return a;
}

template <typename A>
A Tree(ReduceOp op, const std::vector<A>& values, int begin, int length) {
  if (length == 1) return values[begin];
  int split = 1;
  while (2 * split < length) split *= 2;
  return Combine(op, Tree(op, values, begin, split), Tree(op, values, begin + split, length - split));
}

template <typename T>
auto Wide(T value) {
  if constexpr (std::is_same_v<T, BF16> || std::is_same_v<T, F16>) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}

template <typename T>
T Oracle(ReduceOp op, const std::vector<std::vector<T>>& sources, int64_t i) {
  using A = decltype(Wide(T()));
  std::vector<A> values;
  for (const auto& source : sources) values.push_back(Wide(source[i]));
  A value = Tree(op, values, 0, static_cast<int>(values.size()));
  if constexpr (std::is_floating_point_v<A>) {
    if (op == ReduceOp::kAvg && values.size() > 1) value /= static_cast<A>(values.size());
  }
  return T(value);
}

template <typename T>
bool SameBitsOrNan(T a, T b) {
  if constexpr (!std::is_integral_v<T>) {
    if (std::isnan(static_cast<double>(Wide(a)))) return std::isnan(static_cast<double>(Wide(b)));
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

// Unique by rank and position; wide spread, so that the order of additions shows.
template <typename T>
T Value(int rank, int64_t i) {
  const PhiloxStream random{PhiloxKey(7).Add(static_cast<uint64_t>(rank))};
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random.Bits64(i));
  } else {
    const double scale = std::ldexp(1.0, static_cast<int>(random.Below(2 * i, 16)) - 8);
    return T(static_cast<float>(random.Normal(i) * scale));
  }
}

template <typename T>
void CheckAllSizes(DType dtype) {
  for (int ranks = 1; ranks <= 20; ++ranks) {
    for (const int64_t n : {0, 1, 3, 17, 1024, 1025, 2500}) {
      std::vector<std::vector<T>> sources(ranks, std::vector<T>(n));
      std::vector<const void*> pointers;
      for (int r = 0; r < ranks; ++r) {
        for (int64_t i = 0; i < n; ++i) sources[r][i] = Value<T>(r, i);
        pointers.push_back(sources[r].data());
      }
      for (const ReduceOp op : kAllReduceOps) {
        if (!CheckReduction(dtype, op).ok()) continue;
        std::vector<T> out(n + 1, Value<T>(99, 0));
        ReduceCanonical(dtype, op, pointers, out.data(), n);
        for (int64_t i = 0; i < n; ++i) {
          ASSERT_TRUE(SameBitsOrNan(out[i], Oracle(op, sources, i)))
              << DTypeName(dtype) << " " << ReduceOpName(op) << " " << ranks << " ranks, element " << i << " of " << n;
        }
        const T guard = Value<T>(99, 0);
        ASSERT_EQ(std::memcmp(&out[n], &guard, sizeof(T)), 0);
      }
    }
  }
}

TEST(ReductionTest, F32MatchesTheOracle) { CheckAllSizes<float>(DType::kF32); }
TEST(ReductionTest, F64MatchesTheOracle) { CheckAllSizes<double>(DType::kF64); }
TEST(ReductionTest, C17_BF16AccumulatesInF32) { CheckAllSizes<BF16>(DType::kBF16); }
TEST(ReductionTest, C17_F16AccumulatesInF32) { CheckAllSizes<F16>(DType::kF16); }
TEST(ReductionTest, I32Wraps) { CheckAllSizes<int32_t>(DType::kI32); }
TEST(ReductionTest, I64Wraps) { CheckAllSizes<int64_t>(DType::kI64); }
TEST(ReductionTest, U8Wraps) { CheckAllSizes<uint8_t>(DType::kU8); }

TEST(ReductionTest, InPlaceOnEverySource) {
  for (int ranks = 2; ranks <= 9; ++ranks) {
    for (int in_place = 0; in_place < ranks; ++in_place) {
      constexpr int64_t kN = 1500;
      std::vector<std::vector<float>> sources(ranks, std::vector<float>(kN));
      std::vector<const void*> pointers;
      for (int r = 0; r < ranks; ++r) {
        for (int64_t i = 0; i < kN; ++i) sources[r][i] = Value<float>(r, i);
        pointers.push_back(sources[r].data());
      }
      std::vector<float> apart(kN);
      ReduceCanonical(DType::kF32, ReduceOp::kSum, pointers, apart.data(), kN);
      ReduceCanonical(DType::kF32, ReduceOp::kSum, pointers, sources[in_place].data(), kN);
      EXPECT_EQ(std::memcmp(apart.data(), sources[in_place].data(), kN * sizeof(float)), 0);
    }
  }
}

// C15: any byte address.
TEST(ReductionTest, C15_UnalignedBuffers) {
  for (int offset = 0; offset < 16; ++offset) {
    constexpr int64_t kN = 100;
    std::vector<float> a(kN), b(kN), expected(kN);
    for (int64_t i = 0; i < kN; ++i) {
      a[i] = Value<float>(0, i);
      b[i] = Value<float>(1, i);
      expected[i] = a[i] + b[i];
    }
    std::vector<uint8_t> a_bytes(kN * 4 + 16), b_bytes(kN * 4 + 16), out(kN * 4 + 16);
    std::memcpy(a_bytes.data() + offset, a.data(), kN * 4);
    std::memcpy(b_bytes.data() + 15 - offset, b.data(), kN * 4);
    const void* const pointers[] = {a_bytes.data() + offset, b_bytes.data() + 15 - offset};
    ReduceCanonical(DType::kF32, ReduceOp::kSum, pointers, out.data() + 3, kN);
    EXPECT_EQ(std::memcmp(out.data() + 3, expected.data(), kN * 4), 0);
  }
}

// C16: NaN wins on every rank's position, +0 is above -0, infinities cancel to NaN.
TEST(ReductionTest, C16_NanWinsWhereverItSits) {
  for (int ranks = 2; ranks <= 9; ++ranks) {
    for (int odd = 0; odd < ranks; ++odd) {
      std::vector<float> values(ranks);
      std::vector<const void*> pointers;
      for (int r = 0; r < ranks; ++r) {
        values[r] = r == odd ? kNan : static_cast<float>(r) - 2;
        pointers.push_back(&values[r]);
      }
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg}) {
        float out = 0;
        ReduceCanonical(DType::kF32, op, pointers, &out, 1);
        EXPECT_TRUE(std::isnan(out)) << ReduceOpName(op) << " NaN on rank " << odd << " of " << ranks;
      }
    }
  }
}

TEST(ReductionTest, C16_ZerosAndInfinities) {
  const auto reduce = [](ReduceOp op, float a, float b) {
    const void* const pointers[] = {&a, &b};
    float out = 1;
    ReduceCanonical(DType::kF32, op, pointers, &out, 1);
    return out;
  };
  EXPECT_FALSE(std::signbit(reduce(ReduceOp::kMax, -0.0f, 0.0f)));
  EXPECT_FALSE(std::signbit(reduce(ReduceOp::kMax, 0.0f, -0.0f)));
  EXPECT_TRUE(std::signbit(reduce(ReduceOp::kMin, -0.0f, 0.0f)));
  EXPECT_TRUE(std::signbit(reduce(ReduceOp::kMin, 0.0f, -0.0f)));
  EXPECT_EQ(reduce(ReduceOp::kMax, -kInf, 3.0f), 3.0f);
  EXPECT_EQ(reduce(ReduceOp::kMin, kInf, 3.0f), 3.0f);
  EXPECT_TRUE(std::isnan(reduce(ReduceOp::kSum, kInf, -kInf)));
  EXPECT_EQ(reduce(ReduceOp::kSum, kInf, 1.0f), kInf);
}

// C17: adversarial sums that 16-bit hops would lose, and an average that must not overflow before dividing.
TEST(ReductionTest, C17_RoundsOnceAndAveragesWithoutOverflow) {
  const BF16 values[] = {BF16(1e4f), BF16(-1e4f), BF16(1.0f), BF16(0.0f)};
  const void* const pointers[] = {&values[0], &values[1], &values[2], &values[3]};
  BF16 out;
  ReduceCanonical(DType::kBF16, ReduceOp::kSum, pointers, &out, 1);
  EXPECT_EQ(static_cast<float>(out), 1.0f);
  const BF16 small[] = {BF16(256.0f), BF16(1.0f), BF16(1.0f), BF16(0.0f)};  // 256 + 1 is 256 in bf16
  const void* const small_pointers[] = {&small[0], &small[1], &small[2], &small[3]};
  ReduceCanonical(DType::kBF16, ReduceOp::kSum, small_pointers, &out, 1);
  EXPECT_EQ(static_cast<float>(out), 258.0f);
  const F16 large[] = {F16(60000.0f), F16(60000.0f)};
  const void* const large_pointers[] = {&large[0], &large[1]};
  F16 half;
  ReduceCanonical(DType::kF16, ReduceOp::kAvg, large_pointers, &half, 1);
  EXPECT_EQ(static_cast<float>(half), static_cast<float>(F16(60000.0f)));
  ReduceCanonical(DType::kF16, ReduceOp::kSum, large_pointers, &half, 1);
  EXPECT_EQ(static_cast<float>(half), kInf);
}

TEST(ReductionTest, F16WidensEveryBitPattern) {
  std::vector<uint16_t> bits(65536);
  std::vector<uint16_t> zeros(65536, 0x8000);  // adding -0 keeps every value, -0 included
  for (int i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<uint16_t> out(65536);
  const void* const pointers[] = {bits.data(), zeros.data()};
  ReduceCanonical(DType::kF16, ReduceOp::kSum, pointers, out.data(), 65536);
  for (int i = 0; i < 65536; ++i) {
    F16 value;
    value.bits = bits[i];
    F16 result;
    result.bits = out[i];
    ASSERT_TRUE(SameBitsOrNan(value, result)) << i;
  }
}

// C18: cutting the range anywhere changes no bit.
TEST(ReductionTest, C18_ChunkingChangesNothing) {
  constexpr int64_t kN = 4099;
  for (const int ranks : {3, 5, 7, 8}) {
    std::vector<std::vector<float>> sources(ranks, std::vector<float>(kN));
    std::vector<const void*> pointers;
    for (int r = 0; r < ranks; ++r) {
      for (int64_t i = 0; i < kN; ++i) sources[r][i] = Value<float>(r, i);
      pointers.push_back(sources[r].data());
    }
    std::vector<float> whole(kN), parts(kN);
    ReduceCanonical(DType::kF32, ReduceOp::kSum, pointers, whole.data(), kN);
    for (const int64_t chunk : {1, 7, 100, 1024}) {
      for (int64_t begin = 0; begin < kN; begin += chunk) {
        std::vector<const void*> shifted;
        for (const auto& source : sources) shifted.push_back(source.data() + begin);
        ReduceCanonical(DType::kF32, ReduceOp::kSum, shifted, parts.data() + begin, std::min(chunk, kN - begin));
      }
      EXPECT_EQ(std::memcmp(whole.data(), parts.data(), kN * sizeof(float)), 0) << "chunk " << chunk;
    }
  }
}

// Subtrees reduced apart, then together: the bits of the whole tree.
TEST(ReductionTest, C18_PartialsGiveTheBitsOfTheWhole) {
  constexpr int64_t kN = 2050;
  for (const DType dtype : kAllDTypes) {
    for (const int nodes : {2, 3, 5, 6}) {
      for (const int per_node : {1, 2, 4, 8}) {
        std::vector<std::vector<uint8_t>> sources(nodes * per_node, std::vector<uint8_t>(kN * SizeOf(dtype)));
        std::vector<const void*> pointers;
        for (int r = 0; r < nodes * per_node; ++r) {
          for (int64_t i = 0; i < kN; ++i) {
            const float value = Value<float>(r, i);
            const BF16 narrow(value);
            const F16 half(value);
            const double wide = value * 1.0000001;
            const int64_t bits = Value<int64_t>(r, i);
            const void* const element = dtype == DType::kF32    ? static_cast<const void*>(&value)
                                        : dtype == DType::kBF16 ? static_cast<const void*>(&narrow)
                                        : dtype == DType::kF16  ? static_cast<const void*>(&half)
                                        : dtype == DType::kF64  ? static_cast<const void*>(&wide)
                                                                : static_cast<const void*>(&bits);
            std::memcpy(sources[r].data() + i * SizeOf(dtype), element, SizeOf(dtype));
          }
          pointers.push_back(sources[r].data());
        }
        for (const ReduceOp op : kAllReduceOps) {
          if (!CheckReduction(dtype, op).ok()) continue;
          std::vector<uint8_t> whole(kN * SizeOf(dtype)), joined(kN * SizeOf(dtype));
          ReduceCanonical(dtype, op, pointers, whole.data(), kN);
          std::vector<std::vector<uint8_t>> partials(nodes, std::vector<uint8_t>(kN * AccumulatorBytes(dtype)));
          std::vector<const void*> partial_pointers;
          for (int node = 0; node < nodes; ++node) {
            ReduceToPartial(dtype, op, absl::MakeSpan(pointers).subspan(node * per_node, per_node),
                            partials[node].data(), kN);
            partial_pointers.push_back(partials[node].data());
          }
          ReducePartials(dtype, op, partial_pointers, nodes * per_node, joined.data(), kN);
          EXPECT_EQ(whole, joined) << DTypeName(dtype) << " " << ReduceOpName(op) << " " << nodes << "x" << per_node;
        }
      }
    }
  }
}

TEST(ReductionTest, RefusesWhatIsNotOffered) {
  constexpr auto kBad = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(CheckReduction(DType::kF32, ReduceOp::kBitOr), StatusIs(kBad, HasSubstr("bitor is not offered for f32")));
  EXPECT_THAT(CheckReduction(DType::kI64, ReduceOp::kAvg), StatusIs(kBad, HasSubstr("avg is not offered for i64")));
  EXPECT_THAT(CheckReduction(DType::kF32, static_cast<ReduceOp>(9)), StatusIs(kBad, HasSubstr("operator 9")));
  EXPECT_OK(CheckReduction(DType::kU8, ReduceOp::kBitOr));
}

}  // namespace
}  // namespace evenkeel::comm
