#include "evenkeel/comm/message/message_backend.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/host_communicator.h"
#include "evenkeel/comm/message/tag_channels.h"
#include "evenkeel/comm/message/wait_notes.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// The body of a proposal: the group's fingerprint and the proposer's busy channels.
std::string ProposalBody(const Fingerprint& fingerprint, const BusyChannels& busy) {
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&fingerprint), sizeof(fingerprint)),
                      busy.Encode());
}

// A body of another length gives a fingerprint that no check believes.
Fingerprint ReadProposal(absl::string_view body, BusyChannels* busy) {
  Fingerprint fingerprint;
  if (body.size() < sizeof(fingerprint)) return fingerprint;
  const std::optional<BusyChannels> theirs = BusyChannels::Decode(body.substr(sizeof(fingerprint)));
  if (!theirs.has_value()) return fingerprint;
  busy->Add(*theirs);
  std::memcpy(&fingerprint, body.data(), sizeof(fingerprint));
  return fingerprint;
}

}  // namespace

// One CreateGroup under way on this rank.
struct MessageBackend::Meeting {
  const Group* group = nullptr;
  int rank = 0;  // inside the group
  int64_t proposal = 0;
  absl::Duration start = absl::ZeroDuration();
  ErrorContext context = {};
  Fingerprint mine = {};
  std::vector<std::optional<ControlMessage>> proposals = {};  // by group rank, as last seen
  BusyChannels busy = {};                                     // of this rank
  int64_t epoch = 0;
};

MessageBackend::MessageBackend(Wire* wire, Options options)
    : wire_(wire), options_(std::move(options)), mailroom_(wire) {}

void MessageBackend::SayGoodbye() { PostGoodbye(/*alone=*/false); }
void MessageBackend::SayLeftAlone() { PostGoodbye(/*alone=*/true); }

void MessageBackend::PostGoodbye(bool alone) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) mailroom_.Post(peer, {.kind = ControlMessage::Kind::kGoodbye, .a = alone ? 1 : 0});
  }
}

bool MessageBackend::AnyLeftAlone() {
  mailroom_.Poll();
  for (int peer = 0; peer < size(); ++peer) {
    if (mailroom_.LeftAlone(peer)) return true;
  }
  return false;
}

std::unique_ptr<Communicator> MessageBackend::MakeCommunicator(const Group& group, int64_t epoch,
                                                               std::unique_ptr<Transport> transport) {
  return HostCommunicator::Create({.group = group,
                                   .rank = group.IndexOf(rank()),
                                   .epoch = epoch,
                                   .ledger = &ledger_,
                                   .topology = &options_.topology,
                                   .deadline = options_.deadline,
                                   .two_level = options_.two_level,
                                   .scratch = options_.scratch,
                                   .stragglers = options_.stragglers},
                                  std::move(transport));
}

absl::StatusOr<std::unique_ptr<Communicator>> MessageBackend::CreateGroup(const Group& group) {
  EK_RETURN_IF_ERROR(CheckGroup(group, rank(), size()));
  absl::MutexLock lock(&create_mutex_);
  if (group.size() == 1) return MakeCommunicator(group, next_epoch_++, nullptr);
  EK_RETURN_IF_ERROR(wire_->status());

  Meeting meeting{.group = &group, .rank = group.IndexOf(rank()), .proposal = next_proposal_++, .start = wire_->Now()};
  meeting.context = CallContext(group, -1, meeting.rank, {.operation = Operation::kCreateGroup, .sequence = -1});
  meeting.mine.operation = static_cast<uint8_t>(Operation::kCreateGroup);
  meeting.mine.group = GroupDigest(group);
  meeting.mine.count = group.size();
  meeting.mine.flags = options_.two_level ? kFlagTwoLevel : 0;
  meeting.mine = SealFingerprint(meeting.mine);
  meeting.proposals.resize(group.size());
  meeting.busy = mailroom_.busy_channels();
  EK_RETURN_IF_ERROR(Meet(meeting));

  next_epoch_ = meeting.epoch + 1;
  ProposalSerials serials(group.size(), -1);
  for (int i = 0; i < group.size(); ++i) {
    if (i == meeting.rank) continue;
    serials[i] = meeting.proposals[i]->id;
    mailroom_.TakeProposal(group.ranks[i]);
  }
  return MakeCommunicator(group, meeting.epoch,
                          CreateMessageTransport(wire_, &mailroom_, options_.message, options_.scratch, group,
                                                 meeting.rank, meeting.epoch, serials));
}

absl::Status MessageBackend::Meet(Meeting& meeting) {
  const Group& group = *meeting.group;
  for (int i = 0; i < group.size(); ++i) {
    if (i == meeting.rank) continue;
    mailroom_.Post(group.ranks[i], {.kind = ControlMessage::Kind::kProposal,
                                    .id = meeting.proposal,
                                    .a = next_epoch_,
                                    .body = ProposalBody(meeting.mine, meeting.busy)});
  }
  const absl::Duration limit = meeting.start + options_.deadline;
  for (int attempt = 0;; ++attempt) {
    mailroom_.Poll();
    bool complete = false;
    absl::Status status = LookAtProposals(meeting, &complete);
    if (status.ok() && complete) return absl::OkStatus();
    if (status.ok()) status = wire_->status();
    if (status.ok() && wire_->Now() >= limit) status = TooLate(meeting);
    if (!status.ok()) return GiveUp(meeting, std::move(status));
    wire_->Pause({.attempt = attempt, .until = limit, .since = meeting.start});
  }
}

// Nobody has said why: the members that have not asked, and what they wait for where they have told it.
absl::Status MessageBackend::TooLate(const Meeting& meeting) {
  const Group& group = *meeting.group;
  ErrorContext context = meeting.context;
  context.elapsed = wire_->Now() - meeting.start;
  context.limit = options_.deadline;
  WaitNotes waits = KnownWaits(mailroom_, rank(), size());
  WaitNote own{.rank = rank(), .waits_for = {}, .text = absl::StrCat("waits in create_group of ", group.name)};
  for (int i = 0; i < group.size(); ++i) {
    if (i == meeting.rank || meeting.proposals[i].has_value()) continue;
    own.waits_for.push_back(group.ranks[i]);
    const std::string health = wire_->Health(group.ranks[i], /*describe=*/true).text;
    context.findings.push_back({i, absl::StrCat("has not asked for this group", health.empty() ? "" : "; ", health,
                                                DescribeWaitOf(group.ranks[i], waits))});
  }
  waits[rank()] = std::move(own);
  return TransportError(absl::StatusCode::kDeadlineExceeded, std::move(context),
                        absl::StrCat("ranks are absent", DescribeCycle(rank(), waits)));
}

absl::Status MessageBackend::LookAtProposals(Meeting& meeting, bool* complete) {
  const Group& group = *meeting.group;
  std::vector<Fingerprint> fingerprints(group.size(), meeting.mine);
  BusyChannels busy = meeting.busy;
  int64_t first_epoch = next_epoch_;
  bool all = true;
  for (int i = 0; i < group.size(); ++i) {
    if (i == meeting.rank) continue;
    const int peer = group.ranks[i];
    if (std::optional<absl::Status> cause = mailroom_.FindAnswer(peer, meeting.proposal)) {
      ErrorContext context = meeting.context;
      if (const auto theirs = GetErrorContext(*cause); theirs.has_value()) context.findings = theirs->findings;
      return TransportError(cause->code(), context, absl::StrCat("rank ", i, " gave the group up: ", cause->message()));
    }
    meeting.proposals[i] = mailroom_.PeekProposal(peer);
    if (meeting.proposals[i].has_value()) {
      fingerprints[i] = ReadProposal(meeting.proposals[i]->body, &busy);
      first_epoch = std::max(first_epoch, meeting.proposals[i]->a);
    } else if (wire_->Health(peer, /*describe=*/false).state == PeerHealth::State::kDead ||
               mailroom_.SaidGoodbye(peer)) {
      ErrorContext context = meeting.context;
      const std::string health = wire_->Health(peer, /*describe=*/true).text;
      context.findings.push_back({i, health.empty() ? "has left the world" : health});
      return TransportError(absl::StatusCode::kUnavailable, context, "a rank is gone");
    } else {
      all = false;
    }
  }
  // Members that have not asked yet count as agreeing here.
  if (std::optional<Disagreement> odd = FindDisagreement(fingerprints); odd.has_value()) {
    ErrorContext context = meeting.context;
    context.findings = std::move(odd->findings);
    return TransportError(odd->code, context, odd->what);
  }
  if (!all) return absl::OkStatus();
  const std::optional<int64_t> epoch = busy.FirstFree(first_epoch);
  if (!epoch.has_value()) {
    return TransportError(absl::StatusCode::kInvalidArgument, meeting.context,
                          absl::StrCat("all ", kNumTagChannels, " tag channels are in use by the groups of its members",
                                       " (", meeting.busy.count(), " by this rank's): give groups up"));
  }
  meeting.epoch = *epoch;
  *complete = true;
  return absl::OkStatus();
}

absl::Status MessageBackend::GiveUp(const Meeting& meeting, absl::Status cause) {
  const Group& group = *meeting.group;
  for (int i = 0; i < group.size(); ++i) {
    if (i == meeting.rank) continue;
    mailroom_.Post(group.ranks[i], {.kind = ControlMessage::Kind::kVoid,
                                    .id = meeting.proposal,
                                    .a = meeting.proposals[i].has_value() ? meeting.proposals[i]->id : -1,
                                    .body = EncodeStatus(cause)});
    // A proposal that has been answered is used up: its rank gives up too.
    if (meeting.proposals[i].has_value()) mailroom_.TakeProposal(group.ranks[i]);
  }
  return cause;
}

}  // namespace evenkeel::comm
