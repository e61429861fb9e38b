// The CUDA build rule: device code compiles, links, runs, and rounds a * b + c
// twice, as the host does.

#include <cmath>
#include <vector>

#include "evenkeel/third_party/cuda/multiply_add.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(CudaToolkitTest, DeviceRoundsAsTheHost) {
  const int64_t n = 1000;
  std::vector<float> a(n), b(n), c(n), out(n);
  int fused_differs = 0;
  for (int64_t i = 0; i < n; ++i) {
    a[i] = 1.0f + 1e-4f * static_cast<float>(i);
    b[i] = 1.0f - 1e-4f * static_cast<float>(i);
    c[i] = -1.0f + 1e-7f * static_cast<float>(i);
    fused_differs += std::fma(a[i], b[i], c[i]) != a[i] * b[i] + c[i];
  }
  ASSERT_GT(fused_differs, 0) << "the data cannot tell one rounding from two";
  const char* error = DeviceMultiplyAdd(a.data(), b.data(), c.data(), out.data(), n);
  ASSERT_EQ(error, nullptr) << error;
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(out[i], a[i] * b[i] + c[i]) << "i = " << i;
}

}  // namespace
}  // namespace evenkeel
