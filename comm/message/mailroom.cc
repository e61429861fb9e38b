#include "evenkeel/comm/message/mailroom.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {
namespace {

constexpr uint32_t kMagic = 0x314b4502;
// The payload names the ranks: a cause without it would be an echo where it arrives.
constexpr size_t kMaxStatusText = 1000;
constexpr size_t kMaxStatusPayload = 2600;

struct Header {
  uint32_t magic = kMagic;
  uint32_t kind = 0;
  uint32_t flags = 0;
  uint32_t body_bytes = 0;
  int64_t serial = 0;
  int64_t id = 0;
  int64_t a = 0;
  int64_t b = 0;
  uint64_t digest = 0;  // of the header with digest 0, and the body
};

uint64_t DigestOf(Header header, absl::string_view body) {
  header.digest = 0;
  return CombineDigests(Digest64(&header, sizeof(header)), Digest64(body.data(), body.size()));
}

void AppendPart(absl::string_view part, std::string* out) {
  const auto length = static_cast<uint32_t>(part.size());
  out->append(reinterpret_cast<const char*>(&length), sizeof(length));
  out->append(part.data(), part.size());
}

bool TakePart(absl::string_view* bytes, std::string* part) {
  uint32_t length = 0;
  if (bytes->size() < sizeof(length)) return false;
  std::memcpy(&length, bytes->data(), sizeof(length));
  bytes->remove_prefix(sizeof(length));
  if (bytes->size() < length) return false;
  part->assign(bytes->data(), length);
  bytes->remove_prefix(length);
  return true;
}

}  // namespace

std::string EncodeControl(const ControlMessage& message, int64_t serial) {
  Header header;
  header.kind = static_cast<uint32_t>(message.kind);
  header.flags = (message.pair ? 1u : 0u) | (message.in_agree ? 2u : 0u);
  header.body_bytes = static_cast<uint32_t>(message.body.size());
  header.serial = serial;
  header.id = message.id;
  header.a = message.a;
  header.b = message.b;
  header.digest = DigestOf(header, message.body);
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.append(message.body);
  return bytes;
}

absl::StatusOr<ControlMessage> DecodeControl(absl::string_view bytes, int64_t* serial) {
  Header header;
  if (bytes.size() < sizeof(header)) return absl::InvalidArgumentError("control message cut short");
  std::memcpy(&header, bytes.data(), sizeof(header));
  bytes.remove_prefix(sizeof(header));
  if (header.magic != kMagic || header.body_bytes != bytes.size() || header.digest != DigestOf(header, bytes) ||
      header.kind < static_cast<uint32_t>(ControlMessage::Kind::kProposal) ||
      header.kind > static_cast<uint32_t>(ControlMessage::Kind::kWaiting)) {
    return absl::InvalidArgumentError("control message damaged");
  }
  *serial = header.serial;
  ControlMessage message;
  message.kind = static_cast<ControlMessage::Kind>(header.kind);
  message.pair = (header.flags & 1u) != 0;
  message.in_agree = (header.flags & 2u) != 0;
  message.id = header.id;
  message.a = header.a;
  message.b = header.b;
  message.body.assign(bytes.data(), bytes.size());
  return message;
}

std::string EncodeStatus(const absl::Status& status) {
  std::string bytes;
  const auto code = static_cast<uint32_t>(status.code());
  bytes.append(reinterpret_cast<const char*>(&code), sizeof(code));
  AppendPart(status.message().substr(0, kMaxStatusText), &bytes);
  status.ForEachPayload([&bytes](absl::string_view url, const absl::Cord& payload) {
    if (url.size() + payload.size() > kMaxStatusPayload || bytes.size() > kMaxStatusText + 64) return;
    AppendPart(url, &bytes);
    AppendPart(std::string(payload), &bytes);
  });
  return bytes;
}

absl::Status DecodeStatus(absl::string_view bytes) {
  uint32_t code = 0;
  std::string text, url, payload;
  if (bytes.size() < sizeof(code)) return absl::InternalError("a peer's cause could not be read");
  std::memcpy(&code, bytes.data(), sizeof(code));
  bytes.remove_prefix(sizeof(code));
  if (code == 0 || code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated) || !TakePart(&bytes, &text)) {
    return absl::InternalError("a peer's cause could not be read");
  }
  absl::Status status(static_cast<absl::StatusCode>(code), text);
  while (!bytes.empty() && TakePart(&bytes, &url) && TakePart(&bytes, &payload)) {
    status.SetPayload(url, absl::Cord(payload));
  }
  return status;
}

Mailroom::Mailroom(Wire* wire) : wire_(wire), inboxes_(wire->size()), serials_(wire->size(), 0) {
  absl::MutexLock lock(&mutex_);
  for (int peer = 0; peer < wire->size(); ++peer) {
    if (peer == wire->rank()) continue;
    inboxes_[peer] = std::make_unique<Inbox>();
    (void)Receive(peer);  // a wire that carries nothing says so in its status
  }
}

Mailroom::~Mailroom() {
  absl::MutexLock lock(&mutex_);
  for (auto& inbox : inboxes_) {
    if (inbox != nullptr && !wire_->Cancel(&inbox->transfer)) (void)inbox.release();
  }
  for (Outgoing& out : outgoing_) {
    // A send that cannot be taken back: its few bytes stay in place for the rest of the process.
    if (!wire_->Cancel(&out.transfer)) new std::string(std::move(out.bytes));
  }
}

absl::Status Mailroom::Receive(int peer) {
  Inbox& inbox = *inboxes_[peer];
  inbox.transfer = Transfer();
  return wire_->StartReceive(peer, kControlTag, inbox.buffer.data(), static_cast<int64_t>(inbox.buffer.size()),
                             &inbox.transfer);
}

void Mailroom::Post(int peer, const ControlMessage& message) {
  absl::MutexLock lock(&mutex_);
  outgoing_.emplace_back();
  Outgoing& out = outgoing_.back();
  out.peer = peer;
  out.bytes = EncodeControl(message, serials_[peer]++);
  const absl::Status sent =
      wire_->StartSend(peer, kControlTag, out.bytes.data(), static_cast<int64_t>(out.bytes.size()), &out.transfer);
  if (!sent.ok() || out.transfer.done) outgoing_.pop_back();
}

void Mailroom::Poll() {
  absl::MutexLock lock(&mutex_);
  std::vector<Transfer*> transfers;
  for (auto& inbox : inboxes_) {
    if (inbox != nullptr) transfers.push_back(&inbox->transfer);
  }
  for (Outgoing& out : outgoing_) transfers.push_back(&out.transfer);
  for (bool again = true; again;) {
    again = false;
    if (!wire_->Test(transfers).ok()) return;
    for (int peer = 0; peer < static_cast<int>(inboxes_.size()); ++peer) {
      if (inboxes_[peer] == nullptr || !inboxes_[peer]->transfer.done) continue;
      Inbox& inbox = *inboxes_[peer];
      const int64_t bytes = std::max<int64_t>(0, inbox.transfer.bytes);
      Sort(peer, absl::string_view(inbox.buffer.data(), static_cast<size_t>(bytes)));
      if (!Receive(peer).ok()) return;
      again = true;
    }
  }
  outgoing_.remove_if([](const Outgoing& out) { return out.transfer.done; });
}

void Mailroom::Flush(absl::Duration limit, absl::Span<const int> absent) {
  const absl::Duration start = wire_->Now();
  for (int attempt = 0;; ++attempt) {
    Poll();
    bool waits = false;
    {
      absl::MutexLock lock(&mutex_);
      for (const Outgoing& out : outgoing_) {
        if (std::find(absent.begin(), absent.end(), out.peer) != absent.end()) continue;
        waits = waits || wire_->Health(out.peer, /*describe=*/false).state != PeerHealth::State::kDead;
      }
    }
    if (!waits || wire_->Now() - start >= limit) return;
    wire_->Pause({.attempt = attempt, .until = start + limit, .since = start});
  }
}

bool Mailroom::IsNew(Inbox& inbox, int64_t serial) {
  if (serial < inbox.floor || !inbox.seen.insert(serial).second) return false;
  while (!inbox.seen.empty() && *inbox.seen.begin() == inbox.floor) {
    inbox.seen.erase(inbox.seen.begin());
    ++inbox.floor;
  }
  return true;
}

void Mailroom::Sort(int peer, absl::string_view bytes) {
  Inbox& inbox = *inboxes_[peer];
  int64_t serial = 0;
  absl::StatusOr<ControlMessage> message = DecodeControl(bytes, &serial);
  if (!message.ok() || !IsNew(inbox, serial)) {
    ++num_dropped_;
    return;
  }
  switch (message->kind) {
    case ControlMessage::Kind::kProposal:
      inbox.proposals.push_back(*std::move(message));
      return;
    case ControlMessage::Kind::kVoid:
      inbox.voids.emplace(message->id, DecodeStatus(message->body));
      if (message->a >= 0) inbox.answers.emplace(message->a, DecodeStatus(message->body));
      return;
    case ControlMessage::Kind::kGoodbye:
      inbox.goodbye = serial;
      inbox.left_alone = inbox.left_alone || message->a == 1;
      return;
    case ControlMessage::Kind::kAbort:
    case ControlMessage::Kind::kLeft:
    case ControlMessage::Kind::kWaiting:
      if (message->id <= newest_epoch_ && open_epochs_.count(message->id) == 0) {
        ++num_dropped_;
        return;
      }
      if (message->kind == ControlMessage::Kind::kWaiting) {
        ControlMessage& newest = waits_[{peer, message->id, message->pair}];
        if (message->a > newest.a) newest = *std::move(message);
        return;
      }
      // An abort says more than the departure that follows it.
      notices_.try_emplace({peer, message->id, message->pair}, *std::move(message));
      return;
  }
}

std::optional<ControlMessage> Mailroom::PeekProposal(int peer) {
  absl::MutexLock lock(&mutex_);
  Inbox& inbox = *inboxes_[peer];
  while (!inbox.proposals.empty() && inbox.voids.count(inbox.proposals.front().id) != 0) {
    inbox.voids.erase(inbox.proposals.front().id);
    inbox.proposals.pop_front();
  }
  if (inbox.proposals.empty()) return std::nullopt;
  return inbox.proposals.front();
}

void Mailroom::TakeProposal(int peer) {
  absl::MutexLock lock(&mutex_);
  inboxes_[peer]->proposals.pop_front();
}

std::optional<absl::Status> Mailroom::FindVoid(int peer, int64_t serial) {
  absl::MutexLock lock(&mutex_);
  const auto found = inboxes_[peer]->voids.find(serial);
  if (found == inboxes_[peer]->voids.end()) return std::nullopt;
  return found->second;
}

std::optional<absl::Status> Mailroom::FindAnswer(int peer, int64_t serial) {
  absl::MutexLock lock(&mutex_);
  const auto found = inboxes_[peer]->answers.find(serial);
  if (found == inboxes_[peer]->answers.end()) return std::nullopt;
  return found->second;
}

std::optional<ControlMessage> Mailroom::FindNotice(int peer, int64_t epoch, bool pair) {
  absl::MutexLock lock(&mutex_);
  const auto found = notices_.find({peer, epoch, pair});
  if (found == notices_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::pair<int, std::string>> Mailroom::WaitNotes() {
  absl::MutexLock lock(&mutex_);
  std::vector<std::pair<int, std::string>> notes;
  for (const auto& [key, message] : waits_) {
    if (!message.body.empty()) notes.emplace_back(std::get<0>(key), message.body);
  }
  return notes;
}

bool Mailroom::SaidGoodbye(int peer) {
  absl::MutexLock lock(&mutex_);
  if (inboxes_[peer] == nullptr) return false;
  const Inbox& inbox = *inboxes_[peer];
  return inbox.goodbye.has_value() && inbox.floor > *inbox.goodbye;
}

bool Mailroom::LeftAlone(int peer) {
  absl::MutexLock lock(&mutex_);
  return inboxes_[peer] != nullptr && inboxes_[peer]->left_alone;
}

void Mailroom::OpenEpoch(int64_t epoch) {
  absl::MutexLock lock(&mutex_);
  open_epochs_.insert(epoch);
  newest_epoch_ = std::max(newest_epoch_, epoch);
}

void Mailroom::CloseEpoch(int64_t epoch) {
  absl::MutexLock lock(&mutex_);
  open_epochs_.erase(epoch);
  const auto is_its = [epoch](const auto& entry) { return std::get<1>(entry.first) == epoch; };
  std::erase_if(notices_, is_its);
  std::erase_if(waits_, is_its);
}

void Mailroom::DoubtEpoch(int64_t epoch) {
  absl::MutexLock lock(&mutex_);
  doubtful_.Add(epoch);
}

BusyChannels Mailroom::busy_channels() {
  absl::MutexLock lock(&mutex_);
  BusyChannels busy = doubtful_;
  for (const int64_t epoch : open_epochs_) busy.Add(epoch);
  return busy;
}

int64_t Mailroom::num_dropped() {
  absl::MutexLock lock(&mutex_);
  return num_dropped_;
}

}  // namespace evenkeel::comm
