// Rank 0's end of a network whose every move a test writes down, and a group over it.
//
//   ScriptedGroup group(3);
//   group.wire.At(absl::Milliseconds(500), [&] { group.wire.Deliver(1, kControlTag, EncodeControl(notice, 0)); });
//   EXPECT_THAT(group.Barrier(), ...);
//
// Time stands still but in Pause, which goes to the next event, or as far as it may; behind an event it stands still
// once. Like MPI, and unlike the simulation, a message that has arrived is seen only by the next Test of its transfer.
#ifndef EVENKEEL_COMM_MESSAGE_TESTING_SCRIPTED_WIRE_H_
#define EVENKEEL_COMM_MESSAGE_TESTING_SCRIPTED_WIRE_H_

#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/message/mailroom.h"
#include "evenkeel/comm/message/message_transport.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/device/host_device.h"

namespace evenkeel::comm {

class ScriptedWire final : public Wire {
 public:
  struct Sent {
    int peer = 0;
    int tag = 0;
    std::string bytes;
    Transfer* transfer = nullptr;  // while it is under way
  };

  explicit ScriptedWire(int size) : size_(size) {}

  // ---- The script.
  std::list<Sent> sent;
  // Which sends stay under way until Take.
  std::function<bool(const Sent&)> stays = [](const Sent&) { return false; };
  std::function<bool(const Transfer&)> can_cancel = [](const Transfer&) { return true; };
  std::set<int> dead;
  std::function<void(int peer)> on_health = [](int) {};
  absl::Status broken;     // what status() says
  absl::Status condemned;  // what Condemn was told
  // Positive: payload is moving: Pause takes so long and never has anything to look at.
  absl::Duration busy_pause = absl::ZeroDuration();

  void At(absl::Duration time, std::function<void()> action) { events_.emplace(time, std::move(action)); }
  void Deliver(int peer, int tag, std::string bytes) { arrived_.push_back({peer, tag, std::move(bytes)}); }
  // What this rank sent to `peer` last, beside control messages, comes back from it: it makes the same call.
  void Echo(int peer) {
    for (auto it = sent.rbegin(); it != sent.rend(); ++it) {
      if (it->peer == peer && it->tag != kControlTag) return Deliver(peer, it->tag, it->bytes);
    }
  }
  void Take(int peer) {
    for (Sent& message : sent) {
      if (message.peer == peer && message.transfer != nullptr) std::exchange(message.transfer, nullptr)->done = true;
    }
  }
  // Receives, and sends, that could still touch memory of the calls.
  int NumOpen() const {
    const auto is_open = [](const auto& m) { return m.tag != kControlTag && m.transfer != nullptr; };
    return static_cast<int>(std::count_if(posted_.begin(), posted_.end(), is_open) +
                            std::count_if(sent.begin(), sent.end(), is_open));
  }

  // ---- Wire.
  int rank() const override { return 0; }
  int size() const override { return size_; }
  absl::Duration Now() override { return now_; }
  absl::Status StartSend(int peer, int tag, const void* data, int64_t bytes, Transfer* transfer) override {
    if (!broken.ok()) return absl::InternalError("a send on a broken wire");
    *transfer = Transfer();
    sent.push_back({peer, tag, std::string(static_cast<const char*>(data), static_cast<size_t>(bytes))});
    if (!stays(sent.back())) return absl::OkStatus();
    transfer->done = false;
    sent.back().transfer = transfer;
    return absl::OkStatus();
  }
  absl::Status StartReceive(int peer, int tag, void* data, int64_t capacity, Transfer* transfer) override {
    if (!broken.ok()) return absl::InternalError("a receive on a broken wire");
    *transfer = Transfer();
    transfer->done = false;
    posted_.push_back({peer, tag, data, capacity, transfer});
    return absl::OkStatus();
  }
  absl::Status Test(absl::Span<Transfer* const> transfers) override {
    for (Transfer* transfer : transfers) {
      const auto receive =
          std::find_if(posted_.begin(), posted_.end(), [&](const Posted& p) { return p.transfer == transfer; });
      if (receive == posted_.end()) continue;
      const auto message = std::find_if(arrived_.begin(), arrived_.end(), [&](const Arrived& a) {
        return a.peer == receive->peer && a.tag == receive->tag;
      });
      if (message == arrived_.end()) continue;
      transfer->bytes = static_cast<int64_t>(message->bytes.size()) <= receive->capacity
                            ? static_cast<int64_t>(message->bytes.size())
                            : -1;
      if (transfer->bytes > 0) std::memcpy(receive->data, message->bytes.data(), message->bytes.size());
      transfer->done = true;
      arrived_.erase(message);
      posted_.erase(receive);
    }
    return absl::OkStatus();
  }
  bool Cancel(Transfer* transfer) override {
    if (transfer->done) return true;
    if (!can_cancel(*transfer)) {
      KnownForEver().push_back(transfer);
      return false;
    }
    posted_.remove_if([transfer](const Posted& p) { return p.transfer == transfer; });
    for (Sent& message : sent) {
      if (message.transfer == transfer) message.transfer = nullptr;
    }
    transfer->done = true;
    return true;
  }
  bool Pause(const PauseHint& hint) override {
    const bool busy = busy_pause > absl::ZeroDuration();
    if (std::exchange(stand_still_, false) && !busy) return true;
    const absl::Duration until = busy ? now_ + busy_pause : std::max(now_, hint.until);
    if (!events_.empty() && events_.begin()->first <= until) {
      now_ = std::max(now_, events_.begin()->first);
      const std::function<void()> action = std::move(events_.begin()->second);
      events_.erase(events_.begin());
      stand_still_ = true;
      action();
    } else {
      now_ = until;
    }
    return !busy;
  }
  PeerHealth Health(int peer, bool) override {
    on_health(peer);
    if (dead.count(peer) == 0) return {};
    return {.state = PeerHealth::State::kDead, .text = "is dead"};
  }
  absl::Status status() const override { return broken; }
  void Condemn(const absl::Status& cause) override { condemned = cause; }

 private:
  struct Posted {
    int peer = 0;
    int tag = 0;
    void* data = nullptr;
    int64_t capacity = 0;
    Transfer* transfer = nullptr;
  };
  struct Arrived {
    int peer = 0;
    int tag = 0;
    std::string bytes;
  };

  // Transfers that were not given back: as a real wire does, this one knows them until the process ends.
  static std::vector<Transfer*>& KnownForEver() {
    static auto* const known = new std::vector<Transfer*>();
    return *known;
  }

  const int size_;
  absl::Duration now_ = absl::ZeroDuration();
  bool stand_still_ = false;
  std::multimap<absl::Duration, std::function<void()>> events_;
  std::list<Posted> posted_;
  std::list<Arrived> arrived_;
};

// A group of all ranks over it, epoch 7, with a limit of a second. Rank i came to it by its proposal 10 * i.
struct ScriptedGroup {
  explicit ScriptedGroup(int size, const MessageOptions& options = {}, const StragglerOptions& stragglers = {})
      : wire(size), topology(Topology::SingleNode(size)) {
    Group world{.axis = Axis::kWorld, .name = "world", .ranks = std::vector<int>(static_cast<size_t>(size))};
    std::iota(world.ranks.begin(), world.ranks.end(), 0);
    ProposalSerials serials;
    for (int i = 0; i < size; ++i) serials.push_back(i == 0 ? -1 : 10 * i);
    auto owned = CreateMessageTransport(&wire, &mailroom, options, ScratchMemory::Heap(), world, 0, kEpoch, serials);
    transport = owned.get();
    communicator = HostCommunicator::Create({.group = world,
                                             .rank = 0,
                                             .epoch = kEpoch,
                                             .ledger = &ledger,
                                             .topology = &topology,
                                             .deadline = absl::Seconds(1),
                                             .stragglers = stragglers},
                                            std::move(owned));
  }
  absl::Status Barrier() { return communicator->Barrier(*stream); }
  // At `time` peer gives the group up, or leaves it: the newest message of its kind with that serial.
  void Notice(absl::Duration time, int peer, const ControlMessage& message) {
    wire.At(time, [this, peer, message] { wire.Deliver(peer, kControlTag, EncodeControl(message, serial[peer]++)); });
  }

  static constexpr int64_t kEpoch = 7;
  ScriptedWire wire;
  Mailroom mailroom{&wire};
  ByteLedger ledger;
  Topology topology;
  std::map<int, int64_t> serial;
  std::unique_ptr<HostDevice> device = HostDevice::Create();
  std::unique_ptr<Stream> stream = *device->CreateStream("comm");
  std::unique_ptr<Communicator> communicator;
  Transport* transport = nullptr;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_TESTING_SCRIPTED_WIRE_H_
