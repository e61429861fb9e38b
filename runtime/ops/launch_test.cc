// What every operation owes its stream: one launch each, in order, owning what it was told by value.

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/ops/activation.h"
#include "evenkeel/runtime/ops/attention.h"
#include "evenkeel/runtime/ops/elementwise.h"
#include "evenkeel/runtime/ops/gemm.h"
#include "evenkeel/runtime/ops/layout.h"
#include "evenkeel/runtime/ops/norm.h"
#include "evenkeel/runtime/ops/op_test_util.h"
#include "evenkeel/runtime/ops/optimizer.h"
#include "evenkeel/runtime/ops/reduce.h"
#include "evenkeel/runtime/ops/rows.h"
#include "evenkeel/runtime/ops/softmax.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::FirstDifference;
using ::evenkeel::testutil::RandomVector;
using ::evenkeel::testutil::StatusIs;
using ::evenkeel::testutil::View;

TEST(LaunchTest, EachOperationIsOneLaunchAndNothingElse) {
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto owner, device->CreateStream("compute"));
  Stream& s = *owner;
  std::vector<float> a(16, 0.5f), b(16, 0.25f), c(16), d(16), four(4, 1.0f), r(4);
  std::vector<double> sum(1);
  std::vector<int32_t> index = {0, 1, 2, 3}, flag(1);
  const Shape square = {4, 4};
  const TensorView x = View(a, square), y = View(b, square), z = View(c, square), u = View(d, square);
  const TensorView w = View(four, {4}), i = View(index, {4}), routes = View(index, {4, 1});
  const TensorView scale = View(r, {4}), weights = View(r, {4, 1});
  std::vector<float> more(16);
  const AttentionSizes sizes{1, 4, 1, 4};
  const std::vector<std::function<absl::Status()>> operations = {
      [&] { return Gemm(false, false, 1, x, y, 0, z, s); },
      [&] {
        return GemmGrouped(false, 1, x, y.Reshaped({1, 4, 4}), {4}, 0, z, s);
      },
      [&] { return GemmWeightGradient(x, y, {}, z, s); },
      [&] { return AddBias(x, w, z, s); },
      [&] { return BiasGradient(x, {}, w, s); },
      [&] { return GeluForward(x, z, s); },
      [&] { return GeluBackward(x, y, z, s); },
      [&] { return SiluForward(x, z, s); },
      [&] { return SiluBackward(x, y, z, s); },
      [&] { return SwiGluForward(x, y, z, s); },
      [&] { return SwiGluBackward(x, y, x, z, u, s); },
      [&] { return RmsNormForward(x, w, 1e-5, z, scale, s); },
      [&] { return RmsNormBackward(x, w, scale, y, z, w, s); },
      [&] { return SoftmaxForward(x, z, s); },
      [&] { return SoftmaxBackward(x, y, z, s); },
      [&] { return CrossEntropyForward(x, i, 4, z, View(sum, {1}), s); },
      [&] { return CrossEntropyBackward(x, i, 4, z, s); },
      [&] {
        return CausalAttentionForward(sizes, x, y, x, z.Reshaped({1, 4, 4}), u, s);
      },
      [&] {
        return CausalAttentionBackward(sizes, x, y, x, y.Reshaped({1, 4, 4}), x, z, u, View(more, square), s);
      },
      [&] { return GatherRows(x, i, z, s); },
      [&] { return ScatterAddRows(x, i, z, s); },
      [&] { return GatherSumRows(x, routes, z, s); },
      [&] { return CombineRows(x, routes, weights, z, s); },
      [&] {
        return CombineRowsBackward(x, routes, weights, y, z, View(four, {4, 1}), s);
      },
      [&] { return EmbeddingForward(x, i, z, s); },
      [&] { return EmbeddingBackward(i, x, z, s); },
      [&] { return Add(x, y, z, s); },
      [&] { return Multiply(x, y, z, s); },
      [&] { return Axpy(1, x, z, s); },
      [&] { return Scale(1, x, z, s); },
      [&] { return FillElements(1, z, s); },
      [&] { return Cast(x, z, s); },
      [&] { return SliceMiddle(x, 0, z, s); },
      [&] { return PlaceMiddle(x, 0, z, s); },
      [&] { return SwapOuter(x, z, s); },
      [&] { return SgdStep({.learning_rate = 0.1}, x, {}, z, s); },
      [&] { return AdamWStep({.learning_rate = 0.1}, x, y, u, z, s); },
      [&] { return SumOfSquares(x, View(sum, {1}), s); },
      [&] { return Sum(x, View(sum, {1}), s); },
      [&] { return AllFinite(x, View(flag, {1}), s); },
  };
  for (size_t n = 0; n < operations.size(); ++n) {
    const WorkCounts before = device->counters().Snapshot();
    ASSERT_OK(operations[n]()) << n;
    const WorkCounts work = device->counters().Snapshot() - before;
    EXPECT_EQ(work.launches, 1) << n;
    EXPECT_EQ(work.host_operations, 1) << n;
  }
}

// Row counts, positions and views are values: the caller's may be gone before the work runs.
TEST(LaunchTest, QueuedOperationsOwnWhatTheyWereTold) {
  const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("compute"));
  const int64_t rows = 6, k = 8, n = 5;
  const auto x = RandomVector<float>(rows * k, 1), w = RandomVector<float>(2 * k * n, 2);
  const auto dy = RandomVector<float>(rows * n, 3);
  std::vector<float> y(rows * n), dw(2 * k * n, 0.0f), wanted_y(rows * n), wanted_dw(2 * k * n, 0.0f), sum(n, 0.0f);
  absl::Notification go;
  ASSERT_OK(stream->Launch([&go] {
    go.WaitForNotification();
    return absl::OkStatus();
  }));
  {
    auto counts = std::make_unique<std::vector<int64_t>>(std::vector<int64_t>{4, 2});
    auto positions = std::make_unique<std::vector<int64_t>>(std::vector<int64_t>{0, 3, 200, 201, 1, 9});
    ASSERT_OK(GemmGrouped(false, 1, View(x, {rows, k}), View(w, {2, k, n}), *counts, 0, View(y, {rows, n}), *stream));
    ASSERT_OK(GemmGroupedWeightGradient(View(x, {rows, k}), View(dy, {rows, n}), *counts, *positions,
                                        View(dw, {2, k, n}), *stream));
    std::sort(positions->begin(), positions->end());
    ASSERT_OK(BiasGradient(View(dy, {rows, n}), *positions, View(sum, {n}), *stream));
  }
  EXPECT_EQ(y[0], 0.0f);  // nothing has run yet
  go.Notify();
  ASSERT_OK(stream->Synchronize());
  const auto now = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto at_once, now->CreateStream("compute"));
  ASSERT_OK(
      GemmGrouped(false, 1, View(x, {rows, k}), View(w, {2, k, n}), {4, 2}, 0, View(wanted_y, {rows, n}), *at_once));
  ASSERT_OK(GemmGroupedWeightGradient(View(x, {rows, k}), View(dy, {rows, n}), {4, 2}, {0, 3, 200, 201, 1, 9},
                                      View(wanted_dw, {2, k, n}), *at_once));
  EXPECT_EQ(FirstDifference(y.data(), wanted_y.data(), rows * n), -1);
  EXPECT_EQ(FirstDifference(dw.data(), wanted_dw.data(), 2 * k * n), -1);
}

TEST(LaunchTest, BadDataFailsTheStreamNotTheCall) {
  const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("compute"));
  const std::vector<float> table(6);
  const std::vector<int32_t> ids = {0, 7};
  std::vector<float> out(4);
  ASSERT_OK(EmbeddingForward(View(table, {3, 2}), View(ids, {2}), View(out, {2, 2}), *stream));
  EXPECT_THAT(stream->Synchronize(),
              StatusIs(absl::StatusCode::kInvalidArgument, "EmbeddingForward: index 1 is 7, outside 0..2"));
}

}  // namespace
}  // namespace evenkeel
