// When each collective ran, as a trace that chrome://tracing and ui.perfetto.dev show: a process a rank, a track a
// stream.
//
//   ChromeTrace trace;                                                  // shared by all ranks of the process
//   auto watched = ObserveBackend(&world->backend(r), trace.ForRank(r));
//   ... run ...
//   WriteFile("comm.trace.json", trace.ToJson());
#ifndef EVENKEEL_COMM_TESTING_CHROME_TRACE_H_
#define EVENKEEL_COMM_TESTING_CHROME_TRACE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/runtime/base/clock.h"

namespace evenkeel::comm {

// Thread-safe. Outlives the observers that it gave out, and all work of the streams that they watched.
class ChromeTrace {
 public:
  explicit ChromeTrace(Clock* clock = Clock::Real());
  ~ChromeTrace();

  // The observer for the calls of world rank `rank`; owned by the trace. On worker streams the span of a call is
  // measured on the stream itself, by two more launches. A call that fails has a span too, which says so; one that its
  // stream skips has none.
  CallObserver* ForRank(int rank);

  // A span of any other work on a track of `rank`, such as a compute stream.
  void AddSpan(int rank, absl::string_view track, absl::string_view name, absl::Duration begin, absl::Duration end);
  absl::Duration Now() { return clock_->Now(); }

  // {"traceEvents": [...]}: complete events ("X") in microseconds, and the names of processes and tracks.
  std::string ToJson() const;

 private:
  class RankObserver;
  class WorkerSpan;
  struct Span {
    int rank = 0;
    std::string track = {};
    std::string name = {};
    std::string arguments = {};  // a JSON object
    absl::Duration begin = absl::ZeroDuration();
    absl::Duration end = absl::ZeroDuration();
  };

  void Add(Span span);

  Clock* const clock_;
  mutable absl::Mutex mutex_;
  std::vector<Span> spans_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::unique_ptr<RankObserver>> observers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_TESTING_CHROME_TRACE_H_
