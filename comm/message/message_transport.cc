#include "evenkeel/comm/message/message_transport.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "evenkeel/comm/message/absence.h"
#include "evenkeel/comm/message/payload_flows.h"
#include "evenkeel/comm/message/record_exchange.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// How long a rank that gives up waits for room for its notices.
constexpr absl::Duration kFlush = absl::Milliseconds(200);

class MessageTransport final : public Transport {
 public:
  MessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options, ScratchMemory* scratch,
                   GroupSeat::Identity identity)
      : seat_(wire, mailroom, options, std::move(identity)),
        absence_(&seat_),
        records_(&seat_, &absence_),
        scratch_(scratch),
        payload_(&seat_, &absence_, &records_, scratch),
        pairs_(seat_.size()) {
    if (!seat_.is_pair()) seat_.mailroom().OpenEpoch(epoch());
  }

  ~MessageTransport() override {
    records_.TakeBack();
    pairs_.clear();  // their farewell comes first
    if (seat_.status().ok()) seat_.TellPeers(ControlMessage::Kind::kLeft, absl::OkStatus());
    if (!seat_.is_pair()) seat_.mailroom().CloseEpoch(epoch());
  }

  const Group& group() const override { return seat_.group(); }
  int rank() const override { return seat_.rank(); }
  int64_t epoch() const override { return seat_.epoch(); }

  absl::Status Reserve(bool combines) override { return combines ? payload_.ReserveStaging() : absl::OkStatus(); }

  absl::Status Agree(const Call& call, const Posting& posting, Agreement* agreement) override {
    EK_RETURN_IF_ERROR(CheckUsable(call));
    if (call.sequence != sequence_) absence_.BeginCall();
    sequence_ = call.sequence;
    seat_.SetInAgree(true);
    const absl::Status status = records_.Exchange(call, posting);
    if (!status.ok()) return Break(status);
    seat_.SetInAgree(false);
    agreement->fingerprints = records_.fingerprints();
    agreement->rows = records_.rows();
    agreement->late = absence_.late();
    agreement->waited = absence_.waited();
    return absl::OkStatus();
  }

  absl::Status Exchange(const Call& call, const Phase& phase) override {
    EK_RETURN_IF_ERROR(CheckUsable(call));
    const absl::Status status = payload_.Run(call, phase);
    records_.ForgetPayload();
    return status.ok() ? status : Break(status);
  }

  absl::StatusOr<Transport*> Pair(int peer) override {
    EK_CHECK(!seat_.is_pair() && peer >= 0 && peer < size() && peer != rank());
    if (pairs_[peer] == nullptr) {
      const int low = std::min(peer, rank()), high = std::max(peer, rank());
      const GroupSeat::Identity& outer = seat_.identity();
      GroupSeat::Identity pair{.group = {.axis = outer.group.axis,
                                         .name = outer.group.name,
                                         .ranks = {outer.group.ranks[low], outer.group.ranks[high]}},
                               .rank = rank() == low ? 0 : 1,
                               .epoch = outer.epoch,
                               .serials = {outer.serials[low], outer.serials[high]},
                               .is_pair = true,
                               .outer_ranks = {low, high},
                               .outer_size = size()};
      pairs_[peer] = std::make_unique<MessageTransport>(&seat_.wire(), &seat_.mailroom(), seat_.options(), scratch_,
                                                        std::move(pair));
    }
    return pairs_[peer].get();
  }

  void Abort(const absl::Status& cause) override { seat_.Abort(cause); }

 private:
  absl::Status CheckUsable(const Call& call) {
    if (absl::Status cause = seat_.status(); !cause.ok()) return BrokenGroupError(seat_.Context(call), cause);
    return seat_.wire().status().ok() ? absl::OkStatus() : absence_.WireError(call);
  }

  // Keeps the cause, tells the peers, and leaves no message behind that could touch memory of the caller.
  absl::Status Break(const absl::Status& cause) {
    seat_.Abort(cause);
    seat_.mailroom().DoubtEpoch(epoch());
    // While payload may be touched, which it may no longer once the call has returned: a notice that finds no room on
    // its way waits behind it.
    seat_.mailroom().Flush(kFlush, AbsentIn(cause));
    records_.TakeBack();
    if (!payload_.TakeBack()) {
      seat_.wire().Condemn(Annotate(cause, "payload of a failed call is still under way"));
    }
    return cause;
  }

  // World ranks that `cause` names as absent.
  std::vector<int> AbsentIn(const absl::Status& cause) const {
    std::vector<int> absent;
    const std::optional<ErrorContext> context = GetErrorContext(cause);
    if (!context.has_value() || !(absl::IsDeadlineExceeded(cause) || absl::IsUnavailable(cause))) return absent;
    for (int i = 0; i < size(); ++i) {
      const bool named = std::any_of(context->findings.begin(), context->findings.end(),
                                     [&](const RankFinding& finding) { return finding.rank == seat_.OuterRank(i); });
      if (named) absent.push_back(seat_.peer(i).world_rank);
    }
    return absent;
  }

  GroupSeat seat_;
  Absence absence_;
  RecordExchange records_;
  ScratchMemory* const scratch_;
  PayloadFlows payload_;
  std::vector<std::unique_ptr<MessageTransport>> pairs_;
  int64_t sequence_ = -1;  // of the newest call
};

}  // namespace

std::unique_ptr<Transport> CreateMessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options,
                                                  ScratchMemory* scratch, const Group& group, int rank, int64_t epoch,
                                                  const ProposalSerials& serials) {
  return std::make_unique<MessageTransport>(
      wire, mailroom, options, scratch,
      GroupSeat::Identity{.group = group, .rank = rank, .epoch = epoch, .serials = serials});
}

}  // namespace evenkeel::comm
