#include "evenkeel/runtime/base/philox.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using Words4 = std::array<uint32_t, 4>;
using Words2 = std::array<uint32_t, 2>;

// The known answers that Random123 publishes for philox4x32 with ten rounds.
TEST(PhiloxTest, MatchesTheKnownAnswersOfRandom123) {
  EXPECT_EQ(Philox4x32(Words4{0, 0, 0, 0}, Words2{0, 0}), (Words4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(Philox4x32(Words4{kOnes, kOnes, kOnes, kOnes}, Words2{kOnes, kOnes}),
            (Words4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32(Words4{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, Words2{0xa4093822, 0x299f31d0}),
            (Words4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, KeysDependOnEveryPartAndOnTheirOrder) {
  std::set<uint64_t> values;
  for (uint64_t seed : {0, 1, 2}) {
    values.insert(PhiloxKey(seed).value());
    values.insert(PhiloxKey(seed).Add(uint64_t{7}).Add(uint64_t{9}).value());
    values.insert(PhiloxKey(seed).Add(uint64_t{9}).Add(uint64_t{7}).value());
    values.insert(PhiloxKey(seed).Add("ab").Add("c").value());
    values.insert(PhiloxKey(seed).Add("a").Add("bc").value());
    values.insert(PhiloxKey(seed).Add("").value());
  }
  EXPECT_EQ(values.size(), 18u);
}

TEST(PhiloxTest, StreamsAreRandomAccess) {
  const PhiloxStream stream(PhiloxKey(5).Add("weights")), same(PhiloxKey(5).Add("weights"));
  const PhiloxStream other(PhiloxKey(6).Add("weights"));
  int different = 0;
  for (uint64_t i = 1000; i-- > 0;) {
    ASSERT_EQ(stream.Bits64(i), same.Bits64(i));
    ASSERT_EQ(stream.Bits32(i), static_cast<uint32_t>(stream.Bits64(i)));
    different += stream.Bits64(i) != other.Bits64(i);
  }
  EXPECT_EQ(different, 1000);
  EXPECT_NE(stream.Bits64(1), stream.Bits64((uint64_t{1} << 32) + 1));  // both halves of the index count
}

TEST(PhiloxTest, DistributionsHaveTheirRangeAndMoments) {
  const PhiloxStream stream(PhiloxKey(1).Add("moments"));
  constexpr int kCount = 100000;
  double uniform = 0, normal = 0, square = 0, gumbel = 0;
  std::vector<int> below(7, 0);
  for (int i = 0; i < kCount; ++i) {
    const float u = stream.Uniform(i);
    ASSERT_TRUE(u >= 0 && u < 1);
    ASSERT_EQ(u * 0x1p24f, std::floor(u * 0x1p24f));
    const double z = stream.Normal(i), g = stream.Gumbel(i);
    ASSERT_TRUE(std::isfinite(z) && std::isfinite(g));
    uniform += u;
    normal += z;
    square += z * z;
    gumbel += g;
    ++below[stream.Below(i, 7)];
  }
  // Five standard errors each: sigma / sqrt(100000) is 0.0009 for the uniform, 0.0032, 0.0045, 0.0041.
  EXPECT_NEAR(uniform / kCount, 0.5, 0.0046);
  EXPECT_NEAR(normal / kCount, 0.0, 0.016);
  EXPECT_NEAR(square / kCount, 1.0, 0.023);
  EXPECT_NEAR(gumbel / kCount, 0.5772156649, 0.021);
  for (int count : below) EXPECT_NEAR(count, kCount / 7.0, 5 * std::sqrt(kCount / 7.0));
  EXPECT_EQ(stream.Below(3, 1), 0u);
}

}  // namespace
}  // namespace evenkeel
