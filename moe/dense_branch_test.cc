#include "evenkeel/moe/dense_branch.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 5, kHidden = 6, kFfn = 8;

double DataAt(const std::string& name, int64_t index) {
  return 0.6 * PhiloxStream(PhiloxKey(17).Add(name)).Normal(static_cast<uint64_t>(index));
}

// Whole parameters and inputs in double.
struct Whole {
  std::vector<double> x, m, dy, w_in, w_gate, w_out, b_in, b_gate, b_out, mix, mix_bias;
};
Whole MakeWhole(int64_t tokens, int64_t mix_rows) {
  const auto make = [](const char* name, int64_t n) {
    std::vector<double> values(n);
    // Representable in f32, so that all dtypes compute from the same numbers.
    for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(DataAt(name, i));
    return values;
  };
  Whole w;
  w.x = make("x", tokens * kHidden);
  w.m = make("m", tokens * kHidden);
  w.dy = make("dy", tokens * kHidden);
  w.w_in = make("w_in", kHidden * kFfn);
  w.w_gate = make("w_gate", kHidden * kFfn);
  w.w_out = make("w_out", kFfn * kHidden);
  w.b_in = make("b_in", kFfn);
  w.b_gate = make("b_gate", kFfn);
  w.b_out = make("b_out", kHidden);
  w.mix = make("mix", mix_rows * kHidden);
  w.mix_bias = make("mix_bias", mix_rows);
  return w;
}

double Gelu(double z) { return z / (1.0 + std::exp(-2.0 * std::sqrt(2.0 / M_PI) * (z + 0.044715 * z * z * z))); }
double Silu(double z) { return z / (1.0 + std::exp(-z)); }

// The naive forward; shares no code with the branch.
std::vector<double> Naive(const Whole& w, const DenseBranchConfig& config) {
  std::vector<double> y(w.x.size());
  for (size_t t = 0; t < w.x.size() / kHidden; ++t) {
    std::vector<double> d(kHidden, 0.0);
    for (int64_t f = 0; f < kFfn; ++f) {
      double up = config.bias ? w.b_in[f] : 0.0;
      double gate = config.bias ? w.b_gate[f] : 0.0;
      for (int64_t i = 0; i < kHidden; ++i) {
        up += w.x[t * kHidden + i] * w.w_in[i * kFfn + f];
        gate += w.x[t * kHidden + i] * w.w_gate[i * kFfn + f];
      }
      const double a = config.activation == ExpertActivation::kGelu ? Gelu(up) : Silu(gate) * up;
      for (int64_t i = 0; i < kHidden; ++i) d[i] += a * w.w_out[f * kHidden + i];
    }
    std::vector<double> logit(config.mix_rows());
    for (size_t j = 0; j < logit.size(); ++j) {
      logit[j] = w.mix_bias[j];
      for (int64_t i = 0; i < kHidden; ++i) logit[j] += w.x[t * kHidden + i] * w.mix[j * kHidden + i];
    }
    double a0 = 1, a1 = 1;
    if (config.mix == BranchMix::kSigmoid) a1 = 1 / (1 + std::exp(-logit[0]));
    if (config.mix == BranchMix::kSoftmax) {
      a0 = std::exp(logit[0]) / (std::exp(logit[0]) + std::exp(logit[1]));
      a1 = std::exp(logit[1]) / (std::exp(logit[0]) + std::exp(logit[1]));
    }
    for (int64_t i = 0; i < kHidden; ++i) {
      y[t * kHidden + i] = a0 * w.m[t * kHidden + i] + a1 * (d[i] + (config.bias ? w.b_out[i] : 0.0));
    }
  }
  return y;
}

// d <y, dy> / d element, by central differences.
std::vector<double> Differences(Whole w, const DenseBranchConfig& config, std::vector<double> Whole::*member) {
  std::vector<double> derivatives((w.*member).size());
  for (size_t i = 0; i < derivatives.size(); ++i) {
    constexpr double kStep = 1e-6;
    double sides[2];
    const double before = (w.*member)[i];
    for (int side = 0; side < 2; ++side) {
      (w.*member)[i] = before + (side == 0 ? kStep : -kStep);
      const std::vector<double> y = Naive(w, config);
      sides[side] = 0;
      for (size_t n = 0; n < y.size(); ++n) sides[side] += y[n] * w.dy[n];
    }
    (w.*member)[i] = before;
    derivatives[i] = (sides[0] - sides[1]) / (2 * kStep);
  }
  return derivatives;
}

// One lane's copies in one dtype.
struct LaneRun {
  std::vector<double> y, dm, dx, w_in, w_out, b_in, b_out, mix, mix_bias;
  DenseBranchMemory counted = {}, predicted = {};
  int64_t tp_bytes = 0;
};

// Columns [lane f, lane f + f) of a [rows, F] matrix.
std::vector<double> Columns(const std::vector<double>& whole, int64_t rows, int64_t lane, int64_t f) {
  std::vector<double> part;
  for (int64_t r = 0; r < rows; ++r) {
    part.insert(part.end(), whole.begin() + r * kFfn + lane * f, whole.begin() + r * kFfn + (lane + 1) * f);
  }
  return part;
}
std::vector<double> RowsOf(const std::vector<double>& whole, int64_t lane, int64_t f) {
  return {whole.begin() + lane * f * kHidden, whole.begin() + (lane + 1) * f * kHidden};
}

// Owns elements of type T and shows them as a tensor.
template <typename T>
struct Holder {
  std::vector<T> values;
  Shape shape;
  Holder(const std::vector<double>& from, Shape s) : shape(std::move(s)) {
    for (const double v : from) values.push_back(T(static_cast<float>(v)));
  }
  TensorView view() { return TensorView(values.data(), DTypeOf<T>, shape); }
  std::vector<double> doubles() const {
    std::vector<double> all;
    for (const T& v : values)
      all.push_back(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(v));
    return all;
  }
};

// T: tokens and weights, G: gradients.
template <typename T, typename G>
absl::Status RunLane(const DenseBranchConfig& config, const Whole& w, comm::Communicator* tp, bool worker,
                     LaneRun* run) {
  const int64_t lanes = tp != nullptr ? tp->size() : 1;
  const int64_t lane = tp != nullptr ? tp->rank() : 0;
  const int64_t f = kFfn / lanes;
  const int64_t tokens = static_cast<int64_t>(w.x.size()) / kHidden;
  const auto device = HostDevice::Create(
      {.stream_mode = worker ? HostDevice::StreamMode::kWorker : HostDevice::StreamMode::kInline, .poison = true});
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(const auto branch, DenseBranch::Create(config, tp, device.get()));
  Holder<T> x(w.x, {tokens, kHidden}), m(w.m, {tokens, kHidden}), dy(w.dy, {tokens, kHidden});
  Holder<T> w_in(Columns(w.w_in, kHidden, lane, f), {1, kHidden, f});
  Holder<T> w_gate(Columns(w.w_gate, kHidden, lane, f), {1, kHidden, f});
  Holder<T> w_out(RowsOf(w.w_out, lane, f), {1, f, kHidden});
  Holder<T> b_in(Columns(w.b_in, 1, lane, f), {1, f}), b_gate(Columns(w.b_gate, 1, lane, f), {1, f});
  Holder<T> b_out(w.b_out, {1, kHidden});
  Holder<T> mix(w.mix, {config.mix_rows(), kHidden}), mix_bias(w.mix_bias, {config.mix_rows()});
  const auto zeros = [](const Holder<T>& like) {
    return Holder<G>(std::vector<double>(like.values.size(), 0.0), like.shape);
  };
  Holder<G> dw_in = zeros(w_in), dw_gate = zeros(w_gate), dw_out = zeros(w_out), db_in = zeros(b_in);
  Holder<G> db_gate = zeros(b_gate), db_out = zeros(b_out), dmix = zeros(mix), dmix_bias = zeros(mix_bias);
  Holder<T> y = m, dm = m, dx = x;
  DenseBranchWeights weights;
  weights.mlp = {w_in.view(), w_gate.view(), w_out.view(), b_in.view(), b_gate.view(), b_out.view()};
  weights.mix = mix.view();
  weights.mix_bias = mix_bias.view();
  const DenseBranchGradients gradients{
      {dw_in.view(), dw_gate.view(), dw_out.view(), db_in.view(), db_gate.view(), db_out.view()},
      dmix.view(),
      dmix_bias.view()};
  DenseBranchTape tape;
  WorkCounters& counters = device->counters();
  const int64_t base = counters.Snapshot().live_bytes;
  counters.ResetPeak();
  EK_RETURN_IF_ERROR(branch->Forward(weights, x.view(), y.view(), y.view(), &tape, *stream));  // y in place of m
  EK_RETURN_IF_ERROR(stream->Synchronize());
  DenseBranchMemory counted = {.forward_peak = counters.Snapshot().peak_live_bytes - base,
                               .tape = counters.Snapshot().live_bytes - base,
                               .backward_peak = 0};
  counters.ResetPeak();
  EK_RETURN_IF_ERROR(branch->Backward(weights, tape, x.view(), dy.view(), dm.view(), dx.view(), gradients, *stream));
  counted.backward_peak = counters.Snapshot().peak_live_bytes - base;
  *run = {y.doubles(),     dm.doubles(),     dx.doubles(),   dw_in.doubles(),    dw_out.doubles(),
          db_in.doubles(), db_out.doubles(), dmix.doubles(), dmix_bias.doubles()};
  run->counted = counted;
  run->predicted = branch->PredictMemory(tokens);
  return absl::OkStatus();
}

template <typename T, typename G>
std::vector<LaneRun> RunLanes(const DenseBranchConfig& config, const Whole& w, int lanes, bool worker = false) {
  std::vector<LaneRun> runs(lanes);
  auto world = comm::InProcessWorld::Create({.world_size = lanes});
  EXPECT_OK(world.status());
  const auto statuses = comm::RunRanks(**world, [&](comm::Backend& backend) -> absl::Status {
    comm::Group group = comm::WorldGroup(lanes);
    group.axis = comm::Axis::kTp;
    EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(group));
    EK_RETURN_IF_ERROR((RunLane<T, G>(config, w, tp.get(), worker, &runs[backend.rank()])));
    runs[backend.rank()].tp_bytes = backend.ledger().Snapshot().bytes(comm::Axis::kTp);
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
  for (const LaneRun& run : runs) {
    EXPECT_EQ(run.counted.forward_peak, run.predicted.forward_peak);
    EXPECT_EQ(run.counted.tape, run.predicted.tape);
    EXPECT_EQ(run.counted.backward_peak, run.predicted.backward_peak);
  }
  return runs;
}

void ExpectNear(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance,
                const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], tolerance) << what << " " << i;
}

// Output against the naive forward, every gradient against its differences (truncation and cancellation near 1e-9).
TEST(DenseBranchTest, MatchesNaiveForwardAndDifferencesOnAnyNumberOfLanes) {
  for (const BranchMix mix : {BranchMix::kAdd, BranchMix::kSigmoid, BranchMix::kSoftmax}) {
    for (const ExpertActivation activation : {ExpertActivation::kGelu, ExpertActivation::kSwiGlu}) {
      for (const int lanes : {1, 2, 4}) {
        SCOPED_TRACE(absl::StrCat("mix ", static_cast<int>(mix), " lanes ", lanes));
        DenseBranchConfig config{
            .hidden = kHidden, .ffn = kFfn, .activation = activation, .bias = true, .mix = mix, .dtype = DType::kF64};
        const Whole w = MakeWhole(kTokens, config.mix_rows());
        const std::vector<LaneRun> runs = RunLanes<double, double>(config, w, lanes, lanes == 2);
        const int64_t f = kFfn / lanes;
        for (int lane = 0; lane < lanes; ++lane) {
          const LaneRun& run = runs[lane];
          ExpectNear(run.y, Naive(w, config), 1e-13, "y");
          ExpectNear(run.dx, Differences(w, config, &Whole::x), 1e-8, "dx");
          ExpectNear(run.dm, Differences(w, config, &Whole::m), 1e-8, "dm");
          ExpectNear(run.w_in, Columns(Differences(w, config, &Whole::w_in), kHidden, lane, f), 1e-8, "w_in");
          ExpectNear(run.w_out, RowsOf(Differences(w, config, &Whole::w_out), lane, f), 1e-8, "w_out");
          ExpectNear(run.b_in, Columns(Differences(w, config, &Whole::b_in), 1, lane, f), 1e-8, "b_in");
          ExpectNear(run.b_out, Differences(w, config, &Whole::b_out), 1e-8, "b_out");  // Trail 18: no bias is lost
          ExpectNear(run.mix, Differences(w, config, &Whole::mix), 1e-8, "mix");
          ExpectNear(run.mix_bias, Differences(w, config, &Whole::mix_bias), 1e-8, "mix_bias");
          // The lanes agree bit by bit on what is not sliced.
          EXPECT_EQ(run.y, runs[0].y);
          EXPECT_EQ(run.dx, runs[0].dx);
          EXPECT_EQ(run.mix, runs[0].mix);
          // One all_reduce each way: 2 (T - 1) / T of the buffer, where the lanes' parts are equal.
          const int64_t buffer = kTokens * kHidden * 8;
          int64_t total = 0;
          for (const LaneRun& r : runs) total += r.tp_bytes;
          EXPECT_EQ(total, 2 * 2 * (lanes - 1) * buffer);
        }
      }
    }
  }
}

// f32 and bf16 against f64 from the same numbers: rounding of 6 and 8 term sums of values around 1.
TEST(DenseBranchTest, TakesEveryDtype) {
  const DenseBranchConfig config{.hidden = kHidden,
                                 .ffn = kFfn,
                                 .activation = ExpertActivation::kGelu,
                                 .bias = false,
                                 .mix = BranchMix::kSoftmax,
                                 .dtype = DType::kF32};
  const Whole w = MakeWhole(kTokens, 2);
  const std::vector<LaneRun> runs = RunLanes<float, float>(config, w, 2);
  ExpectNear(runs[0].y, Naive(w, config), 1e-5, "y");
  ExpectNear(runs[0].mix, Differences(w, config, &Whole::mix), 1e-5, "mix");
  // bf16 keeps 8 bits: relative roundings of 2^-9 in inputs, weights, middle and output.
  DenseBranchConfig half = config;
  half.dtype = DType::kBF16;
  const std::vector<LaneRun> rounded = RunLanes<BF16, float>(half, w, 2);
  ExpectNear(rounded[0].y, Naive(w, config), 0.05, "y in bf16");
  ExpectNear(rounded[0].mix, Differences(w, config, &Whole::mix), 0.2, "mix in bf16");
  EXPECT_EQ(rounded[0].y, rounded[1].y);
  // f16 keeps 11 bits.
  half.dtype = DType::kF16;
  const std::vector<LaneRun> finer = RunLanes<F16, float>(half, w, 2);
  ExpectNear(finer[0].y, Naive(w, config), 0.05 / 8, "y in f16");
  ExpectNear(finer[0].mix, Differences(w, config, &Whole::mix), 0.2 / 8, "mix in f16");
  EXPECT_EQ(finer[0].y, finer[1].y);
}

TEST(DenseBranchTest, Trail22_NoTokens) {
  const DenseBranchConfig config{.hidden = kHidden,
                                 .ffn = kFfn,
                                 .activation = ExpertActivation::kSwiGlu,
                                 .bias = true,
                                 .mix = BranchMix::kSigmoid,
                                 .dtype = DType::kF32};
  const std::vector<LaneRun> runs = RunLanes<float, float>(config, MakeWhole(0, 1), 2);
  EXPECT_TRUE(runs[1].y.empty());
  for (const double g : runs[1].mix) EXPECT_EQ(g, 0.0);
}

// The two coefficients of a token add up to 1: the softmax is over them, not over tokens (DeepSpeed #2110).
TEST(DenseBranchTest, SoftmaxIsOverTheTwoOutputsOfAToken) {
  const DenseBranchConfig config{.hidden = kHidden,
                                 .ffn = kFfn,
                                 .activation = ExpertActivation::kGelu,
                                 .bias = false,
                                 .mix = BranchMix::kSoftmax,
                                 .dtype = DType::kF64};
  Whole w = MakeWhole(kTokens, 2);
  std::fill(w.mix.begin(), w.mix.end(), 0.0);
  std::fill(w.mix_bias.begin(), w.mix_bias.end(), 3.0);
  std::fill(w.w_out.begin(), w.w_out.end(), 0.0);
  const std::vector<LaneRun> runs = RunLanes<double, double>(config, w, 1);
  for (size_t i = 0; i < w.m.size(); ++i) EXPECT_EQ(runs[0].y[i], 0.5 * w.m[i]);
}

TEST(DenseBranchTest, RefusesWhatDoesNotFit) {
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("compute"));
  const DenseBranchConfig config{.hidden = 2,
                                 .ffn = 2,
                                 .activation = ExpertActivation::kGelu,
                                 .bias = false,
                                 .mix = BranchMix::kSigmoid,
                                 .dtype = DType::kF32};
  DenseBranchConfig bad = config;
  bad.ffn = 0;
  EXPECT_THAT(DenseBranch::Create(bad, nullptr, device.get()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("ffn 0")));
  bad = config;
  bad.dtype = DType::kI32;
  EXPECT_THAT(DenseBranch::Create(bad, nullptr, device.get()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dtype i32")));
  ASSERT_OK_AND_ASSIGN(const auto branch, DenseBranch::Create(config, nullptr, device.get()));
  std::vector<float> data(8, 1.0f);
  const TensorView tokens(data.data(), DType::kF32, {2, 2});
  DenseBranchWeights weights;
  DenseBranchTape tape;
  EXPECT_THAT(branch->Forward(weights, tokens, tokens, TensorView(data.data(), DType::kF32, {1, 2}), &tape, *stream),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("y must be f32[2, 2], got f32[1, 2]")));
  EXPECT_THAT(branch->Forward(weights, tokens, tokens, tokens, &tape, *stream),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("mix must be f32[1, 2]")));
}

}  // namespace
}  // namespace evenkeel::moe
