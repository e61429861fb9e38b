// Orders as data: text form, type checker, derived adjoint, registry.
#include "evenkeel/moe/order.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "evenkeel/moe/builtin_orders.h"
#include "evenkeel/moe/order_adjoint.h"
#include "evenkeel/moe/order_parser.h"
#include "evenkeel/moe/order_types.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::moe {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

std::vector<std::string> Names(const std::vector<TypedStep>& program) {
  std::vector<std::string> names;
  for (const TypedStep& typed : program) names.push_back(StepName(typed.step));
  return names;
}

TypedOrder Typed(const std::string& name, ExpertLayout layout = ExpertLayout::kAny) {
  absl::StatusOr<Order> order = FindOrder(name);
  EK_CHECK_OK(order);
  absl::StatusOr<TypedOrder> typed = CheckOrder(*order, layout);
  EK_CHECK_OK(typed);
  return *typed;
}

// A text with one step per line, so that "line" means something.
std::string Text(const std::vector<std::string>& steps, const std::string& head = "name: \"mine\"\n") {
  std::string text = head;
  for (const std::string& step : steps) absl::StrAppend(&text, "step { ", step, " }\n");
  return text;
}

std::vector<std::string> ReferenceSteps() {
  return {"kind: DISPATCH dim: SLOTS", "kind: ALL_TO_ALL axis: EP", "kind: COPY axis: TP", "kind: EXPERTS",
          "kind: ALL_REDUCE axis: TP", "kind: ALL_TO_ALL axis: EP", "kind: COMBINE"};
}

absl::Status Check(const std::string& text, ExpertLayout layout = ExpertLayout::kAny) {
  absl::StatusOr<Order> order = ParseOrder(text, "mine.textproto");
  if (!order.ok()) return order.status();
  return CheckOrder(*order, layout).status();
}

TEST(BuiltinOrdersTest, ListsTheBuiltInOnesFirst) {
  const std::vector<std::string> names = OrderNames();
  ASSERT_GE(names.size(), 5u);
  EXPECT_EQ(names[0], "reference");
  EXPECT_EQ(names[1], "drop_gather");
  EXPECT_EQ(names[2], "unsharded");
  EXPECT_EQ(names[3], "fused");
  EXPECT_EQ(names[4], "token_sliced");
}

TEST(BuiltinOrdersTest, UnknownNameListsWhatIsLinked) {
  EXPECT_THAT(FindOrder("refrence"), StatusIs(absl::StatusCode::kNotFound,
                                              AllOf(HasSubstr("'refrence'"), HasSubstr("reference, drop_gather"))));
}

TEST(BuiltinOrdersTest, OverlappedIsAnOrderInChunks) {
  ASSERT_OK_AND_ASSIGN(const Order order, FindOrder("overlapped(fused:4)"));
  EXPECT_EQ(order.chunks, 4);
  EXPECT_EQ(order.name, "overlapped(fused:4)");
  EXPECT_EQ(FindOrder("overlapped(reference)")->chunks, 2);
  EXPECT_OK(ParseOrder(FormatOrder(order), "again"));
  EXPECT_THAT(FindOrder("overlapped(fused:0)"), StatusIs(kInvalid, HasSubstr("chunks must be 1 to")));
  EXPECT_THAT(FindOrder("overlapped(fused:x)"), StatusIs(kInvalid, HasSubstr("chunks must be 1 to")));
  EXPECT_THAT(FindOrder("overlapped(what)"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("'what'")));
  EXPECT_EQ(FindOrder("overlapped(token_sliced:3)")->chunks, 3);
  // A row per destination serves experts of several chunks.
  EXPECT_THAT(FindOrder("overlapped(dedup)"),
              StatusIs(kInvalid, AllOf(HasSubstr("step 3 (all_to_all_v(ep))"), HasSubstr("would be sent for each"))));
}

TEST(BuiltinOrdersTest, TwoLevelSplitsEveryExchange) {
  EXPECT_THAT(Names(Typed("two_level(fused)").forward),
              ElementsAre("dispatch(slots)", "slice(tp, slots)", "all_to_all(ep.peers)", "all_to_all(ep.node)",
                          "all_gather(tp, slots)->R", "experts", "reduce_scatter(tp, slots)", "all_to_all(ep.node)",
                          "all_to_all(ep.peers)", "all_gather(tp, slots)->I", "combine"));
  EXPECT_THAT(Names(Typed("two_level(dedup)", ExpertLayout::kWhole).backward),
              ElementsAre("slice(tp, tokens)", "combine'", "all_to_all_v(ep.peers)", "all_to_all_v(ep.node)", "fold'",
                          "experts'", "expand'", "all_to_all_v(ep.node)", "all_to_all_v(ep.peers)",
                          "dispatch'(destinations)", "all_gather(tp, tokens)->I"));
  ASSERT_OK_AND_ASSIGN(const Order both, FindOrder("overlapped(two_level(token_sliced):3)"));
  EXPECT_EQ(both.name, "overlapped(two_level(token_sliced):3)");
  EXPECT_EQ(both.chunks, 3);
  EXPECT_EQ(FindOrder("two_level(overlapped(fused:3))")->chunks, 3);
  ASSERT_OK_AND_ASSIGN(const Order again, ParseOrder(FormatOrder(both), "again"));
  ASSERT_EQ(again.steps.size(), both.steps.size());
  for (size_t i = 0; i < again.steps.size(); ++i) EXPECT_EQ(again.steps[i].level, both.steps[i].level);
  EXPECT_THAT(FindOrder("two_level(two_level(fused))"), StatusIs(kInvalid, HasSubstr("by level already")));
  EXPECT_THAT(Names(Typed("per_node(dedup)", ExpertLayout::kWhole).forward),
              ElementsAre("slice(tp, tokens)", "dispatch(nodes)", "all_to_all_v(ep.peers)", "expand",
                          "all_to_all_v(ep.node)", "expand", "experts", "fold", "all_to_all_v(ep.node)", "fold",
                          "all_to_all_v(ep.peers)", "combine", "all_gather(tp, tokens)->I"));
  EXPECT_THAT(FindOrder("per_node(fused)"), StatusIs(kInvalid, HasSubstr("does not dispatch destinations")));
  EXPECT_THAT(FindOrder("two_level(per_node(dedup))"), StatusIs(kInvalid, HasSubstr("by level already")));
  EXPECT_THAT(FindOrder("two_level(nope)"), StatusIs(absl::StatusCode::kNotFound, HasSubstr("'nope'")));
  EXPECT_THAT(FindOrder(std::string(400, 'x')), StatusIs(absl::StatusCode::kNotFound, HasSubstr("at most 64 bytes")));
}

TEST(BuiltinOrdersTest, AUsersOrderIsFoundByName) {
  ASSERT_TRUE(RegisterOrderOrDie(Text(ReferenceSteps(), "name: \"from_a_test\"\n")));
  EXPECT_OK(FindOrder("from_a_test"));
  EXPECT_THAT(OrderNames(), ::testing::Contains("from_a_test"));
}

TEST(BuiltinOrdersDeathTest, ATakenNameEndsTheProcess) {
  EXPECT_DEATH(RegisterOrderOrDie(Text(ReferenceSteps(), "name: \"reference\"\n")), "registered twice");
}

TEST(BuiltinOrdersTest, TextRoundTrips) {
  for (const std::string& name : OrderNames()) {
    ASSERT_OK_AND_ASSIGN(Order order, FindOrder(name));
    ASSERT_OK_AND_ASSIGN(Order again, ParseOrder(FormatOrder(order), "formatted"));
    for (Step& step : order.steps) step.line = 0;
    for (Step& step : again.steps) step.line = 0;
    EXPECT_EQ(order.steps, again.steps) << name;
    EXPECT_EQ(order.note, again.note);
    EXPECT_EQ(order.expert_layout, again.expert_layout);
    EXPECT_EQ(order.input, again.input);
    EXPECT_EQ(order.output, again.output);
  }
}

// The derived backward programs, as DeepSpeed's and ours must be (upstream notes 1.8, "Backward, op by op").
TEST(OrderAdjointTest, DerivesTheKnownBackwards) {
  EXPECT_THAT(Names(Typed("reference").backward), ElementsAre("combine'", "all_to_all(ep)", "copy(tp)", "experts'",
                                                              "all_reduce(tp)", "all_to_all(ep)", "dispatch'(slots)"));
  EXPECT_THAT(Names(Typed("drop_gather").backward),
              ElementsAre("combine'", "slice(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->I", "copy(tp)",
                          "experts'", "all_reduce(tp)", "slice(tp, slots)", "all_to_all(ep)",
                          "all_gather(tp, slots)->I", "dispatch'(slots)"));
  EXPECT_THAT(
      Names(Typed("fused").backward),
      ElementsAre("combine'", "slice(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->R", "experts'",
                  "reduce_scatter(tp, slots)", "all_to_all(ep)", "all_gather(tp, slots)->I", "dispatch'(slots)"));
  EXPECT_THAT(Names(Typed("unsharded").backward),
              ElementsAre("combine'", "slice(tp, slots)", "all_to_all(ep)", "experts'", "all_to_all(ep)",
                          "all_gather(tp, slots)->I", "dispatch'(slots)"));
  EXPECT_THAT(
      Names(Typed("token_sliced", ExpertLayout::kTensorParallel).backward),
      ElementsAre("slice(tp, tokens)", "combine'", "all_to_all_v(ep)", "all_gather(tp, rows)->R", "experts'",
                  "reduce_scatter(tp, rows)", "all_to_all_v(ep)", "dispatch'(rows)", "all_gather(tp, tokens)->I"));
  EXPECT_THAT(Names(Typed("token_sliced", ExpertLayout::kWhole).backward),
              ElementsAre("slice(tp, tokens)", "combine'", "all_to_all_v(ep)", "experts'", "all_to_all_v(ep)",
                          "dispatch'(rows)", "all_gather(tp, tokens)->I"));
}

// Trail 19 and 20: a slice as the backward of a gather is right only where the gradient is whole. The checker accepts
// the derived program as a program of its own, so each placement is what the next step wants.
TEST(OrderAdjointTest, Trail19_Trail20_BackwardIsWellTypedAndItsBackwardIsTheForward) {
  for (const std::string& name : OrderNames()) {
    for (ExpertLayout layout : {ExpertLayout::kTensorParallel, ExpertLayout::kWhole}) {
      ASSERT_OK_AND_ASSIGN(Order order, FindOrder(name));
      absl::StatusOr<TypedOrder> typed = CheckOrder(order, layout);
      if (!typed.ok()) continue;  // an order for the other layout
      for (size_t i = 0; i < typed->backward.size(); ++i) {
        const TypedStep& step = typed->backward[i];
        if (i > 0) {
          EXPECT_EQ(step.before, typed->backward[i - 1].after) << name;
        }
        if (step.step.transposed) continue;
        ASSERT_OK_AND_ASSIGN(ValueType after, TypeAfter(step.step, step.before, layout));
        EXPECT_EQ(after, step.after) << name << " " << StepName(step.step);
      }
      EXPECT_EQ(typed->backward.front().before, GradientType(typed->forward.back().after));
      EXPECT_EQ(typed->backward.back().after, GradientType(typed->forward.front().before));
      const std::vector<TypedStep> again = DeriveBackward(typed->backward);
      ASSERT_EQ(again.size(), typed->forward.size());
      for (size_t i = 0; i < again.size(); ++i) {
        EXPECT_EQ(again[i].before, typed->forward[i].before) << name;
        EXPECT_EQ(again[i].after, typed->forward[i].after) << name;
        EXPECT_EQ(again[i].step.kind, typed->forward[i].step.kind) << name;
        EXPECT_EQ(again[i].step.transposed, false) << name;
      }
    }
  }
}

TEST(OrderTypesTest, GradientTypesAreAnInvolution) {
  for (Placement placement :
       {Placement::kInvariant, Placement::kReplicated, Placement::kVarying, Placement::kPartial}) {
    const AxisType type = {placement, placement == Placement::kVarying ? Dim::kSlots : Dim::kUnset};
    EXPECT_EQ(GradientType(GradientType(type)), type);
  }
  EXPECT_EQ(GradientType(AxisType{Placement::kReplicated, Dim::kUnset}).placement, Placement::kPartial);
}

TEST(OrderTypesTest, AllReduceLeftOutNamesStepAndTypes) {
  std::vector<std::string> steps = ReferenceSteps();
  steps.erase(steps.begin() + 4);
  EXPECT_THAT(Check(Text(steps)), StatusIs(kInvalid, AllOf(HasSubstr("order 'mine' step 6 (combine) at line 7"),
                                                           HasSubstr("tp is P, wants I"), HasSubstr("all_reduce"))));
}

TEST(OrderTypesTest, AllReduceDoubledNamesTheSecond) {
  std::vector<std::string> steps = ReferenceSteps();
  steps.insert(steps.begin() + 5, steps[4]);
  EXPECT_THAT(Check(Text(steps)),
              StatusIs(kInvalid, AllOf(HasSubstr("step 6 (all_reduce(tp))"), HasSubstr("tp is I, wants P"),
                                       HasSubstr("already summed"))));
}

TEST(OrderTypesTest, AllReduceOnTheWrongAxis) {
  std::vector<std::string> steps = ReferenceSteps();
  steps[4] = "kind: ALL_REDUCE axis: EP";
  EXPECT_THAT(Check(Text(steps)),
              StatusIs(kInvalid, AllOf(HasSubstr("step 5 (all_reduce(ep))"), HasSubstr("ep is V(experts), wants P"))));
}

// Without the copy the input gradient would stay partial: dW exact, dX wrong.
TEST(OrderTypesTest, Trail19_CopyLeftOutIsRefused) {
  std::vector<std::string> steps = ReferenceSteps();
  steps.erase(steps.begin() + 2);
  EXPECT_THAT(Check(Text(steps)), StatusIs(kInvalid, AllOf(HasSubstr("step 3 (experts)"), HasSubstr("tp is I, wants R"),
                                                           HasSubstr("its gradient would not be summed"))));
}

// A gather to I in front of the experts without the copy: the seed of trail 20.
TEST(OrderTypesTest, Trail20_GatherToInvariantBeforeExpertsIsRefused) {
  ASSERT_OK_AND_ASSIGN(std::string text, FindOrderText("fused"));
  text = absl::StrReplaceAll(text, {{"to: REPLICATED", "to: INVARIANT"}});
  EXPECT_THAT(Check(text), StatusIs(kInvalid, AllOf(HasSubstr("(experts)"), HasSubstr("tp is I, wants R"))));
}

// Whole experts with EP across lanes: undropped tokens would reach each expert T times.
TEST(OrderTypesTest, Trail16_DuplicatesCannotReachWholeExperts) {
  ASSERT_OK_AND_ASSIGN(std::string text, FindOrderText("unsharded"));
  text = absl::StrReplaceAll(text, {{"step { kind: SLICE axis: TP dim: SLOTS }", ""}});
  EXPECT_THAT(Check(text), StatusIs(kInvalid, AllOf(HasSubstr("step 2 (all_to_all(ep))"),
                                                    HasSubstr("tp is I, wants V(slots)"), HasSubstr("T times"))));
}

TEST(OrderTypesTest, Trail16_TokenSlicedWithoutItsSliceIsRefusedForWholeExperts) {
  ASSERT_OK_AND_ASSIGN(std::string text, FindOrderText("token_sliced"));
  text = absl::StrReplaceAll(text, {{"step { kind: SLICE axis: TP dim: TOKENS }", ""}});
  EXPECT_THAT(Check(text, ExpertLayout::kWhole), StatusIs(kInvalid, HasSubstr("tp is I, wants V(rows)")));
}

TEST(OrderTypesTest, RefusesTheOtherLayout) {
  EXPECT_THAT(CheckOrder(*FindOrder("unsharded"), ExpertLayout::kTensorParallel),
              StatusIs(kInvalid, AllOf(HasSubstr("expert layout whole"), HasSubstr("tensor_parallel"))));
  EXPECT_THAT(CheckOrder(*FindOrder("fused"), ExpertLayout::kWhole), StatusIs(kInvalid, HasSubstr("layout")));
}

TEST(OrderTypesTest, MainStepsExactlyOnce) {
  EXPECT_THAT(Check(Text({"kind: SLICE axis: TP dim: TOKENS", "kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT"})),
              StatusIs(kInvalid, HasSubstr("no step 'dispatch'")));
  EXPECT_THAT(Check(Text({"kind: DISPATCH dim: SLOTS", "kind: COMBINE"})),
              StatusIs(kInvalid, HasSubstr("no step 'experts'")));
  std::vector<std::string> twice = ReferenceSteps();
  const std::vector<std::string> once = ReferenceSteps();
  twice.insert(twice.end(), once.begin(), once.end());
  EXPECT_THAT(Check(Text(twice)), StatusIs(kInvalid, AllOf(HasSubstr("step 8 (dispatch"), HasSubstr("second"))));
}

TEST(OrderTypesTest, OutputMustBeAsDeclared) {
  EXPECT_THAT(Check(Text(ReferenceSteps(), "name: \"mine\" output: SLICED_TOKENS\n")),
              StatusIs(kInvalid, AllOf(HasSubstr("after its last step"), HasSubstr("tp=I"), HasSubstr("V(tokens)"))));
}

// Sequence-parallel callers: the first slice and the last gather fall away.
TEST(OrderTypesTest, SlicedTokensAtBothEnds) {
  ASSERT_OK_AND_ASSIGN(std::string text, FindOrderText("token_sliced"));
  text = absl::StrReplaceAll(
      text, {{"step { kind: SLICE axis: TP dim: TOKENS }", ""},
             {"step { kind: ALL_GATHER axis: TP dim: TOKENS to: INVARIANT }", ""},
             {"expert_layout: ANY_LAYOUT", "expert_layout: ANY_LAYOUT input: SLICED_TOKENS output: SLICED_TOKENS"}});
  EXPECT_OK(Check(text, ExpertLayout::kTensorParallel));
  EXPECT_OK(Check(text, ExpertLayout::kWhole));
}

// Half an exchange is no exchange, and its levels go in one order.
TEST(OrderTypesTest, LevelsOutOfPlace) {
  const auto reference_with = [](const std::vector<std::string>& out, const std::vector<std::string>& back) {
    std::vector<std::string> steps = ReferenceSteps();
    steps.erase(steps.begin() + 5);
    steps.insert(steps.begin() + 5, back.begin(), back.end());
    steps.erase(steps.begin() + 1);
    steps.insert(steps.begin() + 1, out.begin(), out.end());
    return Check(Text(steps));
  };
  const std::string peers = "kind: ALL_TO_ALL level: PEERS", node = "kind: ALL_TO_ALL level: NODE",
                    all = "kind: ALL_TO_ALL";
  EXPECT_OK(reference_with({peers, node}, {node, peers}));
  EXPECT_OK(reference_with({peers, node}, {all}));
  EXPECT_OK(reference_with({all}, {node, peers}));
  EXPECT_THAT(reference_with({node, peers}, {all}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 2 (all_to_all(ep.node)) at line 3"),
                                       HasSubstr("ep is V(sources), wants V(nodes) or V(experts)"),
                                       HasSubstr("between nodes (level PEERS) first"))));
  EXPECT_THAT(reference_with({all}, {peers, node}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 6 (all_to_all(ep.peers))"),
                                       HasSubstr("ep is V(experts), wants V(sources) or V(nodes)"),
                                       HasSubstr("inside the node (level NODE) first"))));
  EXPECT_THAT(reference_with({peers}, {all}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 3 (copy(tp))"), HasSubstr("ep is V(nodes)"),
                                       HasSubstr("the exchange is half done"))));
  EXPECT_THAT(reference_with({peers, all}, {all}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 3 (all_to_all(ep))"), HasSubstr("half done"))));
  EXPECT_THAT(reference_with({all}, {node}),
              StatusIs(kInvalid, AllOf(HasSubstr("(combine)"), HasSubstr("ep is V(nodes), wants V(sources)"))));
}

// A row per node is expanded half way, and nowhere else; what was expanded there is summed there.
TEST(OrderTypesTest, RowsPerNodeOutOfPlace) {
  const std::string peers = "kind: ALL_TO_ALL_V level: PEERS", node = "kind: ALL_TO_ALL_V level: NODE";
  const std::vector<std::string> middle = {"kind: EXPAND", "kind: COPY", "kind: EXPERTS", "kind: FOLD",
                                           "kind: ALL_REDUCE"};
  const auto order = [&](const std::vector<std::string>& out, const std::vector<std::string>& back) {
    std::vector<std::string> steps = {"kind: DISPATCH dim: NODES"};
    steps.insert(steps.end(), out.begin(), out.end());
    steps.insert(steps.end(), middle.begin(), middle.end());
    steps.insert(steps.end(), back.begin(), back.end());
    steps.push_back("kind: COMBINE");
    return Check(Text(steps));
  };
  EXPECT_OK(order({peers, "kind: EXPAND", node}, {node, "kind: FOLD", peers}));
  EXPECT_THAT(order({"kind: ALL_TO_ALL_V"}, {node, "kind: FOLD", peers}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 2"), HasSubstr("is expanded there before it goes on"))));
  EXPECT_THAT(order({peers, node}, {node, "kind: FOLD", peers}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 3"), HasSubstr("the value is nodes"))));
  EXPECT_THAT(order({"kind: EXPAND", peers, node}, {node, "kind: FOLD", peers}),
              StatusIs(kInvalid, AllOf(HasSubstr("step 2 (expand)"), HasSubstr("the value is nodes"))));
  EXPECT_THAT(order({peers, "kind: EXPAND", node}, {node, peers}),
              StatusIs(kInvalid, HasSubstr("what is expanded must be folded")));
}

TEST(OrderTypesTest, RefusesRowsOutOfPlace) {
  // Ragged rows sliced at the source.
  EXPECT_THAT(Check(Text({"kind: DISPATCH dim: ROWS", "kind: SLICE axis: TP dim: ROWS"})),
              StatusIs(kInvalid, AllOf(HasSubstr("step 2"), HasSubstr("wants V(experts)"))));
  // Rows of all tokens do not belong to lanes.
  EXPECT_THAT(
      Check(Text({"kind: DISPATCH dim: ROWS", "kind: ALL_TO_ALL_V axis: EP", "kind: SLICE axis: TP dim: ROWS"})),
      StatusIs(kInvalid, AllOf(HasSubstr("step 3"), HasSubstr("slice tokens before the dispatch"))));
  // Padded buffers by all_to_all_v and the reverse.
  EXPECT_THAT(Check(Text({"kind: DISPATCH dim: SLOTS", "kind: ALL_TO_ALL_V axis: EP"})),
              StatusIs(kInvalid, HasSubstr("the value is slots, wants rows")));
  EXPECT_THAT(Check(Text({"kind: DISPATCH dim: ROWS", "kind: ALL_TO_ALL axis: EP"})),
              StatusIs(kInvalid, HasSubstr("the value is rows, wants slots")));
  // Experts before the exchange.
  EXPECT_THAT(Check(Text({"kind: DISPATCH dim: SLOTS", "kind: COPY axis: TP", "kind: EXPERTS"})),
              StatusIs(kInvalid, HasSubstr("ep is V(sources), wants V(experts)")));
  // Gathering along what is not there.
  EXPECT_THAT(Check(Text({"kind: SLICE axis: TP dim: SLOTS"})),
              StatusIs(kInvalid, HasSubstr("dim is slots, wants tokens")));
}

// Orders nobody built in: late sums of partial tokens, and a backward that sums tokens instead of slots.
TEST(OrderTypesTest, AcceptsOtherWellTypedOrders) {
  EXPECT_OK(Check(Text({"kind: DISPATCH dim: SLOTS", "kind: ALL_TO_ALL", "kind: COPY", "kind: EXPERTS",
                        "kind: ALL_TO_ALL", "kind: COMBINE to: PARTIAL", "kind: ALL_REDUCE"})));
  EXPECT_OK(Check(Text({"kind: COPY", "kind: DISPATCH dim: SLOTS", "kind: ALL_TO_ALL", "kind: EXPERTS",
                        "kind: ALL_REDUCE", "kind: ALL_TO_ALL", "kind: COMBINE"})));
  EXPECT_OK(Check(Text({"kind: DISPATCH dim: ROWS", "kind: ALL_TO_ALL_V", "kind: COPY", "kind: EXPERTS",
                        "kind: ALL_REDUCE", "kind: ALL_TO_ALL_V", "kind: COMBINE"})));
}

TEST(OrderParserTest, NamesFileAndLine) {
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: DISPATCH dim: SLOTS }\nstep { kind: FLY }\n", "x.textproto"),
              StatusIs(kInvalid, AllOf(HasSubstr("x.textproto:3:"), HasSubstr("FLY"))));
  EXPECT_THAT(ParseOrder("name: \"a\"\n\nstep { kind: SLICE }\n", "x"),
              StatusIs(kInvalid, HasSubstr("x:3: step 1 (slice) lacks its dim")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { axis: TP }\n", "x"),
              StatusIs(kInvalid, HasSubstr("x:2: step 1 lacks its kind")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: ALL_GATHER dim: SLOTS }\n", "x"),
              StatusIs(kInvalid, HasSubstr("lacks `to`")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: EXPERTS axis: TP }\n", "x"),
              StatusIs(kInvalid, HasSubstr("has no axis")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: ALL_TO_ALL axis: TP }\n", "x"),
              StatusIs(kInvalid, HasSubstr("wants EP")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: COPY level: NODE }\n", "x"),
              StatusIs(kInvalid, HasSubstr("x:2: step 1 (copy) has no level; only exchanges")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: ALL_TO_ALL level: RACK }\n", "x"),
              StatusIs(kInvalid, AllOf(HasSubstr("x:2:"), HasSubstr("RACK"))));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: COPY to: PARTIAL }\n", "x"),
              StatusIs(kInvalid, HasSubstr("which it cannot")));
  EXPECT_THAT(ParseOrder("name: \"a\"\nstep { kind: DISPATCH dim: SLOTS\n", "x"),
              StatusIs(kInvalid, HasSubstr("x:3:")));
}

TEST(OrderParserTest, RefusesBadHeadsAndSizes) {
  EXPECT_THAT(ParseOrder("", "x"), StatusIs(kInvalid, HasSubstr("name")));
  EXPECT_THAT(ParseOrder("name: \"a b\" step { kind: COMBINE }", "x"), StatusIs(kInvalid, HasSubstr("name")));
  EXPECT_THAT(ParseOrder("name: \"a\"", "x"), StatusIs(kInvalid, HasSubstr("no steps")));
  EXPECT_THAT(ParseOrder("name: \"a\" chunks: 0 step { kind: COMBINE }", "x"), StatusIs(kInvalid, HasSubstr("chunks")));
  EXPECT_THAT(ParseOrder(Text(std::vector<std::string>(65, "kind: COMBINE")), "x"),
              StatusIs(kInvalid, HasSubstr("65 steps")));
  EXPECT_THAT(ParseOrder(std::string(kMaxOrderTextBytes + 1, ' '), "x"), StatusIs(kInvalid, HasSubstr("bytes")));
  EXPECT_THAT(ParseOrder(std::string("name: \"a\"\0", 10), "x"), StatusIs(kInvalid, HasSubstr("x:")));
}

}  // namespace
}  // namespace evenkeel::moe
