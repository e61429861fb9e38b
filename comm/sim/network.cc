#include "evenkeel/comm/sim/network.h"

#include <algorithm>
#include <cstring>

#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {

Network::Network(const SimOptions& options)
    : options_(options),
      topology_(options.topology.has_value() ? *options.topology : Topology::SingleNode(options.world_size)),
      random_(PhiloxKey(options.seed).Add("network")),
      lines_(options.world_size, std::vector<Line>(options.world_size)),
      sent_(options.world_size, 0),
      connected_(options.world_size, 1),
      activity_(options.world_size, 0) {}

void Network::Note(uint64_t what, uint64_t a, uint64_t b) {
  log_digest_ = CombineDigests(log_digest_, what + 0x9e3779b97f4a7c15u * (a + 0x9e3779b97f4a7c15u * b));
}

void Network::At(absl::Duration time, std::function<void()> action) {
  events_.push({std::max(time, now_), next_order_++, std::move(action)});
}

void Network::RunNextEvent() {
  Event event = events_.top();
  events_.pop();
  now_ = std::max(now_, event.time);
  event.action();
}

void Network::StartSend(int from, int to, int tag, const void* data, int64_t bytes, Transfer* transfer) {
  *transfer = Transfer();  // the bytes are copied: done at once
  if (connected_[from] == 0) return;
  const int64_t index = sent_[from]++;
  ++num_messages_;
  Message message{from, to, tag, std::string(static_cast<const char*>(data), static_cast<size_t>(bytes))};
  Note(1, static_cast<uint64_t>(from) << 32 | static_cast<uint64_t>(to), Digest64(message.bytes));

  const SimLink& link = options_.links[static_cast<int>(topology_.Link(from, to))];
  Line& line = lines_[from][to];
  line.free = std::max(line.free, now_) + absl::Seconds(static_cast<double>(bytes) / link.bytes_per_second);
  const double stretch = 1.0 + options_.jitter * random_.Uniform(static_cast<uint64_t>(num_messages_));
  absl::Duration arrival = std::max(line.last_arrival, line.free + stretch * link.latency);
  bool in_order = true, dropped = false;
  absl::Duration again = absl::InfiniteDuration();
  for (const SimFault& fault : options_.faults) {
    if (fault.rank != from || fault.index != index || fault.kind >= SimFault::Kind::kStop) continue;
    CountFault();
    switch (fault.kind) {
      case SimFault::Kind::kReorder:
        in_order = false;
        [[fallthrough]];
      case SimFault::Kind::kDelay:
        arrival += fault.by;
        break;
      case SimFault::Kind::kDuplicate:
        again = arrival + fault.by;
        break;
      case SimFault::Kind::kCorrupt:
        if (!message.bytes.empty()) {
          const uint64_t bit = random_.Below(static_cast<uint64_t>(index), message.bytes.size() * 8);
          message.bytes[bit / 8] = static_cast<char>(message.bytes[bit / 8] ^ (1 << (bit % 8)));
        }
        break;
      default:
        dropped = true;
    }
  }
  if (in_order) line.last_arrival = arrival;
  if (dropped) return;
  if (again < absl::InfiniteDuration()) At(again, [this, message] { Deliver(message); });
  if (arrival <= now_) {
    Deliver(message);  // a link without latency
    return;
  }
  At(arrival, [this, message = std::move(message)] { Deliver(message); });
}

void Network::StartReceive(int to, int from, int tag, void* data, int64_t capacity, Transfer* transfer) {
  *transfer = Transfer();
  transfer->done = false;
  const Posted posted{data, capacity, transfer};
  const auto found = unexpected_.find({to, from, tag});
  if (found == unexpected_.end()) {
    posted_[{to, from, tag}].push_back(posted);
    return;
  }
  Fill(posted, found->second.front());
  found->second.pop_front();
  if (found->second.empty()) unexpected_.erase(found);
}

void Network::Deliver(const Message& message) {
  if (connected_[message.to] == 0) return;
  Note(2, static_cast<uint64_t>(message.from) << 32 | static_cast<uint64_t>(message.to),
       static_cast<uint64_t>(message.tag));
  const Key key = {message.to, message.from, message.tag};
  const auto found = posted_.find(key);
  if (found == posted_.end()) {
    unexpected_[key].push_back(message);
    return;
  }
  Fill(found->second.front(), message);
  found->second.pop_front();
  if (found->second.empty()) posted_.erase(found);
  Notify(message.to);
}

void Network::Fill(const Posted& posted, const Message& message) {
  const auto bytes = static_cast<int64_t>(message.bytes.size());
  if (bytes <= posted.capacity) {
    if (bytes > 0) std::memcpy(posted.data, message.bytes.data(), message.bytes.size());
    posted.transfer->bytes = bytes;
  } else {
    posted.transfer->bytes = -1;
  }
  posted.transfer->done = true;
}

void Network::Cancel(int rank, Transfer* transfer) {
  if (transfer->done) return;
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if (std::get<0>(it->first) != rank) continue;
    auto& queue = it->second;
    const auto found =
        std::find_if(queue.begin(), queue.end(), [transfer](const Posted& p) { return p.transfer == transfer; });
    if (found == queue.end()) continue;
    queue.erase(found);
    if (queue.empty()) posted_.erase(it);
    break;
  }
  transfer->done = true;
}

}  // namespace evenkeel::comm
