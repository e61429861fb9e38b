#include "evenkeel/comm/message/group_seat.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/message/tag_channels.h"

namespace evenkeel::comm {
namespace {

constexpr int kPairFlag = 2;  // beside the kind

}  // namespace

GroupSeat::GroupSeat(Wire* wire, Mailroom* mailroom, const MessageOptions& options, Identity identity)
    : wire_(wire), mailroom_(mailroom), options_(options), identity_(std::move(identity)), peers_(size()) {
  for (int i = 0; i < size(); ++i) peers_[i].world_rank = group().ranks[i];
}

int GroupSeat::Tag(TagKind kind, int64_t counter) const {
  const int flags = static_cast<int>(kind) | (is_pair() ? kPairFlag : 0);
  return (((TagChannel(epoch()) << kTagKindBits) | flags) << kTagCounterBits) |
         static_cast<int>(counter & ((1 << kTagCounterBits) - 1));
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
