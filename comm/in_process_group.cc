#include "evenkeel/comm/in_process_group.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kEagerAlignment = 16;

}  // namespace

InProcessGroup::InProcessGroup(Group group, int64_t epoch, const WaitPolicy& wait, int64_t eager_bytes,
                               ScratchMemory* scratch, InProcessGroup* parent, std::vector<int> members)
    : group_(std::move(group)),
      epoch_(epoch),
      wait_(wait),
      eager_bytes_(eager_bytes),
      parent_(parent),
      members_(std::move(members)),
      rendezvous_(group_.size(), wait.wait_ns, wait.yields),
      scratch_(scratch),
      ranks_(group_.ranks.size()) {
  const size_t size = group_.ranks.size();
  for (Posted& posted : posted_) {
    posted.fingerprints.resize(size);
    posted.rows.resize(size * 2 * size);
    constexpr size_t kWords = std::size(Posted::Line().words);
    posted.lines_per_rank = (1 + size + kWords - 1) / kWords;
    posted.lines.resize(size * posted.lines_per_rank);
  }
  for (auto& buffers : eager_) buffers.resize(size);
}

void InProcessGroup::PostBlocks(uint32_t index, int rank, const Phase* phase) {
  Posted& posted = posted_[index & 1u];
  posted.lends(rank) = nullptr;
  if (phase == nullptr) return;
  const void** const blocks = posted.blocks(rank);
  ScratchBlock& buffer = eager_[index & 1u][rank];
  if (buffer == nullptr && eager_bytes_ > 0) {
    absl::StatusOr<ScratchBlock> block = AllocateScratch(scratch_, eager_bytes_, "small blocks");
    if (block.ok()) buffer = *std::move(block);
  }
  const int64_t capacity = buffer == nullptr ? 0 : eager_bytes_;
  int64_t used = 0;
  SendSpan last;
  const void* last_copy = nullptr;
  bool lends = false;
  for (int to = 0; to < size() && !lends; ++to) {
    const SendSpan& span = phase->sends[to];
    if (to == rank || span.bytes == 0) continue;
    if (span.data != last.data || span.bytes != last.bytes) {
      lends = span.bytes > capacity - used;
      if (lends) break;
      last = span;
      last_copy = std::memcpy(buffer.get() + used, span.data, static_cast<size_t>(span.bytes));
      used = std::min(capacity, (used + span.bytes + kEagerAlignment - 1) / kEagerAlignment * kEagerAlignment);
    }
    blocks[to] = last_copy;
  }
  if (!lends) return;
  posted.lends(rank) = this;
  for (int to = 0; to < size(); ++to) blocks[to] = phase->sends[to].data;
}

void InProcessGroup::PrefetchPosted(uint32_t index, int rank) const {
  const Posted& posted = posted_[index & 1u];
  for (int from = 0; from < size(); ++from) {
    if (from == rank) continue;
    __builtin_prefetch(&posted.lines[static_cast<size_t>(from) * posted.lines_per_rank]);
    __builtin_prefetch(&posted.fingerprints[from]);
    const std::byte* const block = eager_[index & 1u][from].get();
    for (int64_t at = 0; block != nullptr && at < std::min<int64_t>(eager_bytes_, 256); at += 64) {
      __builtin_prefetch(block + at);
    }
  }
}

bool InProcessGroup::AnyLends(uint32_t index) {
  for (int rank = 0; rank < size(); ++rank) {
    if (posted(index).lends(rank) != nullptr) return true;
  }
  return false;
}

void InProcessGroup::AwaitReaders(int rank) {
  for (int reader = 0; reader < size(); ++reader) {
    // As long as the copy of one piece, and as the reader waits for its turn on a processor.
    while (reader != rank && ranks_[reader].reading.load(std::memory_order_seq_cst)) sched_yield();
  }
}

void InProcessGroup::NoteCall(int rank, const Call& call) {
  ranks_[rank].last_call.store(
      (static_cast<uint64_t>(call.sequence) << 8) | (static_cast<uint64_t>(call.operation) + 1),
      std::memory_order_relaxed);
}

std::string InProcessGroup::LastCall(int rank) const {
  const uint64_t note = ranks_[rank].last_call.load(std::memory_order_relaxed);
  if (note == 0) return "has made no call yet";
  return absl::StrCat("called ", OperationName(static_cast<Operation>((note & 0xff) - 1)), " seq=", note >> 8, " last");
}

std::vector<RankFinding> InProcessGroup::DescribeAbsent(uint64_t phase, absl::string_view state) const {
  std::vector<RankFinding> findings;
  for (const int rank : rendezvous_.Absent(phase)) {
    findings.push_back({OuterRank(rank), absl::StrCat(state, " (it ", LastCall(rank), ")")});
  }
  return findings;
}

void InProcessGroup::Depart(int rank) {
  if (ranks_[rank].departed.exchange(true, std::memory_order_seq_cst)) return;
  num_departed_.fetch_add(1, std::memory_order_seq_cst);
  // The others may wait in the phase that this rank would have come to next.
  CheckDeparted(rendezvous_.phases_of(rank));
  for (const auto& pair : Pairs()) {
    for (int member = 0; member < 2; ++member) {
      if (pair->members_[member] == rank) pair->Depart(member);
    }
  }
}

void InProcessGroup::CheckDeparted(uint64_t phase) {
  if (num_departed_.load(std::memory_order_seq_cst) == 0) return;
  std::vector<RankFinding> gone;
  bool awaited = false;
  for (int rank = 0; rank < size(); ++rank) {
    if (rendezvous_.phases_of(rank) > phase) {
      awaited = true;
    } else if (ranks_[rank].departed.load(std::memory_order_seq_cst)) {
      gone.push_back({OuterRank(rank), absl::StrCat("has left (it ", LastCall(rank), ")")});
    }
  }
  if (!awaited || gone.empty()) return;
  absl::MutexLock lock(&mutex_);
  if (!rendezvous_.BreakPhase(phase)) return;
  breakage_ = Breakage{.code = absl::StatusCode::kUnavailable, .what = "a rank is gone", .findings = std::move(gone)};
}

void InProcessGroup::TimeOut(uint64_t phase, absl::string_view state, absl::Duration elapsed, absl::Duration limit) {
  std::vector<RankFinding> absent = DescribeAbsent(phase, state);
  absl::MutexLock lock(&mutex_);
  if (!rendezvous_.BreakPhase(phase)) return;
  breakage_ = Breakage{.code = absl::StatusCode::kDeadlineExceeded,
                       .what = "not all ranks came",
                       .findings = std::move(absent),
                       .elapsed = elapsed,
                       .limit = limit};
}

void InProcessGroup::ReportDeadlock(uint64_t phase, const std::string& what, std::vector<RankFinding> waits) {
  absl::MutexLock lock(&mutex_);
  if (!rendezvous_.BreakPhase(phase, /*wake=*/false)) return;
  breakage_ = Breakage{.code = absl::StatusCode::kDeadlineExceeded, .what = what, .findings = std::move(waits)};
}

void InProcessGroup::Abort(const absl::Status& cause) {
  {
    absl::MutexLock lock(&mutex_);
    if (rendezvous_.Break() && !breakage_.has_value()) {
      breakage_ = Breakage{.code = absl::StatusCode::kAborted, .aborted_by = cause};
    }
  }
  for (const auto& pair : Pairs()) pair->Abort(cause);
}

bool InProcessGroup::IsBroken() const {
  return rendezvous_.is_broken() || (parent_ != nullptr && parent_->rendezvous_.is_broken());
}

ErrorContext InProcessGroup::Context(int rank, const Call& call) const {
  return CallContext(parent_ != nullptr ? parent_->group_ : group_, epoch_, OuterRank(rank), call);
}

absl::Status InProcessGroup::Describe(int rank, const Call& call, const Breakage& breakage) const {
  ErrorContext context = Context(rank, call);
  if (!breakage.aborted_by.ok()) return BrokenGroupError(std::move(context), breakage.aborted_by);
  context.findings = breakage.findings;
  context.elapsed = breakage.elapsed;
  context.limit = breakage.limit;
  return TransportError(breakage.code, std::move(context), breakage.what);
}

absl::Status InProcessGroup::WaitError(int rank, const Call& call) {
  absl::MutexLock lock(&mutex_);
  return Describe(rank, call, breakage_.value_or(Breakage()));
}

absl::Status InProcessGroup::LateError(int rank, const Call& call) {
  std::optional<Breakage> breakage;
  {
    absl::MutexLock lock(&mutex_);
    breakage = breakage_;
  }
  if (!breakage.has_value() && parent_ != nullptr) {
    absl::MutexLock lock(&parent_->mutex_);
    breakage = parent_->breakage_;
  }
  const Breakage cause = breakage.value_or(Breakage());
  // Who would have waited like the others learns the cause itself; who is the cause learns that it came too late.
  const bool is_cause = std::any_of(cause.findings.begin(), cause.findings.end(),
                                    [this, rank](const RankFinding& odd) { return odd.rank == OuterRank(rank); });
  if (cause.aborted_by.ok() && !is_cause) return Describe(rank, call, cause);
  if (!cause.aborted_by.ok()) return BrokenGroupError(Context(rank, call), cause.aborted_by);
  return BrokenGroupError(Context(rank, call), Describe(rank, call, cause));
}

std::vector<std::shared_ptr<InProcessGroup>> InProcessGroup::Pairs() {
  absl::MutexLock lock(&mutex_);
  std::vector<std::shared_ptr<InProcessGroup>> pairs;
  for (const auto& [members, pair] : pairs_) pairs.push_back(pair);
  return pairs;
}

std::shared_ptr<InProcessGroup> InProcessGroup::PairOf(int low, int high) {
  std::shared_ptr<InProcessGroup> pair;
  {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<InProcessGroup>& entry = pairs_[{low, high}];
    if (entry == nullptr) {
      Group members{.axis = group_.axis, .name = group_.name, .ranks = {group_.ranks[low], group_.ranks[high]}};
      entry = std::make_shared<InProcessGroup>(std::move(members), epoch_, wait_, eager_bytes_, scratch_, this,
                                               std::vector<int>{low, high});
    }
    pair = entry;
  }
  if (ranks_[low].departed.load(std::memory_order_seq_cst)) pair->Depart(0);
  if (ranks_[high].departed.load(std::memory_order_seq_cst)) pair->Depart(1);
  return pair;
}

}  // namespace evenkeel::comm
