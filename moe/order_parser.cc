#include "evenkeel/moe/order_parser.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/moe/order.pb.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/text_format.h"

namespace evenkeel::moe {
namespace {

using google::protobuf::TextFormat;

// Keeps the first error; lines and columns come 0-based.
class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    if (!message_.empty()) return;
    line_ = line + 1;
    message_ = absl::StrCat("column ", column + 1, ": ", message);
  }
  void AddWarning(int line, google::protobuf::io::ColumnNumber column, const std::string& message) override {
    AddError(line, column, message);
  }
  int line() const { return line_; }
  const std::string& message() const { return message_; }

 private:
  int line_ = 1;
  std::string message_;
};

absl::Status ErrorAt(absl::string_view source, int line, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(source, ":", line, ": ", what));
}

StepKind KindFromProto(StepProto::Kind kind) {
  switch (kind) {
    case StepProto::SLICE:
      return StepKind::kSlice;
    case StepProto::ALL_GATHER:
      return StepKind::kAllGather;
    case StepProto::KIND_UNSET:
    case StepProto::COPY:
      return StepKind::kCopy;
    case StepProto::ALL_REDUCE:
      return StepKind::kAllReduce;
    case StepProto::REDUCE_SCATTER:
      return StepKind::kReduceScatter;
    case StepProto::ALL_TO_ALL:
      return StepKind::kAllToAll;
    case StepProto::ALL_TO_ALL_V:
      return StepKind::kAllToAllV;
    case StepProto::DISPATCH:
      return StepKind::kDispatch;
    case StepProto::EXPERTS:
      return StepKind::kExperts;
    case StepProto::COMBINE:
      return StepKind::kCombine;
    case StepProto::EXPAND:
      return StepKind::kExpand;
    case StepProto::FOLD:
      return StepKind::kFold;
  }
  return StepKind::kCopy;
}

StepProto::Kind KindToProto(StepKind kind) {
  for (int value = StepProto::SLICE; value <= StepProto::FOLD; ++value) {
    if (KindFromProto(static_cast<StepProto::Kind>(value)) == kind) return static_cast<StepProto::Kind>(value);
  }
  return StepProto::KIND_UNSET;
}

// Both enums list the same values in the same order, from "unset" on.
Dim DimFromProto(DimProto dim) { return static_cast<Dim>(static_cast<int>(dim)); }
Placement PlacementFromProto(PlacementProto placement) { return static_cast<Placement>(static_cast<int>(placement)); }
static_assert(static_cast<int>(Dim::kSums) == SUMS && static_cast<int>(Dim::kNodeSums) == NODE_SUMS &&
              static_cast<int>(Dim::kTokens) == TOKENS);
static_assert(static_cast<int>(Level::kPeers) == PEERS && static_cast<int>(Level::kNode) == NODE);
static_assert(static_cast<int>(Placement::kPartial) == PARTIAL && static_cast<int>(Placement::kInvariant) == INVARIANT);

// Which fields a kind has: wanted ones must be there, others must not.
struct Fields {
  bool axis = false;
  bool dim = false;
  bool to = false;
};

Fields FieldsOf(StepKind kind) {
  switch (kind) {
    case StepKind::kSlice:
    case StepKind::kReduceScatter:
      return {.axis = true, .dim = true};
    case StepKind::kAllGather:
      return {.axis = true, .dim = true, .to = true};
    case StepKind::kCopy:
    case StepKind::kAllReduce:
    case StepKind::kAllToAll:
    case StepKind::kAllToAllV:
      return {.axis = true};
    case StepKind::kDispatch:
      return {.dim = true};
    case StepKind::kExperts:
    case StepKind::kCombine:
    case StepKind::kExpand:
    case StepKind::kFold:
      return {};
  }
  return {};
}

absl::Status CheckFields(const StepProto& proto, const Step& step, int number, absl::string_view source) {
  const std::string where = absl::StrCat("step ", number, " (", StepKindName(step.kind), ")");
  const Fields wants = FieldsOf(step.kind);
  const bool exchange = IsExchange(step.kind);
  if (!wants.axis && proto.has_axis()) return ErrorAt(source, step.line, where + " has no axis");
  if (exchange && step.axis != comm::Axis::kEp) {
    return ErrorAt(source, step.line, where + " has axis TP, wants EP: rows go to the ranks that hold their experts");
  }
  if (!exchange && proto.has_level()) {
    return ErrorAt(source, step.line, where + " has no level; only exchanges go level by level");
  }
  if (wants.dim && step.dim == Dim::kUnset) return ErrorAt(source, step.line, where + " lacks its dim");
  if (!wants.dim && proto.has_dim()) return ErrorAt(source, step.line, where + " has no dim");
  if (wants.to && step.to != Placement::kInvariant && step.to != Placement::kReplicated) {
    return ErrorAt(source, step.line, where + " lacks `to`: INVARIANT or REPLICATED");
  }
  const bool partial_combine = step.kind == StepKind::kCombine && step.to == Placement::kPartial;
  if (!wants.to && proto.has_to() && !partial_combine) {
    return ErrorAt(source, step.line, where + " has `to: " + PlacementProto_Name(proto.to()) + "`, which it cannot");
  }
  return absl::OkStatus();
}

absl::StatusOr<Step> StepFromProto(const StepProto& proto, int number, int line, absl::string_view source) {
  if (proto.kind() == StepProto::KIND_UNSET) {
    return ErrorAt(source, line, absl::StrCat("step ", number, " lacks its kind"));
  }
  Step step;
  step.kind = KindFromProto(proto.kind());
  const bool exchange = IsExchange(step.kind);
  step.level = static_cast<Level>(static_cast<int>(proto.level()));
  step.axis = proto.axis() == EP || (exchange && proto.axis() == AXIS_UNSET) ? comm::Axis::kEp : comm::Axis::kTp;
  step.dim = DimFromProto(proto.dim());
  step.to = PlacementFromProto(proto.to());
  step.when = static_cast<When>(static_cast<int>(proto.when()));
  step.line = line;
  EK_RETURN_IF_ERROR(CheckFields(proto, step, number, source));
  return step;
}

AxisType TokensFromProto(TokenPlacementProto placement) {
  if (placement == SLICED_TOKENS) return {Placement::kVarying, Dim::kTokens};
  return {Placement::kInvariant, Dim::kUnset};
}

// Names go into file names, tables and error lines.
bool IsPlainName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxOrderNameBytes && std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.' || c == '(' ||
           c == ')' || c == ':';
  });
}

absl::Status CheckHead(const OrderProto& proto, absl::string_view source) {
  if (!IsPlainName(proto.name())) {
    return ErrorAt(source, 1,
                   absl::StrCat("the order's name must be 1 to ", kMaxOrderNameBytes,
                                " letters, digits or any of _-.():, it has ", proto.name().size(), " bytes"));
  }
  if (proto.note().size() > 512) return ErrorAt(source, 1, "the note has more than 512 bytes");
  if (proto.chunks() < 1 || proto.chunks() > kMaxOrderChunks) {
    return ErrorAt(source, 1, absl::StrCat("chunks is ", proto.chunks(), ", wants 1 to ", kMaxOrderChunks));
  }
  if (proto.step_size() == 0) return ErrorAt(source, 1, "the order has no steps");
  if (proto.step_size() > kMaxOrderSteps) {
    return ErrorAt(source, 1, absl::StrCat("the order has ", proto.step_size(), " steps, at most ", kMaxOrderSteps));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Order> ParseOrder(absl::string_view text, absl::string_view source) {
  if (static_cast<int64_t>(text.size()) > kMaxOrderTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": ", text.size(), " bytes, an order has at most ", kMaxOrderTextBytes));
  }
  OrderProto proto;
  FirstError error;
  TextFormat::ParseInfoTree tree;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  parser.WriteLocationsTo(&tree);
  parser.SetRecursionLimit(8);
  google::protobuf::io::ArrayInputStream stream(text.data(), static_cast<int>(text.size()));
  if (!parser.Parse(&stream, &proto)) return ErrorAt(source, error.line(), error.message());
  EK_RETURN_IF_ERROR(CheckHead(proto, source));

  Order order;
  order.name = proto.name();
  order.note = proto.note();
  order.expert_layout = static_cast<ExpertLayout>(static_cast<int>(proto.expert_layout()) - 1);
  order.input = TokensFromProto(proto.input());
  order.output = TokensFromProto(proto.output());
  order.chunks = proto.chunks();
  const google::protobuf::FieldDescriptor* step_field = OrderProto::descriptor()->FindFieldByName("step");
  for (int i = 0; i < proto.step_size(); ++i) {
    const int line = tree.GetLocation(step_field, i).line + 1;
    EK_ASSIGN_OR_RETURN(Step step, StepFromProto(proto.step(i), i + 1, line, source));
    order.steps.push_back(step);
  }
  return order;
}

std::string FormatOrder(const Order& order) {
  const auto tokens = [](const AxisType& type) {
    return type.placement == Placement::kVarying ? SLICED_TOKENS : REPLICATED_TOKENS;
  };
  std::string text = absl::StrCat("name: \"", order.name, "\"\n");
  if (!order.note.empty()) {
    OrderProto quoted;  // the printer knows how to quote
    quoted.set_note(order.note);
    std::string line;
    TextFormat::PrintToString(quoted, &line);
    text += line;
  }
  const auto layout = static_cast<ExpertLayoutProto>(static_cast<int>(order.expert_layout) + 1);
  absl::StrAppend(&text, "expert_layout: ", ExpertLayoutProto_Name(layout), "\n");
  absl::StrAppend(&text, "input: ", TokenPlacementProto_Name(tokens(order.input)), "\n");
  absl::StrAppend(&text, "output: ", TokenPlacementProto_Name(tokens(order.output)), "\n");
  for (const Step& step : order.steps) {
    const Fields fields = FieldsOf(step.kind);
    StepProto proto;
    proto.set_kind(KindToProto(step.kind));
    if (fields.axis) proto.set_axis(step.axis == comm::Axis::kEp ? EP : TP);
    if (fields.dim && step.dim <= Dim::kNodeSums) proto.set_dim(static_cast<DimProto>(static_cast<int>(step.dim)));
    const bool addends = step.kind == StepKind::kCombine && step.to == Placement::kPartial;
    if (fields.to || addends) proto.set_to(static_cast<PlacementProto>(static_cast<int>(step.to)));
    if (step.level != Level::kAll) proto.set_level(static_cast<LevelProto>(static_cast<int>(step.level)));
    if (step.when != When::kAlways) proto.set_when(static_cast<StepProto::When>(static_cast<int>(step.when)));
    absl::StrAppend(&text, "step { ", proto.ShortDebugString(), " }\n");
  }
  if (order.chunks != 1) absl::StrAppend(&text, "chunks: ", order.chunks, "\n");
  return text;
}

}  // namespace evenkeel::moe
