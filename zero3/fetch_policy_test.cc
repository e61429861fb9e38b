#include "evenkeel/zero3/fetch_policy.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(FetchPolicyTest, LookUpListsWhatIsLinked) {
  EXPECT_THAT(FetchPolicyNames(), ::testing::ElementsAre("coalesced", "flat", "per_parameter", "replicated"));
  EXPECT_THAT(FindFetchPolicy("flatt"),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("\"flatt\""), HasSubstr("flat, per_parameter"))));
}

TEST(FetchPolicyTest, CostsAreTheFormulas) {
  for (int64_t p : {1, 3, 24, 192, 768}) {
    std::vector<ParameterSpec> parameters(static_cast<size_t>(p));
    for (ParameterSpec& spec : parameters) spec.shape = Shape({8});
    for (int w : {2, 3, 4, 8, 16, 64}) {
      const FetchCost each = (*FindFetchPolicy("per_parameter"))->Cost(parameters, w);
      EXPECT_EQ(each.host_operations, p * (2 * w + 7) + w + 3);
      const FetchCost coalesced = (*FindFetchPolicy("coalesced"))->Cost(parameters, w);
      EXPECT_EQ(coalesced.host_operations, p * (w + 5) + w + 3);
      const FetchCost flat = (*FindFetchPolicy("flat"))->Cost(parameters, w);
      EXPECT_LE(flat.host_operations, 10);
      EXPECT_EQ(flat.collectives, 1);
      EXPECT_EQ(flat.copies, 0);
      EXPECT_EQ(flat.allocations, 0);
    }
  }
}

class DeathPolicy final : public FetchPolicy {
 public:
  absl::string_view name() const override { return "flat"; }
  absl::StatusOr<UnitLayout> Layout(absl::Span<const ParameterSpec>, int) const override { return UnitLayout(); }
  FetchCost Cost(absl::Span<const ParameterSpec>, int) const override { return {}; }
  bool leaf_edges() const override { return true; }
  absl::StatusOr<std::unique_ptr<UnitGatherer>> CreateGatherer(GathererContext) const override {
    return absl::InternalError("never made");
  }
};

TEST(FetchPolicyDeathTest, TwoPoliciesOfOneNameDie) {
  static const DeathPolicy policy;
  EXPECT_DEATH(RegisterFetchPolicy(&policy), "two fetch policies have this name");
}

}  // namespace
}  // namespace evenkeel::zero3
