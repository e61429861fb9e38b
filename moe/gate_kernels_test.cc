#include "evenkeel/moe/gate_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

std::vector<float> Values(int64_t n, absl::string_view name) {
  const PhiloxStream stream(PhiloxKey(11).Add(name));
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(stream.Normal(i));
  return values;
}

TensorView View(std::vector<float>& values, int64_t rows, int64_t columns) {
  return TensorView(values.data(), DType::kF32, {rows, columns});
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The documented order, one operation after the other.
float SixteenLanes(const float* a, const float* b, int64_t n) {
  float lane[16] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % 16] += a[i] * b[i];
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// Splits at the largest power of two below the number of blocks.
std::vector<float> TreeOfBlocks(const std::vector<std::vector<float>>& blocks, size_t begin, size_t end) {
  if (end - begin == 1) return blocks[begin];
  size_t half = 1;
  while (half * 2 < end - begin) half *= 2;
  std::vector<float> left = TreeOfBlocks(blocks, begin, begin + half);
  const std::vector<float> right = TreeOfBlocks(blocks, begin + half, end);
  for (size_t i = 0; i < left.size(); ++i) left[i] += right[i];
  return left;
}

struct Sizes {
  int64_t tokens, hidden, experts;
};
constexpr Sizes kSizes[] = {{0, 8, 4}, {1, 1, 1}, {3, 17, 5}, {130, 33, 7}, {900, 16, 9}, {64, 100, 64}};

// The result is the documented sequence of roundings, whatever vectors this machine has: so it is the same on all.
TEST(GateKernelsTest, LogitsFollowTheDocumentedOrderBitForBit) {
  for (const auto& [tokens, hidden, experts] : kSizes) {
    std::vector<float> x = Values(tokens * hidden, "x");
    std::vector<float> gate = Values(experts * hidden, "gate");
    std::vector<float> logits(tokens * experts, -1.0f);
    std::vector<float> expected(tokens * experts);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        expected[t * experts + e] = SixteenLanes(&x[t * hidden], &gate[e * hidden], hidden);
      }
    }
    GateLogits(View(x, tokens, hidden), View(gate, experts, hidden), {}, logits.data());
    EXPECT_TRUE(SameBits(logits, expected)) << tokens << " " << hidden << " " << experts;
  }
}

TEST(GateKernelsTest, ALogitDoesNotDependOnTheOtherTokens) {
  constexpr int64_t kTokens = 257, kHidden = 40, kExperts = 6;
  std::vector<float> x = Values(kTokens * kHidden, "x");
  std::vector<float> gate = Values(kExperts * kHidden, "gate");
  std::vector<float> all(kTokens * kExperts);
  GateLogits(View(x, kTokens, kHidden), View(gate, kExperts, kHidden), {}, all.data());
  for (const int64_t rows : {1, 2, 3, 5, 8, 127, 128, 129}) {
    std::vector<float> some(rows * kExperts);
    const int64_t first = kTokens - rows;
    GateLogits(View(x, kTokens, kHidden).Rows(first, rows), View(gate, kExperts, kHidden), {}, some.data());
    EXPECT_TRUE(SameBits(some, {all.begin() + first * kExperts, all.end()})) << rows;
  }
}

TEST(GateKernelsTest, GradientsFollowTheDocumentedOrderBitForBit) {
  for (const auto& [tokens, hidden, experts] : kSizes) {
    std::vector<float> x = Values(tokens * hidden, "x");
    std::vector<float> gate = Values(experts * hidden, "gate");
    const std::vector<float> dlogits = Values(tokens * experts, "dlogits");
    std::vector<float> dx = Values(tokens * hidden, "dx before");
    std::vector<float> dgate = Values(experts * hidden, "dgate before");
    std::vector<float> expected_dx = dx;
    std::vector<float> expected_dgate = dgate;
    std::vector<std::vector<float>> blocks;
    for (int64_t t = 0; t < tokens; ++t) {
      if (t % 128 == 0) blocks.emplace_back(experts * hidden, 0.0f);
      for (int64_t i = 0; i < hidden; ++i) {
        float sum = 0;
        for (int64_t e = 0; e < experts; ++e) {
          sum += gate[e * hidden + i] * dlogits[t * experts + e];
          blocks.back()[e * hidden + i] += x[t * hidden + i] * dlogits[t * experts + e];
        }
        expected_dx[t * hidden + i] += sum;
      }
    }
    if (!blocks.empty()) {
      const std::vector<float> total = TreeOfBlocks(blocks, 0, blocks.size());
      for (size_t i = 0; i < total.size(); ++i) expected_dgate[i] += total[i];
    }
    GateBackward(View(x, tokens, hidden), View(gate, experts, hidden), {}, dlogits.data(), View(dx, tokens, hidden),
                 View(dgate, experts, hidden));
    EXPECT_TRUE(SameBits(dx, expected_dx)) << tokens << " " << hidden << " " << experts;
    EXPECT_TRUE(SameBits(dgate, expected_dgate)) << tokens << " " << hidden << " " << experts;
  }
}

template <typename Half>
void TakesSixteenBitsAndF64() {
  constexpr int64_t kTokens = 5, kHidden = 19, kExperts = 3;
  std::vector<float> x = Values(kTokens * kHidden, "x");
  std::vector<float> gate = Values(kExperts * kHidden, "gate");
  std::vector<Half> x16(x.begin(), x.end());
  std::vector<float> rounded(x.size());
  std::transform(x16.begin(), x16.end(), rounded.begin(), [](Half v) { return static_cast<float>(v); });
  std::vector<double> gate64(gate.begin(), gate.end());
  std::vector<float> logits(kTokens * kExperts);
  std::vector<float> expected(kTokens * kExperts);
  GateLogits(View(rounded, kTokens, kHidden), View(gate, kExperts, kHidden), {}, expected.data());
  const TensorView x_view(x16.data(), DTypeOf<Half>, {kTokens, kHidden});
  const TensorView gate_view(gate64.data(), DType::kF64, {kExperts, kHidden});
  GateLogits(x_view, gate_view, {}, logits.data());
  EXPECT_TRUE(SameBits(logits, expected));

  std::vector<float> dx(x.size(), 0.0f);
  std::vector<float> dgate(gate.size(), 0.0f);
  GateBackward(View(rounded, kTokens, kHidden), View(gate, kExperts, kHidden), {}, logits.data(),
               View(dx, kTokens, kHidden), View(dgate, kExperts, kHidden));
  std::vector<Half> dx16(x.size(), Half(1.0f));
  std::vector<double> dgate64(gate.size(), 0.25);
  GateBackward(x_view, gate_view, {}, logits.data(), TensorView(dx16.data(), DTypeOf<Half>, {kTokens, kHidden}),
               TensorView(dgate64.data(), DType::kF64, {kExperts, kHidden}));
  for (size_t i = 0; i < dx.size(); ++i) EXPECT_EQ(dx16[i].bits, Half(1.0f + dx[i]).bits);
  for (size_t i = 0; i < dgate.size(); ++i) EXPECT_EQ(dgate64[i], 0.25 + double{dgate[i]});
}

TEST(GateKernelsTest, TakesSixteenBitsAndF64) {
  TakesSixteenBitsAndF64<BF16>();
  TakesSixteenBitsAndF64<F16>();
}

TEST(GateKernelsTest, JitterMultipliesXByNumbersOfItsOwnIndex) {
  constexpr int64_t kTokens = 150, kHidden = 3, kExperts = 2;
  std::vector<float> x = Values(kTokens * kHidden, "x");
  std::vector<float> gate = Values(kExperts * kHidden, "gate");
  const Jitter jitter{0.25f, PhiloxStream(PhiloxKey(5))};
  std::vector<float> factor(x.size());
  std::vector<float> shaken(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    factor[i] = 1.0f + 0.25f * (2.0f * jitter.stream.Uniform(i) - 1.0f);
    EXPECT_GE(factor[i], 0.75f);
    EXPECT_LE(factor[i], 1.25f);
    shaken[i] = x[i] * factor[i];
  }
  std::vector<float> logits(kTokens * kExperts);
  std::vector<float> expected(kTokens * kExperts);
  GateLogits(View(x, kTokens, kHidden), View(gate, kExperts, kHidden), jitter, logits.data());
  GateLogits(View(shaken, kTokens, kHidden), View(gate, kExperts, kHidden), {}, expected.data());
  EXPECT_TRUE(SameBits(logits, expected));
  std::vector<float> dx(x.size(), 0.0f), expected_dx(x.size(), 0.0f);
  std::vector<float> dgate(gate.size(), 0.0f), expected_dgate(gate.size(), 0.0f);
  GateBackward(View(x, kTokens, kHidden), View(gate, kExperts, kHidden), jitter, logits.data(),
               View(dx, kTokens, kHidden), View(dgate, kExperts, kHidden));
  GateBackward(View(shaken, kTokens, kHidden), View(gate, kExperts, kHidden), {}, logits.data(),
               View(expected_dx, kTokens, kHidden), View(expected_dgate, kExperts, kHidden));
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(dx[i], 0.0f + expected_dx[i] * factor[i]);
  EXPECT_TRUE(SameBits(dgate, expected_dgate));
}

}  // namespace
}  // namespace evenkeel::moe
