// Row movement, block layout, elementwise arithmetic and casts.

#include "evenkeel/runtime/ops/rows.h"

#include <cmath>
#include <limits>
#include <vector>

#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/layout.h"
#include "evenkeel/runtime/ops/op_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::AsDouble;
using ::evenkeel::testutil::FirstDifference;
using ::evenkeel::testutil::OpTest;
using ::evenkeel::testutil::RandomVector;
using ::evenkeel::testutil::StatusIs;
using ::evenkeel::testutil::View;
using ::testing::HasSubstr;

template <typename T>
class RowsTest : public OpTest {
 public:
  using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
};
using Types = ::testing::Types<float, double, BF16, F16>;
TYPED_TEST_SUITE(RowsTest, Types);

TYPED_TEST(RowsTest, GatherCopiesRowsAndZeroesMissingOnes) {
  for (int64_t n : {0, 1, 5, 64}) {
    const auto source = RandomVector<TypeParam>(7 * n, 1);
    const std::vector<int32_t> indices = {6, -1, 0, 3, 3, -1};
    std::vector<TypeParam> out(6 * n, TypeParam(std::numeric_limits<float>::quiet_NaN()));
    ASSERT_OK(GatherRows(View(source, {7, n}), View(indices, {6}), View(out, {6, n}), this->stream_));
    for (int64_t i = 0; i < 6; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(AsDouble(out[i * n + j]), indices[i] < 0 ? 0 : AsDouble(source[indices[i] * n + j]));
      }
    }
  }
}

TYPED_TEST(RowsTest, ScatterAddsInOrderAndRoundsOnce) {
  using W = typename TestFixture::W;
  const int64_t n = 9;
  const auto source = RandomVector<TypeParam>(40 * n, 1);
  const auto before = RandomVector<TypeParam>(3 * n, 2);
  auto destination = before;
  std::vector<int32_t> indices(40);
  for (int32_t i = 0; i < 40; ++i) indices[i] = i % 5 == 4 ? -1 : i % 2;  // row 2 gets nothing
  ASSERT_OK(ScatterAddRows(View(source, {40, n}), View(indices, {40}), View(destination, {3, n}), this->stream_));
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t j = 0; j < n; ++j) {
      W sum = static_cast<W>(AsDouble(before[row * n + j]));
      for (int64_t i = 0; i < 40; ++i) {
        if (indices[i] == row) sum += static_cast<W>(AsDouble(source[i * n + j]));
      }
      const TypeParam wanted = static_cast<TypeParam>(sum);
      ASSERT_EQ(FirstDifference(&destination[row * n + j], &wanted, 1), -1);
    }
  }
}

TYPED_TEST(RowsTest, CombineWeighsAndItsAdjointIsExact) {
  using W = typename TestFixture::W;
  const int64_t tokens = 5, k = 3, n = 12, slots = 8;
  const auto source = RandomVector<TypeParam>(slots * n, 1), dout = RandomVector<TypeParam>(tokens * n, 2);
  // Token 2 lost every route; slot 6 is unused; slot 0 serves two routes.
  const std::vector<int32_t> indices = {0, 3, -1, 1, 2, 4, -1, -1, -1, 7, -1, 5, 0, 1, 3};
  const auto weights = RandomVector<W>(tokens * k, 3);
  std::vector<TypeParam> out(tokens * n, TypeParam(9.0f)), dsource(slots * n, TypeParam(9.0f));
  std::vector<W> dweights(tokens * k, W{9});
  ASSERT_OK(CombineRows(View(source, {slots, n}), View(indices, {tokens, k}), View(weights, {tokens, k}),
                        View(out, {tokens, n}), this->stream_));
  ASSERT_OK(CombineRowsBackward(View(source, {slots, n}), View(indices, {tokens, k}), View(weights, {tokens, k}),
                                View(dout, {tokens, n}), View(dsource, {slots, n}), View(dweights, {tokens, k}),
                                this->stream_));
  std::vector<W> slot_sum(slots * n, W{0});
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < n; ++j) {
      W sum = 0;
      for (int64_t r = 0; r < k; ++r) {
        const int32_t slot = indices[t * k + r];
        if (slot < 0) continue;
        const W part = weights[t * k + r] * static_cast<W>(AsDouble(source[slot * n + j]));
        sum += part;
        const W back = weights[t * k + r] * static_cast<W>(AsDouble(dout[t * n + j]));
        slot_sum[slot * n + j] += back;
      }
      const TypeParam wanted = static_cast<TypeParam>(sum);
      ASSERT_EQ(FirstDifference(&out[t * n + j], &wanted, 1), -1) << t << " " << j;
    }
    for (int64_t r = 0; r < k; ++r) {
      double dot = 0;
      const int32_t slot = indices[t * k + r];
      for (int64_t j = 0; slot >= 0 && j < n; ++j) dot += AsDouble(source[slot * n + j]) * AsDouble(dout[t * n + j]);
      ASSERT_NEAR(dweights[t * k + r], dot, 12 * testutil::kEpsilon<W> * 12);
      if (slot < 0) {
        ASSERT_EQ(dweights[t * k + r], W{0});
      }
    }
  }
  for (int64_t i = 0; i < slots * n; ++i) {
    const TypeParam wanted = static_cast<TypeParam>(slot_sum[i]);
    ASSERT_EQ(FirstDifference(&dsource[i], &wanted, 1), -1) << i;
  }
}

TYPED_TEST(RowsTest, GatherSumIsCombineWithOnes) {
  using W = typename TestFixture::W;
  const auto source = RandomVector<TypeParam>(6 * 10, 1);
  const std::vector<int32_t> indices = {5, 0, -1, 2, -1, -1, 1, 1};
  const std::vector<W> ones(8, W{1});
  std::vector<TypeParam> sum(40), combined(40);
  ASSERT_OK(GatherSumRows(View(source, {6, 10}), View(indices, {4, 2}), View(sum, {4, 10}), this->stream_));
  ASSERT_OK(CombineRows(View(source, {6, 10}), View(indices, {4, 2}), View(ones, {4, 2}), View(combined, {4, 10}),
                        this->stream_));
  EXPECT_EQ(FirstDifference(sum.data(), combined.data(), 40), -1);
  for (int64_t j = 0; j < 10; ++j) EXPECT_EQ(AsDouble(sum[20 + j]), 0);
}

TYPED_TEST(RowsTest, EmbeddingAndItsGradient) {
  using W = typename TestFixture::W;
  const auto table = RandomVector<TypeParam>(5 * 4, 1), dout = RandomVector<TypeParam>(3 * 4, 2);
  const std::vector<int32_t> ids = {4, 1, 4};
  std::vector<TypeParam> out(12);
  ASSERT_OK(EmbeddingForward(View(table, {5, 4}), View(ids, {3}), View(out, {3, 4}), this->stream_));
  EXPECT_EQ(FirstDifference(out.data(), table.data() + 16, 4), -1);
  EXPECT_EQ(FirstDifference(out.data() + 4, table.data() + 4, 4), -1);
  std::vector<W> dtable(20, W{0});  // f32 under bf16
  ASSERT_OK(EmbeddingBackward(View(ids, {3}), View(dout, {3, 4}), View(dtable, {5, 4}), this->stream_));
  for (int64_t j = 0; j < 4; ++j) {
    EXPECT_EQ(dtable[j], W{0});
    EXPECT_EQ(dtable[4 + j], static_cast<W>(AsDouble(dout[4 + j])));
    EXPECT_EQ(dtable[16 + j], static_cast<W>(AsDouble(dout[j])) + static_cast<W>(AsDouble(dout[8 + j])));
  }
}

TYPED_TEST(RowsTest, ElementwiseArithmetic) {
  using W = typename TestFixture::W;
  const int64_t n = 103;
  const auto a = RandomVector<TypeParam>(n, 1), b = RandomVector<TypeParam>(n, 2);
  std::vector<TypeParam> sum(n), product(n), scaled(n), filled(n);
  auto axpy = b;
  auto in_place = a;
  ASSERT_OK(Add(View(a, {n}), View(b, {n}), View(sum, {n}), this->stream_));
  ASSERT_OK(Add(View(in_place, {n}), View(b, {n}), View(in_place, {n}), this->stream_));
  ASSERT_OK(Multiply(View(a, {n}), View(b, {n}), View(product, {n}), this->stream_));
  ASSERT_OK(Scale(0.3, View(a, {n}), View(scaled, {n}), this->stream_));
  ASSERT_OK(Axpy(-0.7, View(a, {n}), View(axpy, {n}), this->stream_));
  ASSERT_OK(FillElements(0.3, View(filled, {n}), this->stream_));
  for (int64_t i = 0; i < n; ++i) {
    const W u = static_cast<W>(AsDouble(a[i])), v = static_cast<W>(AsDouble(b[i]));
    const W scaled_u = static_cast<W>(-0.7) * u;
    ASSERT_EQ(AsDouble(sum[i]), AsDouble(static_cast<TypeParam>(u + v)));
    ASSERT_EQ(AsDouble(in_place[i]), AsDouble(sum[i]));
    ASSERT_EQ(AsDouble(product[i]), AsDouble(static_cast<TypeParam>(u * v)));
    ASSERT_EQ(AsDouble(scaled[i]), AsDouble(static_cast<TypeParam>(static_cast<W>(0.3) * u)));
    ASSERT_EQ(AsDouble(axpy[i]), AsDouble(static_cast<TypeParam>(v + scaled_u)));
    ASSERT_EQ(AsDouble(filled[i]), AsDouble(static_cast<TypeParam>(static_cast<W>(0.3))));
  }
}

using LayoutTest = OpTest;

TEST_F(LayoutTest, SlicesPlacesAndSwaps) {
  std::vector<int32_t> x(3 * 4 * 2), slice(3 * 2 * 2), back(3 * 4 * 2, -1), swapped(24);
  for (int32_t i = 0; i < 24; ++i) x[i] = i;
  ASSERT_OK(SliceMiddle(View(x, {3, 4, 2}), 1, View(slice, {3, 2, 2}), stream_));
  EXPECT_EQ(slice, (std::vector<int32_t>{2, 3, 4, 5, 10, 11, 12, 13, 18, 19, 20, 21}));
  ASSERT_OK(PlaceMiddle(View(slice, {3, 2, 2}), 1, View(back, {3, 4, 2}), stream_));
  for (int32_t i = 0; i < 24; ++i) EXPECT_EQ(back[i], i / 2 % 4 == 1 || i / 2 % 4 == 2 ? i : -1);
  ASSERT_OK(SwapOuter(View(x, {3, 4, 2}), View(swapped, {12, 2}), stream_));
  for (int a = 0; a < 3; ++a) {
    for (int b = 0; b < 4; ++b) EXPECT_EQ(swapped[(b * 3 + a) * 2], x[(a * 4 + b) * 2]);
  }
  EXPECT_THAT(SliceMiddle(View(x, {3, 4, 2}), 3, View(slice, {3, 2, 2}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[3, 2, 2] is no slice of i32 [3, 4, 2] from 3")));
  EXPECT_THAT(SwapOuter(View(x, {3, 4, 2}), View(slice, {12}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("unequal")));
  std::vector<int32_t> none;
  EXPECT_OK(SliceMiddle(View(none, {0, 4, 2}), 0, View(none, {0, 2, 2}), stream_));
  EXPECT_OK(SwapOuter(View(none, {3, 0}), View(none, {0}), stream_));
}

TEST_F(LayoutTest, CastsRoundOnceAndKeepWhatFits) {
  // Halfway cases: 1 + 2^-8 lies between two bf16 numbers; a little more in the 40th bit decides.
  const double tie = 1 + 0x1p-8;
  const std::vector<double> wide = {tie, tie + 0x1p-40, tie - 0x1p-40, 0.1, -3.5, 1e300, -0.0, std::nan("")};
  std::vector<BF16> narrow(8);
  ASSERT_OK(Cast(View(wide, {8}), View(narrow, {8}), stream_));
  EXPECT_EQ(AsDouble(narrow[0]), 1.0);         // to even
  EXPECT_EQ(AsDouble(narrow[1]), 1 + 0x1p-7);  // going by way of f32 would give 1
  EXPECT_EQ(AsDouble(narrow[2]), 1.0);
  EXPECT_EQ(AsDouble(narrow[3]), 0.10009765625);
  EXPECT_EQ(AsDouble(narrow[4]), -3.5);
  EXPECT_TRUE(std::isinf(AsDouble(narrow[5])));
  EXPECT_TRUE(std::signbit(AsDouble(narrow[6])));
  EXPECT_TRUE(std::isnan(AsDouble(narrow[7])));
  std::vector<float> middle(8);
  std::vector<double> back(8);
  ASSERT_OK(Cast(View(narrow, {8}), View(middle, {8}), stream_));
  ASSERT_OK(Cast(View(middle, {8}), View(back, {8}), stream_));
  for (int i = 0; i < 7; ++i) EXPECT_EQ(back[i], AsDouble(narrow[i]));
  ASSERT_OK(Cast(View(wide, {8}), View(middle, {8}), stream_));
  EXPECT_EQ(middle[3], 0.1f);
  // f16: ties at 2^-11, the smallest number 2^-24, beyond 65504 infinity.
  const std::vector<double> halves = {1 + 0x1p-11, 1 + 0x1p-11 + 0x1p-40, 0x1p-24, 0x1p-25, 65504, 1e5,
                                      -0.0,        std::nan("")};
  std::vector<F16> half(8);
  ASSERT_OK(Cast(View(halves, {8}), View(half, {8}), stream_));
  ASSERT_OK(Cast(View(half, {8}), View(back, {8}), stream_));
  EXPECT_EQ(back[0], 1.0);
  EXPECT_EQ(back[1], 1 + 0x1p-10);  // going by way of f32 would give 1
  EXPECT_EQ(back[2], 0x1p-24);
  EXPECT_EQ(back[3], 0.0);
  EXPECT_EQ(back[4], 65504.0);
  EXPECT_TRUE(std::isinf(back[5]));
  EXPECT_TRUE(std::signbit(back[6]));
  EXPECT_TRUE(std::isnan(back[7]));
  std::vector<int32_t> ints(8);
  EXPECT_THAT(Cast(View(middle, {8}), View(ints, {8}), stream_),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("i32")));
}

TEST_F(LayoutTest, MixedAccumulationIntoF32) {
  const auto x = RandomVector<BF16>(10, 1);
  std::vector<float> y(10, 1.0f);
  ASSERT_OK(Axpy(0.5, View(x, {10}), View(y, {10}), stream_));
  for (int i = 0; i < 10; ++i) EXPECT_EQ(y[i], 1.0f + 0.5f * static_cast<float>(x[i]));
}

// C-table 5.4: an index from a router or a file must not reach memory it does not own.
TEST(RowsErrorTest, IndicesOutOfRangeAreNamed) {
  const auto device = HostDevice::Create();
  const std::vector<float> source(6);
  std::vector<float> out(4, 7.0f);
  for (const auto& [bad, place] : std::vector<std::pair<int32_t, int>>{{3, 1}, {-2, 0}, {1 << 30, 1}}) {
    std::vector<int32_t> indices = {0, 0};
    indices[place] = bad;
    const auto expected =
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("index " + std::to_string(place) + " is " + std::to_string(bad) + ", outside"));
    EXPECT_THAT(GatherRows(View(source, {3, 2}), View(indices, {2}), View(out, {2, 2}), **device->CreateStream("a")),
                expected);
    std::vector<float> destination(6);
    EXPECT_THAT(
        ScatterAddRows(View(out, {2, 2}), View(indices, {2}), View(destination, {3, 2}), **device->CreateStream("b")),
        expected);
  }
  EXPECT_EQ(out, std::vector<float>(4, 7.0f));  // checked before anything is written
  const std::vector<int32_t> none = {-1, 0};
  EXPECT_THAT(EmbeddingForward(View(source, {3, 2}), View(none, {2}), View(out, {2, 2}), **device->CreateStream("c")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("EmbeddingForward: index 0 is -1, outside 0..2")));
  EXPECT_THAT(GatherRows(View(source, {3, 2}), View(none, {2}), View(out, {1, 4}), **device->CreateStream("d")),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("its shape must be [2, 2]")));
}

}  // namespace
}  // namespace evenkeel
