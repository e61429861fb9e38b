#include "evenkeel/runtime/base/error_context.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

constexpr char kPayloadUrl[] = "evenkeel/error_context";

void AddLine(absl::string_view key, absl::string_view value, std::string* text) {
  absl::StrAppend(text, key, "=", absl::CEscape(value), "\n");
}

// One "key=escaped value" line a field; findings are "finding=rank:had".
std::string Serialize(const ErrorContext& context) {
  std::string text;
  AddLine("module", context.module, &text);
  AddLine("operation", context.operation, &text);
  AddLine("group", context.group, &text);
  AddLine("epoch", absl::StrCat(context.epoch), &text);
  AddLine("sequence", absl::StrCat(context.sequence), &text);
  AddLine("rank", absl::StrCat(context.rank), &text);
  AddLine("size", absl::StrCat(context.size), &text);
  AddLine("elapsed_ns", absl::StrCat(absl::ToInt64Nanoseconds(context.elapsed)), &text);
  AddLine("limit_ns", absl::StrCat(absl::ToInt64Nanoseconds(context.limit)), &text);
  AddLine("next_step", context.next_step, &text);
  for (const RankFinding& finding : context.findings) {
    AddLine("finding", absl::StrCat(finding.rank, ":", finding.had), &text);
  }
  return text;
}

void SetField(absl::string_view key, const std::string& value, ErrorContext* context) {
  int64_t number = 0;
  const bool is_number = absl::SimpleAtoi(value, &number);
  if (key == "module") context->module = value;
  if (key == "operation") context->operation = value;
  if (key == "group") context->group = value;
  if (key == "next_step") context->next_step = value;
  if (key == "finding") {
    const std::pair<std::string, std::string> parts = absl::StrSplit(value, absl::MaxSplits(':', 1));
    RankFinding finding;
    if (absl::SimpleAtoi(parts.first, &finding.rank)) {
      finding.had = parts.second;
      context->findings.push_back(std::move(finding));
    }
  }
  if (!is_number) return;
  if (key == "epoch") context->epoch = number;
  if (key == "sequence") context->sequence = number;
  if (key == "rank") context->rank = static_cast<int>(number);
  if (key == "size") context->size = static_cast<int>(number);
  if (key == "elapsed_ns") context->elapsed = absl::Nanoseconds(number);
  if (key == "limit_ns") context->limit = absl::Nanoseconds(number);
}

std::string Message(const ErrorContext& context, absl::string_view what) {
  std::string text = absl::StrCat(context.module, context.operation.empty() ? "" : " ", context.operation);
  if (!context.group.empty()) absl::StrAppend(&text, " group=", context.group);
  if (context.epoch >= 0) absl::StrAppend(&text, " epoch=", context.epoch);
  if (context.sequence >= 0) absl::StrAppend(&text, " seq=", context.sequence);
  if (context.rank >= 0) absl::StrAppend(&text, " rank=", context.rank, "/", context.size);
  absl::StrAppend(&text, ": ", what);
  for (const RankFinding& finding : context.findings) {
    absl::StrAppend(&text, "; rank ", finding.rank, " ", finding.had);
  }
  if (context.limit > absl::ZeroDuration()) {
    absl::StrAppend(&text, "; after ", absl::FormatDuration(context.elapsed), " of ",
                    absl::FormatDuration(context.limit));
  }
  if (!context.next_step.empty()) absl::StrAppend(&text, "; ", context.next_step);
  return text;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, const ErrorContext& context, absl::string_view what) {
  EK_CHECK(code != absl::StatusCode::kOk);
  absl::Status status(code, Message(context, what));
  status.SetPayload(kPayloadUrl, absl::Cord(Serialize(context)));
  return status;
}

std::optional<ErrorContext> GetErrorContext(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return std::nullopt;
  ErrorContext context;
  const std::string text(*payload);
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits('=', 1));
    std::string value;
    if (absl::CUnescape(parts.second, &value)) SetField(parts.first, value, &context);
  }
  return context;
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload(
      [&annotated](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

}  // namespace evenkeel
