// What the tests of this folder share: tensors with position-unique values, comparison by bits, and the harness
// around an inline stream.
#ifndef EVENKEEL_RUNTIME_OPS_OP_TEST_UTIL_H_
#define EVENKEEL_RUNTIME_OPS_OP_TEST_UTIL_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "gtest/gtest.h"

namespace evenkeel::testutil {

// Values in (-1, 1), a different one at each position of each `salt`.
template <typename T>
std::vector<T> RandomVector(int64_t count, uint64_t salt, double scale = 1.0) {
  const PhiloxStream stream(PhiloxKey(salt).Add("op_test"));
  std::vector<T> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<T>(static_cast<float>(scale * (2.0 * stream.Uniform(i) - 1.0)));
  }
  return values;
}
template <>
inline std::vector<double> RandomVector<double>(int64_t count, uint64_t salt, double scale) {
  const PhiloxStream stream(PhiloxKey(salt).Add("op_test"));
  std::vector<double> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = scale * (2.0 * stream.Uniform(i) - 1.0);
  return values;
}

template <typename T>
TensorView View(std::vector<T>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.num_elements());
  return TensorView(values.data(), DTypeOf<T>, std::move(shape));
}
template <typename T>
ConstTensorView View(const std::vector<T>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.num_elements());
  return ConstTensorView(values.data(), DTypeOf<T>, std::move(shape));
}

template <typename T>
double AsDouble(T value) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<double>(static_cast<float>(value));
  } else {
    return static_cast<double>(value);
  }
}

// Index of the first element whose bits differ, or -1.
template <typename T>
int64_t FirstDifference(const T* a, const T* b, int64_t count) {
  if (count == 0 || std::memcmp(a, b, static_cast<size_t>(count) * sizeof(T)) == 0) return -1;
  for (int64_t i = 0; i < count; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(T)) != 0) return i;
  }
  return -1;
}

// Spacing of T's numbers at 1: one rounding errs by at most half of it, relatively.
template <typename T>
constexpr double kEpsilon = 0;
template <>
inline constexpr double kEpsilon<float> = 0x1p-23;
template <>
inline constexpr double kEpsilon<double> = 0x1p-52;
template <>
inline constexpr double kEpsilon<BF16> = 0x1p-7;
template <>
inline constexpr double kEpsilon<F16> = 0x1p-10;

// What writing `value` as a T may add: relative to it, or where only f16 leaves its normal numbers, one of its steps.
template <typename T>
double StoreError(double value) {
  return kEpsilon<T> * std::abs(value) + (std::is_same_v<T, F16> ? 0x1p-24 : 0.0);
}

class OpTest : public ::testing::Test {
 protected:
  std::unique_ptr<HostDevice> device_ = HostDevice::Create();
  std::unique_ptr<Stream> stream_owner_ = *device_->CreateStream("compute");
  Stream& stream_ = *stream_owner_;
};

}  // namespace evenkeel::testutil

#endif  // EVENKEEL_RUNTIME_OPS_OP_TEST_UTIL_H_
