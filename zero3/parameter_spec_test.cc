#include "evenkeel/zero3/parameter_spec.h"

#include <vector>

#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

ParameterSpec Slice(std::vector<int64_t> shape, std::vector<int64_t> global, std::vector<int64_t> offset) {
  ParameterSpec spec;
  spec.name = "w";
  spec.shape = *Shape::Create(shape);
  spec.global_shape = std::move(global);
  spec.global_offset = std::move(offset);
  spec.initializer = Initializer::Normal(1.0);
  return spec;
}

TEST(ParameterSpecTest, EverySliceHasTheValuesOfTheWhole) {
  const ParameterSpec whole = Slice({4, 3, 6}, {}, {});
  for (int64_t e = 0; e < 4; e += 2) {
    for (int64_t f = 0; f < 6; f += 3) {
      const ParameterSpec slice = Slice({2, 3, 3}, {4, 3, 6}, {e, 0, f});
      std::vector<double> values(18);
      FillInitialValues(slice, 5, 0, 18, values.data());
      for (int64_t i = 0; i < 18; ++i) {
        const int64_t global = (e + i / 9) * 18 + (i / 3 % 3) * 6 + f + i % 3;
        ASSERT_EQ(GlobalIndex(slice, i), global);
        EXPECT_EQ(values[static_cast<size_t>(i)], InitialValue(whole, 5, global));
      }
    }
  }
}

TEST(ParameterSpecTest, NameAndSeedMatter) {
  ParameterSpec a = Slice({8}, {}, {});
  ParameterSpec b = a;
  b.name = "v";
  EXPECT_NE(InitialValue(a, 1, 0), InitialValue(b, 1, 0));
  EXPECT_NE(InitialValue(a, 1, 0), InitialValue(a, 2, 0));
  EXPECT_NE(InitialValue(a, 1, 0), InitialValue(a, 1, 1));
}

TEST(ParameterSpecTest, InitializersOfEveryKind) {
  ParameterSpec spec = Slice({100}, {}, {});
  spec.initializer = Initializer::Ones();
  EXPECT_EQ(InitialValue(spec, 1, 3), 1.0);
  spec.initializer = Initializer::Function([](int64_t i) { return static_cast<double>(i) * 2; });
  EXPECT_EQ(InitialValue(spec, 1, 3), 6.0);
  spec.initializer = Initializer::Uniform(0.25);
  double low = 0;
  double high = 0;
  for (int64_t i = 0; i < 100; ++i) {
    low = std::min(low, InitialValue(spec, 1, i));
    high = std::max(high, InitialValue(spec, 1, i));
  }
  EXPECT_GE(low, -0.25);
  EXPECT_LT(high, 0.25);
  EXPECT_LT(low, -0.1);
  EXPECT_GT(high, 0.1);
}

TEST(ParameterSpecTest, RefusesWhatDoesNotFit) {
  EXPECT_OK(ValidateParameterSpec(Slice({2, 3}, {4, 3}, {2, 0})));
  EXPECT_OK(ValidateParameterSpec(Slice({0, 3}, {}, {})));
  EXPECT_THAT(ValidateParameterSpec(Slice({2, 3}, {4, 3}, {3, 0})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("[3, 5) is outside [0, 4)")));
  EXPECT_THAT(ValidateParameterSpec(Slice({2, 3}, {4}, {0})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has 2 dimensions, global_shape 1")));
  ParameterSpec bad = Slice({2}, {}, {});
  bad.dtype = DType::kI32;
  EXPECT_THAT(ValidateParameterSpec(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("i32")));
  bad = Slice({2}, {}, {});
  bad.expert_dim = 1;
  EXPECT_THAT(ValidateParameterSpec(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("expert_dim 1")));
  bad = Slice({2}, {}, {});
  bad.name = "";
  EXPECT_THAT(ValidateParameterSpec(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no name")));
  bad = Slice({2}, {}, {});
  bad.initializer = Initializer::Function(nullptr);
  EXPECT_THAT(ValidateParameterSpec(bad), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no function")));
}

}  // namespace
}  // namespace evenkeel::zero3
