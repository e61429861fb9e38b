#include "evenkeel/comm/in_process_transport.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(InProcessHost* host, std::shared_ptr<InProcessGroup> shared, int rank, int world_rank,
                     BeforeCopy before_copy)
      : host_(host),
        shared_(std::move(shared)),
        rank_(rank),
        world_rank_(world_rank),
        before_copy_(std::move(before_copy)),
        sources_(shared_->size()) {}
  ~InProcessTransport() override {
    shared_->Depart(rank_);
    pairs_.clear();
    host_->Release(std::move(shared_));
  }

  const Group& group() const override { return shared_->group(); }
  int rank() const override { return rank_; }
  int64_t epoch() const override { return shared_->epoch(); }

  // Small blocks that find no memory for a copy are lent like large ones.
  absl::Status Reserve(bool) override { return absl::OkStatus(); }

  absl::Status Agree(const Call& call, const Posting& posting, Agreement* agreement) override {
    if (shared_->IsBroken()) return shared_->LateError(rank_, call);
    shared_->NoteCall(rank_, call);
    if (call.sequence != sequence_) start_ns_ = 0;
    sequence_ = call.sequence;
    ++posting_;
    InProcessGroup::Posted& posted = shared_->posted(posting_);
    posted.fingerprints[rank_] = posting.fingerprint;
    std::copy(posting.row.begin(), posting.row.end(), posted.rows.begin() + int64_t{rank_} * 2 * size());
    shared_->PostBlocks(posting_, rank_, posting.first);
    is_posted_ = posting.first != nullptr;
    late_.clear();
    EK_RETURN_IF_ERROR(Meet(call, "has not come"));
    if (is_posted_) shared_->PrefetchPosted(posting_, rank_);
    agreement->fingerprints = posted.fingerprints;
    agreement->rows = posted.rows;
    agreement->late = late_;
    if (!late_.empty()) agreement->waited = absl::Nanoseconds(MonotonicNs() - start_ns_);
    return absl::OkStatus();
  }

  absl::Status Exchange(const Call& call, const Phase& phase) override {
    const absl::Status status = PostAndRead(call, phase);
    // What this rank lends goes back to its owner when the call returns: a peer may still be in the middle of a piece.
    if (!status.ok()) shared_->AwaitReaders(rank_);
    return status;
  }

  absl::StatusOr<Transport*> Pair(int peer) override {
    std::unique_ptr<InProcessTransport>& pair = pairs_[peer];
    if (pair == nullptr) {
      const int low = std::min(rank_, peer);
      const int high = std::max(rank_, peer);
      pair = std::make_unique<InProcessTransport>(host_, shared_->PairOf(low, high), rank_ == low ? 0 : 1, world_rank_,
                                                  before_copy_);
    }
    return pair.get();
  }

  void Abort(const absl::Status& cause) override { shared_->Abort(cause); }

 private:
  // Comes to the next phase and waits for the others; those that have not come when the limit passes `state`.
  absl::Status Meet(const Call& call, absl::string_view state) {
    const uint64_t phase = phase_++;
    Rendezvous& rendezvous = shared_->rendezvous();
    rendezvous.Arrive(rank_, phase);
    shared_->CheckDeparted(phase);
    Rendezvous::Outcome outcome = Rendezvous::Outcome::kComplete;
    if (rendezvous.IsOver(phase, &outcome)) return Over(outcome, call);
    StartClock();
    if (!rendezvous.IsSoonOver(phase, &outcome)) outcome = SleepUntilOver(call, phase, state);
    return Over(outcome, call);
  }

  absl::Status Over(Rendezvous::Outcome outcome, const Call& call) {
    if (outcome == Rendezvous::Outcome::kComplete) return absl::OkStatus();
    return shared_->WaitError(rank_, call);
  }

  // The limit counts from the first wait or the first copy of a call: before them it takes no time worth the look.
  void StartClock() {
    if (start_ns_ == 0) start_ns_ = MonotonicNs();
  }

  Rendezvous::Outcome SleepUntilOver(const Call& call, uint64_t phase, absl::string_view state) {
    const int64_t until_ns = start_ns_ + absl::ToInt64Nanoseconds(call.limit);
    Rendezvous::Outcome outcome = Rendezvous::Outcome::kTimeout;
    if (call.late_after < call.limit) {
      const int64_t late_ns = start_ns_ + absl::ToInt64Nanoseconds(call.late_after);
      outcome = host_->Sleep(shared_.get(), phase, call, world_rank_, late_ns);
      if (outcome == Rendezvous::Outcome::kTimeout) late_ = shared_->rendezvous().Absent(phase);
    }
    if (outcome == Rendezvous::Outcome::kTimeout) {
      outcome = host_->Sleep(shared_.get(), phase, call, world_rank_, until_ns);
    }
    if (outcome != Rendezvous::Outcome::kTimeout) return outcome;
    shared_->TimeOut(phase, state, absl::Nanoseconds(MonotonicNs() - start_ns_), call.limit);
    // It may have completed, or broken otherwise, at the last moment.
    return shared_->rendezvous().Wait(phase, 0);
  }

  absl::Status PostAndRead(const Call& call, const Phase& phase) {
    if (!is_posted_) {
      ++posting_;
      shared_->PostBlocks(posting_, rank_, &phase);
      EK_RETURN_IF_ERROR(Meet(call, "has agreed, but not finished the first half of the call"));
    }
    is_posted_ = false;
    const bool any_lends = shared_->AnyLends(posting_);
    if (any_lends) StartClock();
    if (!(phase.combine != nullptr ? Combine(phase, any_lends) : Read(phase, any_lends))) {
      return shared_->LateError(rank_, call);
    }
    // Peers may still read what this rank lends; with another phase to come, its rendezvous says when they are done.
    if (phase.more_follows || !any_lends) return absl::OkStatus();
    return Meet(call, "has agreed, but not finished copying");
  }

  const std::byte* BlockOf(int from) {
    return static_cast<const std::byte*>(shared_->posted(posting_).blocks(from)[rank_]);
  }

  // False when the group broke meanwhile.
  bool Combine(const Phase& phase, bool any_lends) {
    const bool done = InPieces(phase.block_bytes, any_lends, [&](int64_t begin, int64_t length) {
      for (int from = 0; from < size(); ++from) {
        const auto* own = static_cast<const std::byte*>(phase.sends[from].data);
        sources_[from] = (from == rank_ ? own : BlockOf(from)) + begin;
      }
      (*phase.combine)(begin, length, sources_);
    });
    if (done && phase.meanwhile != nullptr) (*phase.meanwhile)();
    return done;
  }

  // One copy from each peer's memory. Where every rank reads the same blocks, all begin with the first: what one has
  // brought into the cache serves the others. Else they begin with the next rank, so that not all read from one at
  // once. False when the group broke meanwhile.
  bool Read(const Phase& phase, bool any_lends) {
    const int begin_with = SendsOneBlock(phase) ? 0 : rank_ + 1;
    for (int step = 0; step < size(); ++step) {
      const int from = (begin_with + step) % size();
      const ReceiveSpan& to = phase.receives[from];
      if (from == rank_) {
        if (phase.meanwhile != nullptr) (*phase.meanwhile)();
        continue;
      }
      const bool done = InPieces(to.bytes, any_lends, [&](int64_t begin, int64_t length) {
        std::memcpy(static_cast<std::byte*>(to.data) + begin, BlockOf(from) + begin, static_cast<size_t>(length));
      });
      if (!done) return false;
    }
    return true;
  }

  bool SendsOneBlock(const Phase& phase) const {
    const int other = rank_ == 0 ? 1 : 0;
    for (int to = 0; to < size(); ++to) {
      if (to != rank_ && phase.sends[to].data != phase.sends[other].data) return false;
    }
    return true;
  }

  // Lent memory is read piece by piece, so that a lender whose limit has passed need wait for one piece only.
  template <typename Copy>
  bool InPieces(int64_t bytes, bool any_lends, const Copy& copy) {
    for (int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
      if (before_copy_ != nullptr) before_copy_(world_rank_);
      if (any_lends && !shared_->BeginReading(rank_)) return false;
      copy(begin, std::min(kPieceBytes, bytes - begin));
      if (any_lends) shared_->EndReading(rank_);
    }
    return true;
  }

  static constexpr int64_t kPieceBytes = 256 << 10;  // a multiple of 64

  InProcessHost* const host_;
  std::shared_ptr<InProcessGroup> shared_;
  const int rank_;
  const int world_rank_;
  const BeforeCopy before_copy_;
  uint64_t phase_ = 0;     // of the rendezvous
  uint32_t posting_ = 0;   // being written or read
  int64_t sequence_ = -1;  // of the newest call
  int64_t start_ns_ = 0;   // when it began; 0: not yet looked
  bool is_posted_ = false;
  std::vector<int> late_;  // in the newest agreement
  std::vector<const void*> sources_;
  std::map<int, std::unique_ptr<InProcessTransport>> pairs_;
};

}  // namespace

std::unique_ptr<Transport> CreateInProcessTransport(InProcessHost* host, std::shared_ptr<InProcessGroup> shared,
                                                    int rank, int world_rank, BeforeCopy before_copy) {
  return std::make_unique<InProcessTransport>(host, std::move(shared), rank, world_rank, std::move(before_copy));
}

}  // namespace evenkeel::comm
