#include "evenkeel/comm/testing/chrome_trace.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace evenkeel::comm {
namespace {

std::string Arguments(const CallInfo& info) {
  nlohmann::ordered_json json;
  json["group"] = info.group->name;
  json["epoch"] = info.epoch;
  json["seq"] = info.sequence;
  if (info.dtype.has_value()) {
    json["send_bytes"] = info.send_elements * SizeOf(*info.dtype);
    json["recv_bytes"] = info.recv_elements * SizeOf(*info.dtype);
  }
  return json.dump();
}

}  // namespace

class ChromeTrace::RankObserver final : public CallObserver {
 public:
  RankObserver(ChromeTrace* trace, int rank) : trace_(trace), rank_(rank) {}

  absl::Status Around(const CallInfo& info, Stream& stream, absl::FunctionRef<absl::Status()> call) override {
    auto span = std::make_shared<Span>();
    span->rank = rank_;
    span->track = std::string(stream.name());
    span->name = absl::StrCat(OperationName(info.operation), " ", info.group->name);
    span->arguments = Arguments(info);
    if (stream.is_inline()) {
      span->begin = trace_->Now();
      const absl::Status status = call();
      span->end = trace_->Now();
      trace_->Add(*span);
      return status;
    }
    EK_RETURN_IF_ERROR(stream.Launch([this, span] {
      span->begin = trace_->Now();
      return absl::OkStatus();
    }));
    EK_RETURN_IF_ERROR(call());
    return stream.Launch([this, span] {
      span->end = trace_->Now();
      trace_->Add(*span);
      return absl::OkStatus();
    });
  }

 private:
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
