#include "evenkeel/zero3/leaf_selection.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

int Add(ModelDescription& model, const std::string& name, int64_t elements) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = Shape({elements});
  model.parameters.push_back(spec);
  return static_cast<int>(model.parameters.size()) - 1;
}

ModuleNode Linear(ModelDescription& model, const std::string& path, const std::string& name, int64_t elements) {
  return {name, "Linear", {Add(model, absl::StrCat(path, ".", name), elements)}, {}, false};
}

// A block of a router and `experts` experts of three linears of p elements each.
ModuleNode Block(ModelDescription& model, const std::string& path, const std::string& name, int experts, int64_t p) {
  const std::string full = absl::StrCat(path, ".", name);
  ModuleNode block{name, "MoeBlock", {}, {}, false};
  block.children.push_back(Linear(model, full, "router", 1));
  ModuleNode list{"experts", "ModuleList", {}, {}, true};
  for (int e = 0; e < experts; ++e) {
    ModuleNode expert{absl::StrCat(e), "Expert", {}, {}, false};
    for (const char* w : {"gate", "up", "down"}) {
      expert.children.push_back(Linear(model, absl::StrCat(full, ".experts.", e), w, p));
    }
    list.children.push_back(std::move(expert));
  }
  block.children.push_back(std::move(list));
  return block;
}

ModelDescription TwoLayers(int experts, int64_t p) {
  ModelDescription model;
  model.root = {"model", "Model", {}, {}, false};
  for (int l = 0; l < 2; ++l) {
    const std::string path = absl::StrCat("model.", l);
    ModuleNode layer{absl::StrCat(l), "Layer", {}, {}, false};
    layer.children.push_back({"norm", "Norm", {Add(model, path + ".norm.weight", 8)}, {}, false});
    ModuleNode attention{"attention", "Attention", {}, {}, false};
    for (const char* w : {"q", "k", "v", "o"}) {
      attention.children.push_back(Linear(model, path + ".attention", w, 1000));
    }
    layer.children.push_back(std::move(attention));
    layer.children.push_back(Block(model, path, "moe", experts, p));
    model.root.children.push_back(std::move(layer));
  }
  return model;
}

std::vector<std::string> Names(const LeafSelection& selection) {
  std::vector<std::string> names;
  for (const Leaf& leaf : selection.leaves) names.push_back(leaf.name);
  return names;
}

TEST(LeafSelectionTest, RulesByNameGlobAndType) {
  const ModelDescription model = TwoLayers(4, 10);
  LeafOptions options;
  options.rules = {LeafRule::Type("MoeBlock"), LeafRule::Glob("model.*.attention")};
  ASSERT_OK_AND_ASSIGN(const LeafSelection by_rule, SelectLeaves(model, options));
  EXPECT_THAT(Names(by_rule), ElementsAre("model.0.norm", "model.0.attention", "model.0.moe", "model.1.norm",
                                          "model.1.attention", "model.1.moe"));
  const Leaf& moe = by_rule.leaves[2];
  EXPECT_EQ(moe.parameters.size(), 1u + 4 * 3);
  EXPECT_EQ(moe.bytes, (1 + 4 * 3 * 10) * 4);
  EXPECT_EQ(moe.reason, "type MoeBlock");
  EXPECT_EQ(by_rule.leaves[1].reason, "glob model.*.attention");
  EXPECT_EQ(by_rule.leaves[0].reason, "own parameters");
  EXPECT_THAT(by_rule.ToTable(), HasSubstr("model.1.moe"));

  options.rules = {LeafRule::Name("model.1")};
  ASSERT_OK_AND_ASSIGN(const LeafSelection by_name, SelectLeaves(model, options));
  EXPECT_EQ(by_name.leaves.back().name, "model.1");
  EXPECT_EQ(by_name.leaves.back().parameters.size(), 1u + 4 + 13);
  EXPECT_EQ(by_name.Find("model.1"), static_cast<int>(by_name.leaves.size()) - 1);
  EXPECT_EQ(by_name.Find("model.1.moe"), -1);
}

TEST(LeafSelectionTest, OutermostWinsWithinTheCap) {
  const ModelDescription model = TwoLayers(4, 10);
  LeafOptions options;
  options.rules = {LeafRule::Type("Layer"), LeafRule::Type("MoeBlock")};
  ASSERT_OK_AND_ASSIGN(const LeafSelection outer, SelectLeaves(model, options));
  EXPECT_THAT(Names(outer), ElementsAre("model.0", "model.1"));
  options.max_leaf_bytes = 1000;  // a layer has 16,516 bytes, a block 484
  ASSERT_OK_AND_ASSIGN(const LeafSelection capped, SelectLeaves(model, options));
  EXPECT_EQ(capped.Find("model.0"), -1);
  EXPECT_GE(capped.Find("model.0.moe"), 0);
  ASSERT_EQ(capped.refused.size(), 2u);
  EXPECT_EQ(capped.refused[0].name, "model.0");
  EXPECT_THAT(capped.ToTable(), HasSubstr("over the cap of 1000 bytes"));
}

// The worked example of DeepSpeed #6649: expert 3p/(1+3), block 192p/(1+1+64*4).
TEST(LeafSelectionTest, GranularityOfTheWorkedExample) {
  ModelDescription model;
  const int64_t p = 1000000;
  model.root = Block(model, "x", "block", 64, p);
  const Granularity block = ModuleGranularity(model, model.root);
  EXPECT_EQ(block.layers, 1 + 1 + 64 * 4);
  EXPECT_EQ(block.parameters, 192 * p + 1);
  EXPECT_EQ(block.value(), 744186);
  const ModuleNode& expert = model.root.children[1].children[0];
  EXPECT_EQ(ModuleGranularity(model, expert).value(), 750000);
  EXPECT_FALSE(ModuleGranularity(model, model.root.children[1]).eligible);  // a container
  EXPECT_FALSE(ModuleGranularity(model, model.root.children[0]).eligible);  // childless
  LeafOptions options;
  options.granularity_threshold = 744186;
  ASSERT_OK_AND_ASSIGN(const LeafSelection selection, SelectLeaves(model, options));
  EXPECT_THAT(Names(selection), ElementsAre("block"));
  EXPECT_EQ(selection.leaves[0].reason, "granularity 744186 <= 744186");
  options.granularity_threshold = 744185;
  ASSERT_OK_AND_ASSIGN(const LeafSelection none, SelectLeaves(model, options));
  EXPECT_EQ(none.leaves.size(), 1u + 64 * 3);
}

// Norms count as layers with almost no parameters: the whole small model may be under the threshold.
TEST(LeafSelectionTest, Trail109_ThresholdThatTakesTheWholeModelIsCapped) {
  const ModelDescription model = TwoLayers(8, 100);
  LeafOptions options;
  options.granularity_threshold = 10000000;
  ASSERT_OK_AND_ASSIGN(const LeafSelection whole, SelectLeaves(model, options));
  EXPECT_THAT(Names(whole), ElementsAre("model"));
  options.max_leaf_bytes = 20000;
  ASSERT_OK_AND_ASSIGN(const LeafSelection capped, SelectLeaves(model, options));
  EXPECT_EQ(capped.Find("model"), -1);
  EXPECT_GE(capped.Find("model.0.moe"), 0);
  EXPECT_THAT(capped.ToTable(), HasSubstr("refused"));
  EXPECT_THAT(capped.ToTable(), HasSubstr("over the cap of 20000 bytes"));
}

TEST(LeafSelectionTest, SharedParametersAreInBothLeaves) {
  ModelDescription model;
  const int tied = Add(model, "tied", 4);
  model.root = {"m", "Model", {}, {}, false};
  model.root.children.push_back({"in", "Embedding", {tied}, {}, false});
  model.root.children.push_back({"out", "Head", {Add(model, "own", 2), tied, tied}, {}, false});
  ASSERT_OK_AND_ASSIGN(const LeafSelection selection, SelectLeaves(model, {}));
  EXPECT_THAT(selection.leaves[0].parameters, ElementsAre(tied));
  EXPECT_THAT(selection.leaves[1].parameters, ElementsAre(1, tied));
}

TEST(LeafSelectionTest, Globs) {
  EXPECT_TRUE(GlobMatches("a.*.c", "a.b.c"));
  EXPECT_FALSE(GlobMatches("a.*.c", "a.b.b.c"));
  EXPECT_TRUE(GlobMatches("a.**.c", "a.b.b.c"));
  EXPECT_TRUE(GlobMatches("**", "a.b"));
  EXPECT_TRUE(GlobMatches("layers.?.moe", "layers.3.moe"));
  EXPECT_FALSE(GlobMatches("layers.?.moe", "layers.13.moe"));
  EXPECT_TRUE(GlobMatches("*", ""));
  EXPECT_FALSE(GlobMatches("?", "."));
  EXPECT_FALSE(GlobMatches("", "a"));
}

TEST(LeafSelectionTest, RefusesBadInput) {
  const auto expect = [](const ModelDescription& model, const LeafOptions& options, const std::string& what) {
    EXPECT_THAT(SelectLeaves(model, options), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
  };
  const ModelDescription good = TwoLayers(1, 1);
  LeafOptions options;
  options.rules = {LeafRule::Type("Moe")};
  expect(good, options, "type Moe: the rule matches no module");
  options.rules = {LeafRule::Name("model.7")};
  expect(good, options, "matches no module");
  expect(good, {{}, 0, 0}, "0 is not positive");
  expect(good, {{}, -1, 1}, "-1 is negative");
  ModelDescription bad = good;
  bad.root.children[0].parameters.push_back(99);
  expect(bad, {}, "parameter index 99 is outside");
  bad = good;
  Add(bad, "orphan", 1);
  expect(bad, {}, "no module uses this parameter");
  bad = good;
  bad.parameters[1].name = bad.parameters[0].name;
  expect(bad, {}, "two parameters have this name");
  bad = good;
  bad.root.children[1].name = "0";
  expect(bad, {}, "two modules have this full name");
}

}  // namespace
}  // namespace evenkeel::zero3
