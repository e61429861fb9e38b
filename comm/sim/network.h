// The simulated network and clock: messages under way, matching, and what goes wrong with them. Knows no threads.
#ifndef EVENKEEL_COMM_SIM_NETWORK_H_
#define EVENKEEL_COMM_SIM_NETWORK_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/sim/sim_options.h"
#include "evenkeel/runtime/base/philox.h"

namespace evenkeel::comm {

// Not thread-safe: one rank at a time is at work.
class Network {
 public:
  explicit Network(const SimOptions& options);

  absl::Duration now() const { return now_; }
  void StartSend(int from, int to, int tag, const void* data, int64_t bytes, Transfer* transfer);
  void StartReceive(int to, int from, int tag, void* data, int64_t capacity, Transfer* transfer);
  void Cancel(int rank, Transfer* transfer);

  // Runs `action` at `time`.
  void At(absl::Duration time, std::function<void()> action);
  bool HasEvents() const { return !events_.empty(); }
  absl::Duration NextEventTime() const { return events_.top().time; }
  // Moves the clock to the next event and runs it.
  void RunNextEvent();
  // Moves the clock, not past the next event.
  void AdvanceTo(absl::Duration time) { now_ = std::max(now_, time); }

  // Nothing is delivered to or sent by `rank` from now on.
  void Disconnect(int rank) { connected_[rank] = 0; }
  // Something happened to `rank` since the last call: a message came, a send was taken, or Notify.
  bool TakeActivity(int rank) { return std::exchange(activity_[rank], 0) != 0; }
  bool HasActivity(int rank) const { return activity_[rank] != 0; }
  void Notify(int rank) { activity_[rank] = 1; }

  // Into the log's digest.
  void Note(uint64_t what, uint64_t a, uint64_t b);
  uint64_t log_digest() const { return log_digest_; }
  int64_t num_messages() const { return num_messages_; }
  void CountFault() { ++num_faults_; }
  int64_t num_faults() const { return num_faults_; }

 private:
  struct Message {
    int from = 0;
    int to = 0;
    int tag = 0;
    std::string bytes;
  };
  struct Posted {
    void* data = nullptr;
    int64_t capacity = 0;
    Transfer* transfer = nullptr;
  };
  struct Event {
    absl::Duration time;
    int64_t order = 0;
    std::function<void()> action;
    bool operator>(const Event& other) const { return std::tie(time, order) > std::tie(other.time, other.order); }
  };
  struct Line {
    absl::Duration free = absl::ZeroDuration();          // when the last byte is out
    absl::Duration last_arrival = absl::ZeroDuration();  // arrivals keep their order
  };
  using Key = std::tuple<int, int, int>;  // to, from, tag

  void Deliver(const Message& message);
  void Fill(const Posted& posted, const Message& message);

  const SimOptions options_;
  const Topology topology_;
  const PhiloxStream random_;
  absl::Duration now_ = absl::ZeroDuration();
  int64_t next_order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
  std::map<Key, std::deque<Posted>> posted_;
  std::map<Key, std::deque<Message>> unexpected_;
  std::vector<std::vector<Line>> lines_;
  std::vector<int64_t> sent_;  // messages of each rank
  std::vector<char> connected_;
  std::vector<char> activity_;
  uint64_t log_digest_ = 0;
  int64_t num_messages_ = 0;
  int64_t num_faults_ = 0;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_SIM_NETWORK_H_
