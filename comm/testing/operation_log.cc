#include "evenkeel/comm/testing/operation_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace evenkeel::comm {
namespace {

std::string Text(absl::string_view text) { return std::string(text); }

// Keys stay in the order in which they are set.
void AddArguments(const CallInfo& info, nlohmann::ordered_json* object) {
  nlohmann::ordered_json& json = *object;
  if (info.dtype.has_value()) json["dtype"] = Text(DTypeName(*info.dtype));
  if (info.reduce_op.has_value()) json["reduce"] = Text(ReduceOpName(*info.reduce_op));
  const bool even = info.operation == Operation::kAllReduce || info.operation == Operation::kAllGather ||
                    info.operation == Operation::kReduceScatter || info.operation == Operation::kAllToAll ||
                    info.operation == Operation::kBroadcast;
  if (even) {
    json["send"] = info.send_elements;
    json["recv"] = info.recv_elements;
  }
  if (info.operation == Operation::kBroadcast) json["root"] = info.peer;
}

nlohmann::ordered_json CommonPart(const CallInfo& info) {
  nlohmann::ordered_json json;
  json["op"] = Text(OperationName(info.operation));
  json["axis"] = Text(AxisName(info.group->axis));
  json["group"] = info.group->name;
  json["size"] = info.group->size();
  json["seq"] = info.sequence;
  AddArguments(info, &json);
  for (const CallInfo& part : info.grouped) {
    nlohmann::ordered_json call;
    call["op"] = Text(OperationName(part.operation));
    AddArguments(part, &call);
    json["calls"].push_back(std::move(call));
  }
  return json;
}

void AddOwnArguments(const CallInfo& info, nlohmann::ordered_json* json) {
  (*json)["send"] = info.send_elements;
  (*json)["recv"] = info.recv_elements;
  if (info.peer >= 0) (*json)["peer"] = info.peer;
}

nlohmann::ordered_json OwnPart(const CallInfo& info, const absl::Status& status) {
  nlohmann::ordered_json json;
  json["rank"] = info.rank;
  json["epoch"] = info.epoch;
  json["ranks"] = info.group->ranks;
  AddOwnArguments(info, &json);
  for (const CallInfo& part : info.grouped) {
    nlohmann::ordered_json call;
    AddOwnArguments(part, &call);
    json["calls"].push_back(std::move(call));
  }
  json["status"] = Text(absl::StatusCodeToString(status.code()));
  return json;
}

}  // namespace

absl::Status OperationLog::Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) {
  (void)stream;
  size_t index = 0;
  {
    absl::MutexLock lock(&mutex_);
    index = entries_.size();
    const bool is_pair = info.operation == Operation::kSend || info.operation == Operation::kRecv;
    entries_.push_back({CommonPart(info).dump(), "", !is_pair});
  }
  const absl::Status status = call();
  absl::MutexLock lock(&mutex_);
  entries_[index].own = OwnPart(info, status).dump();
  return status;
}

std::string OperationLog::ToJson() const {
  absl::MutexLock lock(&mutex_);
  std::string text;
  for (const Entry& entry : entries_) {
    if (entry.is_collective) absl::StrAppend(&text, entry.common, "\n");
  }
  return text;
}

std::string OperationLog::ToDetailedJson() const {
  absl::MutexLock lock(&mutex_);
  std::string text;
  for (const Entry& entry : entries_) {
    absl::StrAppend(&text, "{\"call\":", entry.common, ",\"own\":", entry.own.empty() ? "null" : entry.own, "}\n");
  }
  return text;
}

int64_t OperationLog::size() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(entries_.size());
}

std::string FindLogDifference(absl::Span<const OperationLog> logs) {
  std::vector<std::string> texts;
  for (const OperationLog& log : logs) texts.push_back(log.ToJson());
  return FindLogDifference(texts);
}

std::string FindLogDifference(absl::Span<const std::string> texts) {
  if (texts.empty()) return "";
  const std::vector<std::string> first = absl::StrSplit(texts[0], '\n');
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const std::vector<std::string> other = absl::StrSplit(texts[rank], '\n');
    size_t line = 0;
    while (line < std::min(first.size(), other.size()) && first[line] == other[line]) ++line;
    const auto shown = [line](const std::vector<std::string>& lines) {
      return line < lines.size() && !lines[line].empty() ? lines[line] : std::string("nothing more");
    };
    return absl::StrCat("call ", line, ": rank 0 has ", shown(first), ", rank ", rank, " has ", shown(other));
  }
  return "";
}

}  // namespace evenkeel::comm
