// The experts alone: slices add up to the whole, empty experts stay untouched, bad shapes are refused.
#include "evenkeel/moe/experts.h"

#include <memory>
#include <string>
#include <vector>

#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/runtime/tensor/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int64_t kExperts = 3, kHidden = 5, kFfn = 8;

// Experts of one lane with their tensors; every lane sees the columns of the same whole experts.
class Lane {
 public:
  Lane(ExpertActivation activation, int lane, int lanes) : device_(HostDevice::Create()) {
    stream_ = *device_->CreateStream("s");
    shape_ = {.local_experts = kExperts,
              .hidden = kHidden,
              .ffn = kFfn / lanes,
              .activation = activation,
              .bias = true,
              .adds_output_bias = lane == 0,
              .dtype = DType::kF64};
    first_ = lane * shape_.ffn;
    const int64_t f = shape_.ffn;
    w_in_ = Made("w_in", Shape({kExperts, kHidden, f}),
                 [&](int64_t g, int64_t i, int64_t j) { return (g * kHidden + i) * kFfn + first_ + j; });
    w_gate_ = Made("w_gate", Shape({kExperts, kHidden, f}),
                   [&](int64_t g, int64_t i, int64_t j) { return (g * kHidden + i) * kFfn + first_ + j; });
    w_out_ = Made("w_out", Shape({kExperts, f, kHidden}),
                  [&](int64_t g, int64_t i, int64_t j) { return (g * kFfn + first_ + i) * kHidden + j; });
    b_in_ = Made("b_in", Shape({kExperts, f}), [&](int64_t g, int64_t i, int64_t) { return g * kFfn + first_ + i; });
    b_gate_ =
        Made("b_gate", Shape({kExperts, f}), [&](int64_t g, int64_t i, int64_t) { return g * kFfn + first_ + i; });
    b_out_ = Made("b_out", Shape({kExperts, kHidden}), [&](int64_t g, int64_t i, int64_t) { return g * kHidden + i; });
    for (Tensor* t : {&w_in_, &w_gate_, &w_out_, &b_in_, &b_gate_, &b_out_}) gradients_.push_back(Zeros(t->shape()));
  }

  // Forward and backward of rows; returns y and dx.
  absl::Status Run(const std::vector<int64_t>& counts) {
    int64_t rows = 0;
    for (int64_t count : counts) rows += count;
    const auto row = [](int64_t i, int64_t j, int64_t) { return i * kHidden + j; };
    x_ = Made("x", Shape({rows, kHidden}), row);
    dy_ = Made("dy", Shape({rows, kHidden}), row);
    y_ = Zeros(Shape({rows, kHidden}));
    dx_ = Zeros(Shape({rows, kHidden}));
    std::vector<Tensor> work;
    for (int i = 0; i < 5; ++i) work.push_back(Zeros(Shape({rows, shape_.ffn})));
    const ExpertWork views = {work[0].view(), work[1].view(), work[2].view(), work[3].view(), work[4].view()};
    EK_RETURN_IF_ERROR(ExpertsForward(shape_, Weights(), x_.const_view(), counts, views, y_.view(), *stream_));
    return ExpertsBackward(shape_, Weights(), x_.const_view(), counts, {}, views, dy_.const_view(), dx_.view(),
                           Gradients(), *stream_);
  }

  ExpertWeights Weights() const {
    return {w_in_.const_view(), w_gate_.const_view(), w_out_.const_view(),
            b_in_.const_view(), b_gate_.const_view(), b_out_.const_view()};
  }
  ExpertGradients Gradients() const {
    return {gradients_[0].view(), gradients_[1].view(), gradients_[2].view(),
            gradients_[3].view(), gradients_[4].view(), gradients_[5].view()};
  }
  const ExpertShape& shape() const { return shape_; }
  std::vector<double> y() const { return Values(y_); }
  std::vector<double> dx() const { return Values(dx_); }
  std::vector<double> gradient(int i) const { return Values(gradients_[i]); }

 private:
  template <typename Index>
  Tensor Made(const std::string& name, const Shape& shape, Index index) {
    Tensor tensor = Zeros(shape);
    const PhiloxStream stream(PhiloxKey(2).Add(name));
    const int64_t d1 = shape.dim(1), d2 = shape.rank() == 3 ? shape.dim(2) : 1;
    for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
      tensor.data<double>()[i] = stream.Normal(index(i / (d1 * d2), i / d2 % d1, i % d2));
    }
    return tensor;
  }
  Tensor Zeros(const Shape& shape) { return *Tensor::Zeros(device_.get(), DType::kF64, shape); }
  static std::vector<double> Values(const Tensor& t) {
    return std::vector<double>(t.data<double>(), t.data<double>() + t.view().num_elements());
  }

  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
  ExpertShape shape_;
  int64_t first_ = 0;
  Tensor w_in_, w_gate_, w_out_, b_in_, b_gate_, b_out_, x_, dy_, y_, dx_;
  std::vector<Tensor> gradients_;
};

// The output is P: lanes' outputs and input gradients add up to the whole experts', output bias included once.
TEST(ExpertsTest, SlicesAddUpToTheWhole) {
  for (ExpertActivation activation : {ExpertActivation::kGelu, ExpertActivation::kSwiGlu}) {
    for (int lanes : {2, 4, 8}) {
      Lane whole(activation, 0, 1);
      ASSERT_OK(whole.Run({2, 0, 3}));
      std::vector<double> y(whole.y().size()), dx(y.size());
      for (int lane = 0; lane < lanes; ++lane) {
        Lane part(activation, lane, lanes);
        ASSERT_OK(part.Run({2, 0, 3}));
        const std::vector<double> part_y = part.y(), part_dx = part.dx();
        for (size_t i = 0; i < y.size(); ++i) {
          y[i] += part_y[i];
          dx[i] += part_dx[i];
        }
        EXPECT_EQ(part.gradient(5), whole.gradient(5));  // b_out is replicated: every lane has all of its gradient
      }
      for (size_t i = 0; i < y.size(); ++i) {
        EXPECT_NEAR(y[i], whole.y()[i], 1e-11);
        EXPECT_NEAR(dx[i], whole.dx()[i], 1e-11);
      }
    }
  }
}

// Trail 24: zero rows for an expert are allowed, and leave exact zeros.
TEST(ExpertsTest, Trail24_EmptyExpertsStayExactlyZero) {
  Lane lane(ExpertActivation::kSwiGlu, 0, 1);
  ASSERT_OK(lane.Run({4, 0, 0}));
  for (int i = 0; i < 6; ++i) {
    const std::vector<double> g = lane.gradient(i);
    const size_t each = g.size() / kExperts;
    EXPECT_THAT(std::vector<double>(g.begin() + each, g.end()), Each(0.0)) << i;
    EXPECT_NE(std::vector<double>(g.begin(), g.begin() + each), std::vector<double>(each, 0.0)) << i;
  }
  ASSERT_OK(lane.Run({0, 0, 0}));
  EXPECT_TRUE(lane.y().empty());
}

// A row's output does not depend on the rows beside it, nor do gradients on how rows arrive in two calls.
TEST(ExpertsTest, RowsDoNotSeeEachOther) {
  Lane together(ExpertActivation::kGelu, 0, 1), first(ExpertActivation::kGelu, 0, 1);
  ASSERT_OK(together.Run({5, 0, 0}));
  ASSERT_OK(first.Run({2, 0, 0}));
  const std::vector<double> all = together.y();
  EXPECT_EQ(first.y(), std::vector<double>(all.begin(), all.begin() + 2 * kHidden));
}

TEST(ExpertsTest, RefusesWhatDoesNotFit) {
  Lane lane(ExpertActivation::kGelu, 0, 1);
  constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(lane.Run({1, 2}), StatusIs(kInvalid, HasSubstr("2 row counts for 3 local experts")));
  ExpertWeights weights = lane.Weights();
  weights.w_out = weights.w_in;
  EXPECT_THAT(CheckExpertTensors(lane.shape(), weights),
              StatusIs(kInvalid, HasSubstr("w_out is f64 [3, 5, 8], wants f64 [3, 8, 5]")));
  ExpertShape bf16 = lane.shape();
  bf16.dtype = DType::kBF16;
  EXPECT_THAT(CheckExpertTensors(bf16, lane.Gradients()), StatusIs(kInvalid, HasSubstr("wants f32")));
}

}  // namespace
}  // namespace evenkeel::moe
