// Element types, shapes, views and tensors.

#include "evenkeel/runtime/tensor/tensor.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::IsOk;
using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(DTypeTest, NamesRoundTripAndUnknownOnesAreListed) {
  for (DType dtype : kAllDTypes) {
    ASSERT_OK_AND_ASSIGN(const DType parsed, ParseDType(DTypeName(dtype)));
    EXPECT_EQ(parsed, dtype);
    EXPECT_GT(SizeOf(dtype), 0);
  }
  EXPECT_THAT(ParseDType("float32"),
              StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("'float32'"), HasSubstr("f32, bf16, f64"))));
  static_assert(DTypeOf<float> == DType::kF32 && DTypeOf<BF16> == DType::kBF16 && DTypeOf<uint8_t> == DType::kU8);
}

// The nearest of the values that T can hold, ties to the even bit pattern, found by search.
template <typename T>
uint16_t NearestByOrder(double magnitude, uint16_t infinity_bits) {
  uint16_t low = 0, high = infinity_bits;  // non-negative patterns are ordered as their values
  const auto value = [](uint16_t bits) {
    T t;
    t.bits = bits;
    return static_cast<double>(static_cast<float>(t));
  };
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value(middle) <= magnitude ? low : high) = middle;
  }
  // What infinity stands for in rounding: the next power of two.
  const double above = high == infinity_bits
                           ? 2 * value(static_cast<uint16_t>(high - 1)) - value(static_cast<uint16_t>(high - 2))
                           : value(high);
  const double below_gap = magnitude - value(low), above_gap = above - magnitude;
  if (below_gap != above_gap) return below_gap < above_gap ? low : high;
  return low % 2 == 0 ? low : high;
}

template <typename T>
class NarrowFloatTest : public ::testing::Test {};
using NarrowTypes = ::testing::Types<BF16, F16>;
TYPED_TEST_SUITE(NarrowFloatTest, NarrowTypes);

TYPED_TEST(NarrowFloatTest, RoundsToNearestEven) {
  const uint16_t infinity = std::is_same_v<TypeParam, BF16> ? 0x7f80 : 0x7c00;
  for (uint64_t wide = 0; wide <= 0x7f800000u; wide += 8191) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      const float value = std::bit_cast<float>(static_cast<uint32_t>(wide) | sign);
      const uint16_t wanted = static_cast<uint16_t>(
          NearestByOrder<TypeParam>(std::fabs(static_cast<double>(value)), infinity) | (sign >> 16));
      ASSERT_EQ(TypeParam(value).bits, wanted) << value;
    }
  }
}

TYPED_TEST(NarrowFloatTest, EveryPatternSurvivesTheWayThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    TypeParam narrow;
    narrow.bits = static_cast<uint16_t>(bits);
    const float wide = static_cast<float>(narrow);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(TypeParam(wide))));
    } else {
      ASSERT_EQ(TypeParam(wide).bits, bits);
    }
  }
}

TYPED_TEST(NarrowFloatTest, SpecialValuesAndTies) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(static_cast<float>(TypeParam(infinity)), infinity);
  EXPECT_EQ(static_cast<float>(TypeParam(-infinity)), -infinity);
  EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(std::bit_cast<float>(0x7f800001u)))));  // lowest NaN payload
  EXPECT_TRUE(std::signbit(static_cast<float>(TypeParam(-0.0f))));
  const float ulp = std::is_same_v<TypeParam, BF16> ? 0x1p-7f : 0x1p-10f;
  EXPECT_EQ(static_cast<float>(TypeParam(1 + ulp / 2)), 1.0f);
  EXPECT_EQ(static_cast<float>(TypeParam(1 + 3 * ulp / 2)), 1 + 2 * ulp);
}

TEST(ShapeTest, CountsElementsAndRefusesBadExtents) {
  EXPECT_EQ(Shape().num_elements(), 1);
  EXPECT_EQ(Shape({0}).num_elements(), 0);
  EXPECT_EQ(Shape({3, 0, 5}).num_elements(), 0);
  EXPECT_EQ(Shape({4, 8, 64}).num_elements(), 2048);
  EXPECT_EQ(Shape({4, 8}).ToString(), "[4, 8]");
  EXPECT_NE(Shape({4, 8}), Shape({8, 4}));
  EXPECT_NE(Shape({4}), Shape({4, 1}));
  EXPECT_THAT(Shape::Create({2, -1}), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[2, -1]")));
  EXPECT_THAT(Shape::Create({int64_t{1} << 32, int64_t{1} << 31}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
}

TEST(TensorViewTest, RowsAndReshapesShareMemory) {
  std::vector<int32_t> data(24);
  for (int32_t i = 0; i < 24; ++i) data[i] = i;
  const TensorView view(data.data(), DType::kI32, {4, 3, 2});
  const TensorView rows = view.Rows(1, 2);
  EXPECT_EQ(rows.shape(), Shape({2, 3, 2}));
  EXPECT_EQ(rows.data<int32_t>()[0], 6);
  EXPECT_EQ(view.Rows(4, 0).num_elements(), 0);
  const ConstTensorView flat = ConstTensorView(view).Reshaped({24});
  EXPECT_EQ(flat.data<int32_t>(), data.data());
  EXPECT_EQ(flat.num_bytes(), 96);
  EXPECT_EQ(ConstTensorView(view).Rows(3, 1).data<int32_t>()[5], 23);
  rows.data<int32_t>()[0] = 99;
  EXPECT_EQ(data[6], 99);
}

TEST(TensorViewDeathTest, MisuseEndsTheProcess) {
  std::vector<float> data(6);
  const TensorView view(data.data(), DType::kF32, {2, 3});
  EXPECT_DEATH(view.data<int32_t>(), "check failed");
  EXPECT_DEATH(view.Reshaped({7}), "check failed");
  EXPECT_DEATH(view.Rows(1, 2), "check failed");
  EXPECT_DEATH(view.Rows(-1, 1), "check failed");
  EXPECT_DEATH(Shape({-1}), "negative extent");
}

TEST(TensorTest, OwnsZeroedOrPoisonedMemory) {
  const auto device = HostDevice::Create({.poison = true});
  {
    ASSERT_OK_AND_ASSIGN(const Tensor zeros, Tensor::Zeros(device.get(), DType::kF32, {5, 7}));
    for (int i = 0; i < 35; ++i) EXPECT_EQ(zeros.data<float>()[i], 0.0f);
    ASSERT_OK_AND_ASSIGN(const Tensor fresh, Tensor::Create(device.get(), DType::kBF16, {3}));
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(static_cast<float>(fresh.data<BF16>()[i])));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(zeros.data<float>()) % 64, 0u);
    EXPECT_EQ(device->counters().Snapshot().live_bytes, 35 * 4 + 3 * 2);
    ASSERT_OK_AND_ASSIGN(const Tensor none, Tensor::Zeros(device.get(), DType::kF64, {0, 4}));
    EXPECT_EQ(none.view().raw(), nullptr);
  }
  EXPECT_EQ(device->counters().Snapshot().live_bytes, 0);
  EXPECT_THAT(Tensor::Create(device.get(), DType::kF64, {int64_t{1} << 61}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
}

}  // namespace
}  // namespace evenkeel
