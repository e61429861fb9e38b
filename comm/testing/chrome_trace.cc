#include "evenkeel/comm/testing/chrome_trace.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace evenkeel::comm {
namespace {

nlohmann::ordered_json Arguments(const CallInfo& info) {
  nlohmann::ordered_json json;
  json["group"] = info.group->name;
  json["epoch"] = info.epoch;
  json["seq"] = info.sequence;
  if (info.dtype.has_value()) {
    json["send_bytes"] = info.send_elements * SizeOf(*info.dtype);
    json["recv_bytes"] = info.recv_elements * SizeOf(*info.dtype);
  }
  if (info.operation == Operation::kGrouped) {
    json["calls"] = info.grouped.size();
    json["send_bytes"] = 0;
    json["recv_bytes"] = 0;
    for (const CallInfo& part : info.grouped) {
      json["send_bytes"] = json["send_bytes"].get<int64_t>() + part.send.num_bytes();
      json["recv_bytes"] = json["recv_bytes"].get<int64_t>() + part.recv.num_bytes();
    }
  }
  return json;
}

// With how the call ended, where it went wrong.
std::string Ended(nlohmann::ordered_json arguments, const std::string& how) {
  if (!how.empty()) arguments["status"] = how;
  return arguments.dump();
}

}  // namespace

// The span of one call on a worker stream. When the stream fails, it drops the launch that would end it.
class ChromeTrace::WorkerSpan {
 public:
  WorkerSpan(ChromeTrace* trace, Span span, nlohmann::ordered_json arguments)
      : trace_(trace), span_(std::move(span)), arguments_(std::move(arguments)) {}
  ~WorkerSpan() {
    if (is_open_) End("failed");
  }
  void Begin() {
    span_.begin = trace_->Now();
    is_open_ = true;
  }
  void End(const std::string& how) {
    is_open_ = false;
    span_.end = trace_->Now();
    span_.arguments = Ended(arguments_, how);
    trace_->Add(span_);
  }

 private:
  ChromeTrace* const trace_;
  Span span_;
  const nlohmann::ordered_json arguments_;
  bool is_open_ = false;
};

class ChromeTrace::RankObserver final : public CallObserver {
 public:
  RankObserver(ChromeTrace* trace, int rank) : trace_(trace), rank_(rank) {}

  absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override {
    Span span{.rank = rank_,
              .track = std::string(stream.name()),
              .name = absl::StrCat(OperationName(info.operation), " ", info.group->name)};
    if (!stream.is_inline()) return AroundWorker(std::move(span), info, stream, call);
    span.begin = trace_->Now();
    const absl::Status status = call();
    span.end = trace_->Now();
    span.arguments = Ended(Arguments(info), status.ok() ? "" : absl::StatusCodeToString(status.code()));
    trace_->Add(std::move(span));
    return status;
  }

 private:
  absl::Status AroundWorker(Span span, const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) {
    auto shared = std::make_shared<WorkerSpan>(trace_, std::move(span), Arguments(info));
    EK_RETURN_IF_ERROR(stream.Launch([shared] {
      shared->Begin();
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(call());
    return stream.Launch([shared = std::move(shared)] {
      shared->End("");
      return absl::OkStatus();
    });
  }

  ChromeTrace* const trace_;
  const int rank_;
};

ChromeTrace::ChromeTrace(Clock* clock) : clock_(clock) {}
ChromeTrace::~ChromeTrace() = default;

CallObserver* ChromeTrace::ForRank(int rank) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<RankObserver>& observer = observers_[rank];
  if (observer == nullptr) observer = std::make_unique<RankObserver>(this, rank);
  return observer.get();
}

void ChromeTrace::AddSpan(int rank, absl::string_view track, absl::string_view name, absl::Duration begin,
                          absl::Duration end) {
  Add({.rank = rank, .track = std::string(track), .name = std::string(name), .begin = begin, .end = end});
}

void ChromeTrace::Add(Span span) {
  absl::MutexLock lock(&mutex_);
  spans_.push_back(std::move(span));
}

std::string ChromeTrace::ToJson() const {
  absl::MutexLock lock(&mutex_);
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  std::map<std::pair<int, std::string>, int> tracks;
  const auto name_event = [&events](const char* kind, int process, int track, const std::string& name) {
    events.push_back({{"name", kind}, {"ph", "M"}, {"pid", process}, {"tid", track}, {"args", {{"name", name}}}});
  };
  absl::Duration start = absl::InfiniteDuration();
  for (const Span& span : spans_) {
    start = std::min(start, span.begin);
    const auto [track, is_new] = tracks.emplace(std::make_pair(span.rank, span.track), tracks.size());
    if (!is_new) continue;
    name_event("process_name", span.rank, track->second, absl::StrCat("rank ", span.rank));
    name_event("thread_name", span.rank, track->second, span.track);
  }
  for (const Span& span : spans_) {
    nlohmann::ordered_json event = {{"name", span.name},
                                    {"ph", "X"},
                                    {"ts", absl::ToDoubleMicroseconds(span.begin - start)},
                                    {"dur", absl::ToDoubleMicroseconds(span.end - span.begin)},
                                    {"pid", span.rank},
                                    {"tid", tracks.at({span.rank, span.track})}};
    if (!span.arguments.empty()) event["args"] = nlohmann::ordered_json::parse(span.arguments);
    events.push_back(std::move(event));
  }
  nlohmann::ordered_json trace;
  trace["traceEvents"] = std::move(events);
  return trace.dump(1) + "\n";
}

}  // namespace evenkeel::comm
