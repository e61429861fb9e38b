#include "evenkeel/comm/message/group_seat.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace evenkeel::comm {
namespace {

// Tags of one group: [channel 12 bits][kind 2 bits][counter 16 bits], channel 0 is the mailroom's.
constexpr int kCounterBits = 16;
constexpr int kKindBits = 2;
constexpr int kNumChannels = (1 << (30 - kCounterBits - kKindBits)) - 1;
constexpr int kPairFlag = 2;  // beside the kind

}  // namespace

GroupSeat::GroupSeat(Wire* wire, Mailroom* mailroom, const MessageOptions& options, Identity identity)
    : wire_(wire), mailroom_(mailroom), options_(options), identity_(std::move(identity)), peers_(size()) {
  for (int i = 0; i < size(); ++i) peers_[i].world_rank = group().ranks[i];
}

int GroupSeat::Tag(TagKind kind, int64_t counter) const {
  const int channel = static_cast<int>(epoch() % kNumChannels) + 1;
  const int flags = static_cast<int>(kind) | (is_pair() ? kPairFlag : 0);
  return (((channel << kKindBits) | flags) << kCounterBits) | static_cast<int>(counter & ((1 << kCounterBits) - 1));
}

ErrorContext GroupSeat::Context(const Call& call) const {
  ErrorContext context = CallContext(group(), epoch(), OuterRank(rank()), call);
  if (identity_.outer_size > 0) context.size = identity_.outer_size;
  return context;
}

std::string GroupSeat::LastOf(int i) const {
  if (!peers_[i].knows_last) return "nothing came from it in this group";
  return absl::StrCat("its last call: ", DescribeFingerprint(peers_[i].last));
}

absl::Status GroupSeat::status() const {
  absl::MutexLock lock(&mutex_);
  return first_cause_;
}

void GroupSeat::Abort(const absl::Status& cause) {
  {
    absl::MutexLock lock(&mutex_);
    if (!first_cause_.ok()) return;
    first_cause_ = cause;
  }
  TellPeers(ControlMessage::Kind::kAbort, cause);
}

void GroupSeat::TellPeers(ControlMessage::Kind kind, const absl::Status& cause) {
  for (int i = 0; i < size(); ++i) {
    if (i == rank()) continue;
    ControlMessage message{.kind = kind,
                           .pair = is_pair(),
                           .in_agree = in_agree_.load(std::memory_order_relaxed),
                           .id = epoch(),
                           .a = records_sent(),
                           .b = peers_[i].pieces_sent.load(std::memory_order_relaxed)};
    if (!cause.ok()) message.body = EncodeStatus(cause);
    mailroom_->Post(peers_[i].world_rank, message);
  }
}

}  // namespace evenkeel::comm
