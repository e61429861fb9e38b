#include "evenkeel/comm/message/absence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// The most polls between two looks at notices, however fast things move.
constexpr int kLookEvery = 1024;
// How long a rank whose limit has passed listens for others that gave up at the same moment.
constexpr absl::Duration kGrace = absl::Milliseconds(50);

bool Names(const ErrorContext& context, int rank) {
  return std::any_of(context.findings.begin(), context.findings.end(),
                     [rank](const RankFinding& finding) { return finding.rank == rank; });
}

}  // namespace

void Absence::BeginCall() {
  call_start_ = seat_.wire().Now();
  late_.clear();
}

absl::Status Absence::Wait(const Call& call, absl::Duration busy_for,
                           absl::FunctionRef<absl::Status(Progress*)> advance,
                           absl::FunctionRef<std::vector<Missing>()> list_missing) {
  Wire& wire = seat_.wire();
  const absl::Duration limit = call_start_ + call.limit;
  const absl::Duration late_at = call_start_ + call.late_after;
  bool looked_who_is_late = late_at >= limit;
  const absl::Duration tell_at = call_start_ + call.limit / 4;
  bool looked_whom_to_tell = false;
  told_.clear();
  told_to_.clear();
  absl::Duration since = wire.Now();
  int attempt = 0;  // polls since something moved
  for (int poll = 0;; ++poll, ++attempt) {
    Progress progress;
    EK_RETURN_IF_ERROR(advance(&progress));
    if (progress.finished) {
      if (!late_.empty()) waited_ = wire.Now() - call_start_;
      if (!told_to_.empty()) PostWaitNotes("");  // it goes on
      return absl::OkStatus();
    }
    if (progress.moved) {
      since = wire.Now();
      attempt = 0;
    }
    if (!wire.status().ok()) return WireError(call);
    const bool too_late = poll % 16 == 15 && wire.Now() >= limit;
    const absl::Duration until = std::min(looked_who_is_late ? limit : late_at, looked_whom_to_tell ? limit : tell_at);
    const bool look = wire.Pause({.attempt = attempt, .until = until, .since = since, .busy_for = busy_for});
    if (!look && !too_late && poll % kLookEvery != kLookEvery - 1) continue;
    if (absl::Status cause = seat_.status(); !cause.ok()) return BrokenGroupError(seat_.Context(call), cause);
    seat_.mailroom().Poll();
    const std::vector<Missing> missing = list_missing();
    if (!looked_who_is_late && wire.Now() >= late_at) {
      looked_who_is_late = true;
      for (const Missing& m : missing) {
        if (m.record) late_.push_back(m.rank);
      }
    }
    if (wire.Now() >= limit) {
      EK_RETURN_IF_ERROR(advance(&progress));
      return progress.finished ? absl::OkStatus() : TooLate(call, list_missing());
    }
    absl::Status gone = FindGone(call, missing);
    if (gone.ok()) {
      looked_whom_to_tell = looked_whom_to_tell || wire.Now() >= tell_at;
      if (looked_whom_to_tell && !missing.empty()) TellWhatIsKnown(call, missing);
      continue;
    }
    // What a rank had sent before it went may have arrived since the last look.
    for (int again = 0; again < 64 && !progress.finished; ++again) EK_RETURN_IF_ERROR(advance(&progress));
    if (progress.finished) return absl::OkStatus();
    seat_.mailroom().Poll();
    if (gone = FindGone(call, list_missing()); !gone.ok()) return gone;
  }
}

absl::Status Absence::CheckNobodyGaveUp(const Call& call) {
  seat_.mailroom().Poll();
  for (int i = 0; i < seat_.size(); ++i) {
    if (i == seat_.rank()) continue;
    const std::optional<ControlMessage> notice =
        seat_.mailroom().FindNotice(seat_.peer(i).world_rank, seat_.epoch(), seat_.is_pair());
    const bool in_this_call = notice.has_value() && notice->kind == ControlMessage::Kind::kAbort && notice->in_agree &&
                              notice->a == seat_.records_sent();
    if (in_this_call) return Adopt(seat_.Context(call), DecodeStatus(notice->body), i);
  }
  return absl::OkStatus();
}

absl::Status Absence::WireError(const Call& call) {
  seat_.mailroom().Poll();
  for (int i = 0; i < seat_.size(); ++i) {
    if (i != seat_.rank() && !CauseOf(i).has_value()) EK_RETURN_IF_ERROR(JudgeHealth(call, i, true));
  }
  for (int i = 0; i < seat_.size(); ++i) {
    if (i == seat_.rank()) continue;
    if (std::optional<absl::Status> said = CauseOf(i); said.has_value()) return Adopt(TimedContext(call), *said, i);
  }
  const absl::Status cause = seat_.wire().status();
  if (absl::IsAborted(cause)) return BrokenGroupError(seat_.Context(call), cause);
  return TransportError(cause.code(), seat_.Context(call), cause.message());
}

// Whether one of the missing ranks can never come. A rank that died or left after it had given the group up is not
// the cause: what it said is.
absl::Status Absence::FindGone(const Call& call, const std::vector<Missing>& missing) {
  for (const Missing& m : missing) {
    if (!CauseOf(m.rank).has_value()) EK_RETURN_IF_ERROR(JudgeHealth(call, m.rank, !IsPromised(m)));
  }
  for (const Missing& m : missing) EK_RETURN_IF_ERROR(JudgeNotice(call, m));
  return absl::OkStatus();
}

absl::Status Absence::JudgeHealth(const Call& call, int i, bool believe_goodbye) {
  const int world_rank = seat_.peer(i).world_rank;
  const PeerHealth health = seat_.wire().Health(world_rank, /*describe=*/false);
  std::string what;
  if (health.state == PeerHealth::State::kDead) {
    what = health.text.empty() ? "is dead" : health.text;
  } else if (believe_goodbye && seat_.mailroom().SaidGoodbye(world_rank)) {
    what = "has left the world";
  } else {
    return absl::OkStatus();
  }
  return GoneError(call, i, what);
}

// A rank may go because it has waited elsewhere in vain, in a cycle that holds this rank too.
absl::Status Absence::GoneError(const Call& call, int i, absl::string_view what) {
  const WaitNotes waits = AllWaits(call, {{.rank = i}});
  ErrorContext context = TimedContext(call);
  context.findings.push_back(
      {seat_.OuterRank(i), absl::StrCat(what, "; ", seat_.LastOf(i), DescribeWaitOf(seat_.peer(i).world_rank, waits))});
  return TransportError(absl::StatusCode::kUnavailable, std::move(context),
                        absl::StrCat("a rank is gone", DescribeCycle(seat_.wire().rank(), waits)));
}

// Sent before its rank stopped: still on its way.
bool Absence::IsPromised(const Missing& missing, const ControlMessage& notice) const {
  if (notice.pair != seat_.is_pair()) return false;
  if (missing.record) return notice.a > seat_.records_sent() - 1;
  return missing.piece && notice.b > missing.index;
}

bool Absence::IsPromised(const Missing& missing) {
  const std::optional<ControlMessage> notice =
      seat_.mailroom().FindNotice(seat_.peer(missing.rank).world_rank, seat_.epoch(), seat_.is_pair());
  return notice.has_value() && IsPromised(missing, *notice);
}

// The notice of a missing rank, as far as it concerns what is missing: an error, or OK when what is missing can still
// arrive.
absl::Status Absence::JudgeNotice(const Call& call, const Missing& missing) {
  Mailroom& mailroom = seat_.mailroom();
  const int world_rank = seat_.peer(missing.rank).world_rank;
  std::optional<ControlMessage> notice = mailroom.FindNotice(world_rank, seat_.epoch(), seat_.is_pair());
  if (!notice.has_value() && seat_.is_pair()) notice = mailroom.FindNotice(world_rank, seat_.epoch(), false);
  if (!notice.has_value()) {
    std::optional<absl::Status> cause = mailroom.FindVoid(world_rank, seat_.identity().serials[missing.rank]);
    if (cause.has_value()) return Adopt(seat_.Context(call), *cause, missing.rank);
    return absl::OkStatus();
  }
  if (IsPromised(missing, *notice)) return absl::OkStatus();
  if (notice->kind == ControlMessage::Kind::kLeft) return GoneError(call, missing.rank, "has left the group");
  return Adopt(TimedContext(call), DecodeStatus(notice->body), missing.rank);
}

// The error of a rank that waits for rank `from`, which has given the group up because of `cause`.
absl::Status Absence::Adopt(ErrorContext context, const absl::Status& cause, int from) const {
  const bool about_absence = absl::IsDeadlineExceeded(cause) || absl::IsUnavailable(cause) || absl::IsDataLoss(cause);
  const std::optional<ErrorContext> theirs = GetErrorContext(cause);
  if (!about_absence || !theirs.has_value()) {
    return BrokenGroupError(std::move(context), cause);
  }
  context.findings = theirs->findings;
  return TransportError(cause.code(), std::move(context),
                        absl::StrCat("rank ", seat_.OuterRank(from), " gave the group up in ", theirs->operation));
}

// The limit has passed. A peer that this rank misses may itself miss others, and give up at the same moment: what
// such peers say within a short grace replaces them in the findings.
absl::Status Absence::TooLate(const Call& call, const std::vector<Missing>& missing) {
  Wire& wire = seat_.wire();
  const absl::Duration now = wire.Now();
  const WaitNotes waits = AllWaits(call, missing);
  std::map<int, std::string> odd;  // by group rank
  for (int attempt = 0;; ++attempt) {
    seat_.mailroom().Poll();
    odd = OddRanks(missing, waits);
    const bool settled = odd.size() <= 1 || wire.Now() >= now + kGrace;
    if (settled) break;
    wire.Pause({.attempt = attempt, .until = now + kGrace, .since = now});
  }
  ErrorContext context = TimedContext(call);
  for (auto& [rank, had] : odd) context.findings.push_back({rank, had});
  return TransportError(absl::StatusCode::kDeadlineExceeded, std::move(context),
                        absl::StrCat("ranks are absent", DescribeCycle(wire.rank(), waits)));
}

// Of this rank and of all that it has been told.
WaitNotes Absence::AllWaits(const Call& call, const std::vector<Missing>& missing) {
  Wire& wire = seat_.wire();
  WaitNotes waits = KnownWaits(seat_.mailroom(), wire.rank(), wire.size());
  WaitNote& own = waits[wire.rank()];
  own.rank = wire.rank();
  for (const Missing& m : missing) own.waits_for.push_back(seat_.peer(m.rank).world_rank);
  const ErrorContext where = seat_.Context(call);
  own.text = absl::StrCat("waits in ", where.operation, " of group ", where.group, " epoch=", where.epoch,
                          " seq=", where.sequence);
  return waits;
}

void Absence::TellWhatIsKnown(const Call& call, const std::vector<Missing>& missing) {
  std::string body = EncodeWaitNotes(AllWaits(call, missing), seat_.wire().rank());
  if (body == told_) return;
  for (const Missing& m : missing) told_to_.insert(m.rank);
  PostWaitNotes(body);
  told_ = std::move(body);
}

void Absence::PostWaitNotes(const std::string& body) {
  ++num_told_;
  for (const int rank : told_to_) {
    seat_.mailroom().Post(seat_.peer(rank).world_rank, {.kind = ControlMessage::Kind::kWaiting,
                                                        .pair = seat_.is_pair(),
                                                        .id = seat_.epoch(),
                                                        .a = num_told_,
                                                        .body = body});
  }
}

std::map<int, std::string> Absence::OddRanks(const std::vector<Missing>& missing, const WaitNotes& waits) {
  std::map<int, std::string> odd;
  for (const Missing& m : missing) {
    if (const std::optional<absl::Status> cause = CauseOf(m.rank); cause.has_value()) {
      const std::optional<ErrorContext> theirs = GetErrorContext(*cause);
      if (theirs.has_value() && !Names(*theirs, seat_.OuterRank(seat_.rank())) && !theirs->findings.empty()) {
        for (const RankFinding& finding : theirs->findings) {
          odd.emplace(finding.rank, absl::StrCat("rank ", seat_.OuterRank(m.rank), " says: ", finding.had));
        }
        continue;
      }
    }
    const PeerHealth health = seat_.wire().Health(seat_.peer(m.rank).world_rank, /*describe=*/true);
    std::string had = absl::StrCat(m.what, "; ", seat_.LastOf(m.rank));
    if (!health.text.empty()) absl::StrAppend(&had, "; ", health.text);
    absl::StrAppend(&had, DescribeWaitOf(seat_.peer(m.rank).world_rank, waits));
    odd.insert_or_assign(seat_.OuterRank(m.rank), std::move(had));
  }
  return odd;
}

// Why group rank i has given the group up, when it has.
std::optional<absl::Status> Absence::CauseOf(int i) {
  const int world_rank = seat_.peer(i).world_rank;
  const std::optional<ControlMessage> notice = seat_.mailroom().FindNotice(world_rank, seat_.epoch(), seat_.is_pair());
  if (!notice.has_value()) return seat_.mailroom().FindVoid(world_rank, seat_.identity().serials[i]);
  if (notice->kind != ControlMessage::Kind::kAbort) return std::nullopt;
  return DecodeStatus(notice->body);
}

ErrorContext Absence::TimedContext(const Call& call) {
  ErrorContext context = seat_.Context(call);
  context.elapsed = seat_.wire().Now() - call_start_;
  context.limit = call.limit;
  return context;
}

}  // namespace evenkeel::comm
