#include "evenkeel/comm/message/payload_flows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// The most bytes of a piece that is combined on arrival.
constexpr int64_t kCombineBytes = 256 << 10;

// Payload at a pessimistic 0.5 GB/s: so long a wait is no reason to fall asleep.
absl::Duration BusyFor(int64_t bytes) { return std::min(absl::Nanoseconds(2 * bytes), absl::Milliseconds(50)); }

}  // namespace

PayloadFlows::PayloadFlows(GroupSeat* seat, Absence* absence, const RecordExchange* records, ScratchMemory* scratch)
    : seat_(*seat),
      absence_(*absence),
      records_(*records),
      piece_bytes_(std::max<int64_t>(64, seat->options().piece_bytes / 64 * 64)),
      combine_bytes_(std::min(piece_bytes_, kCombineBytes)),
      scratch_(scratch) {}

absl::Status PayloadFlows::ReserveStaging() {
  if (staging_ != nullptr) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(staging_, AllocateScratch(scratch_, 2 * combine_bytes_ * seat_.size(), "staging of a sum"));
  return absl::OkStatus();
}

absl::Status PayloadFlows::Run(const Call& call, const Phase& phase) {
  const absl::Status status = phase.combine == nullptr ? Move(call, phase) : MoveAndCombine(call, phase);
  if (!status.ok()) return status;
  for (const Flow& flow : flows_) {
    GroupSeat::Peer& peer = seat_.peer(flow.peer);
    if (flow.sends) peer.pieces_sent.store(peer.sends_started, std::memory_order_relaxed);
  }
  flows_.clear();
  return absl::OkStatus();
}

bool PayloadFlows::TakeBack() {
  const auto take_back = [this](std::unique_ptr<Transfer> transfer) {
    if (seat_.wire().Cancel(transfer.get())) return true;
    (void)transfer.release();  // the wire still knows it
    return false;
  };
  bool clean = true;
  for (Flow& flow : flows_) {
    for (Piece& piece : flow.pieces) clean &= take_back(std::move(piece.transfer));
    if (flow.trailer_transfer != nullptr) clean &= take_back(std::move(flow.trailer_transfer));
  }
  flows_.clear();
  if (!clean) (void)staging_.release();
  return clean;
}

absl::Status PayloadFlows::Move(const Call& call, const Phase& phase) {
  const int64_t bytes = PlanFlows(phase, /*combines=*/false);
  EK_RETURN_IF_ERROR(StartSends(call));
  if (phase.meanwhile != nullptr) (*phase.meanwhile)();
  for (int i = 0; i < seat_.size(); ++i) {
    if (i == seat_.rank()) continue;
    const ReceiveSpan& receive = phase.receives[i];
    const std::byte* const came = records_.CameWithRecord(i, receive.bytes);
    if (came != nullptr) std::memcpy(receive.data, came, static_cast<size_t>(receive.bytes));
  }
  if (flows_.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(absence_.Wait(
      call, BusyFor(bytes), [&](Progress* progress) { return MoveFlows(call, progress); },
      [&] { return MissingPayload(); }));
  return CheckTrailers(call);
}

absl::Status PayloadFlows::MoveAndCombine(const Call& call, const Phase& phase) {
  combined_ = 0;
  const int64_t bytes = PlanFlows(phase, /*combines=*/true);
  EK_RETURN_IF_ERROR(StartSends(call));
  if (phase.meanwhile != nullptr) (*phase.meanwhile)();
  const bool any_staged = std::any_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.staged; });
  EK_CHECK(!any_staged || staging_ != nullptr);
  EK_RETURN_IF_ERROR(absence_.Wait(
      call, BusyFor(bytes),
      [&](Progress* progress) {
        do {
          EK_RETURN_IF_ERROR(MoveFlows(call, progress));
        } while (CombineNext(phase));
        progress->finished = progress->finished && combined_ == phase.block_bytes;
        return absl::OkStatus();
      },
      [&] { return MissingPayload(); }));
  return CheckTrailers(call);
}

// Combines the next piece when it has come from all ranks.
bool PayloadFlows::CombineNext(const Phase& phase) {
  const int64_t length = std::min(combine_bytes_, phase.block_bytes - combined_);
  if (length <= 0) return false;
  for (const Flow& flow : flows_) {
    if (flow.staged && flow.finished < combined_ + length) return false;
  }
  sources_.resize(seat_.size());
  for (int i = 0; i < seat_.size(); ++i) {
    if (i == seat_.rank()) {
      sources_[i] = static_cast<const std::byte*>(phase.sends[i].data) + combined_;
    } else if (const std::byte* came = records_.CameWithRecord(i, phase.block_bytes); came != nullptr) {
      sources_[i] = came + combined_;
    } else {
      sources_[i] = Staged(i, combined_);
    }
  }
  (*phase.combine)(combined_, length, sources_);
  combined_ += length;
  return true;
}

// Flows to and from every peer that has bytes to move and did not move them with the record.
int64_t PayloadFlows::PlanFlows(const Phase& phase, bool combines) {
  flows_.clear();
  const int64_t piece_bytes = combines ? combine_bytes_ : piece_bytes_;
  int64_t bytes = 0;
  const int size = seat_.size(), rank = seat_.rank();
  for (int step = 1; step < size; ++step) {
    const int to = (rank + step) % size;
    const SendSpan& send = phase.sends[to];
    if (send.bytes > 0 && !records_.WentWithRecord(to)) {
      // The wire only reads what is sent.
      auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(send.data));
      flows_.push_back({.peer = to,
                        .sends = true,
                        .data = data,
                        .bytes = send.bytes,
                        .piece_bytes = piece_bytes,
                        .first_index = seat_.peer(to).sends_started});
      bytes += send.bytes;
    }
    const int from = (rank + size - step) % size;
    const ReceiveSpan& receive = phase.receives[from];
    const int64_t expected = combines ? phase.block_bytes : receive.bytes;
    if (expected > 0 && records_.CameWithRecord(from, expected) == nullptr) {
      flows_.push_back({.peer = from,
                        .data = static_cast<std::byte*>(receive.data),
                        .bytes = expected,
                        .piece_bytes = piece_bytes,
                        .staged = combines});
      bytes += expected;
    }
  }
  return bytes;
}

// Before anything is received: a receive whose message is here already may take the time of copying it.
absl::Status PayloadFlows::StartSends(const Call& call) {
  for (Flow& flow : flows_) {
    if (flow.sends) EK_RETURN_IF_ERROR(Advance(call, flow));
  }
  return absl::OkStatus();
}

absl::Status PayloadFlows::MoveFlows(const Call& call, Progress* progress) {
  for (bool again = true; again;) {
    open_.clear();
    for (Flow& flow : flows_) {
      EK_RETURN_IF_ERROR(Advance(call, flow));
      for (Piece& piece : flow.pieces) open_.push_back(piece.transfer.get());
      if (flow.trailer_transfer != nullptr) open_.push_back(flow.trailer_transfer.get());
    }
    EK_RETURN_IF_ERROR(seat_.wire().Test(open_));
    again = std::any_of(flows_.begin(), flows_.end(),
                        [](const Flow& flow) { return !flow.pieces.empty() && flow.pieces.front().transfer->done; });
    progress->moved = progress->moved || again;
  }
  progress->finished = std::all_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.done(); });
  return absl::OkStatus();
}

absl::Status PayloadFlows::Advance(const Call& call, Flow& flow) {
  const MessageOptions& options = seat_.options();
  GroupSeat::Peer& peer = seat_.peer(flow.peer);
  while (!flow.pieces.empty() && flow.pieces.front().transfer->done) {
    const Piece& piece = flow.pieces.front();
    if (!flow.sends && piece.transfer->bytes != piece.bytes) return WrongPiece(call, flow, piece);
    if (options.payload_digest && !flow.sends) {
      flow.digest = CombineDigests(flow.digest, Digest64(PieceData(flow, piece.offset), piece.bytes));
    }
    flow.finished += piece.bytes;
    flow.pieces.pop_front();
    if (flow.sends) peer.pieces_sent.store(flow.first_index + ++flow.num_finished, std::memory_order_relaxed);
  }
  const auto window = static_cast<size_t>(flow.staged ? 2 : options.window);
  while (flow.started < flow.bytes && flow.pieces.size() < window &&
         (!flow.staged || flow.started < combined_ + 2 * combine_bytes_)) {
    Piece piece{.offset = flow.started, .bytes = std::min(flow.piece_bytes, flow.bytes - flow.started)};
    piece.transfer = std::make_unique<Transfer>();
    flow.started += piece.bytes;
    std::byte* data = PieceData(flow, piece.offset);
    if (flow.sends) {
      if (options.payload_digest) flow.digest = CombineDigests(flow.digest, Digest64(data, piece.bytes));
      EK_RETURN_IF_ERROR(seat_.wire().StartSend(peer.world_rank, PayloadTag(peer.sends_started++), data, piece.bytes,
                                                piece.transfer.get()));
    } else {
      EK_RETURN_IF_ERROR(seat_.wire().StartReceive(peer.world_rank, PayloadTag(peer.receives_started++), data,
                                                   piece.bytes, piece.transfer.get()));
    }
    flow.pieces.push_back(std::move(piece));
  }
  return options.payload_digest && flow.started == flow.bytes ? AdvanceTrailer(flow) : absl::OkStatus();
}

absl::Status PayloadFlows::AdvanceTrailer(Flow& flow) {
  GroupSeat::Peer& peer = seat_.peer(flow.peer);
  if (flow.trailer_transfer != nullptr) return absl::OkStatus();
  flow.trailer_transfer = std::make_unique<Transfer>();
  if (!flow.sends) {
    return seat_.wire().StartReceive(peer.world_rank, PayloadTag(peer.receives_started++), &flow.trailer,
                                     sizeof(Trailer), flow.trailer_transfer.get());
  }
  flow.trailer = {.digest = flow.digest, .bytes = flow.bytes};
  return seat_.wire().StartSend(peer.world_rank, PayloadTag(peer.sends_started++), &flow.trailer, sizeof(Trailer),
                                flow.trailer_transfer.get());
}

absl::Status PayloadFlows::WrongPiece(const Call& call, const Flow& flow, const Piece& piece) const {
  ErrorContext context = seat_.Context(call);
  context.findings.push_back({seat_.OuterRank(flow.peer),
                              absl::StrCat("a piece of ", piece.bytes, " bytes came with ", piece.transfer->bytes)});
  return TransportError(absl::StatusCode::kDataLoss, std::move(context), "payload is damaged");
}

absl::Status PayloadFlows::CheckTrailers(const Call& call) const {
  if (!seat_.options().payload_digest) return absl::OkStatus();
  for (const Flow& flow : flows_) {
    if (flow.sends || (flow.trailer.digest == flow.digest && flow.trailer.bytes == flow.bytes)) continue;
    ErrorContext context = seat_.Context(call);
    context.findings.push_back(
        {seat_.OuterRank(flow.peer), absl::StrCat("the digest of its ", flow.bytes, " bytes is not what it sent")});
    return TransportError(absl::StatusCode::kDataLoss, std::move(context), "payload is damaged");
  }
  return absl::OkStatus();
}

std::byte* PayloadFlows::PieceData(const Flow& flow, int64_t offset) {
  return flow.staged ? Staged(flow.peer, offset) : flow.data + offset;
}

std::byte* PayloadFlows::Staged(int peer, int64_t offset) {
  const int64_t slot = offset / combine_bytes_ % 2;
  return staging_.get() + (peer * 2 + slot) * combine_bytes_;
}

// Whom this rank waits for. A peer that does not take payload may itself wait for one that does not send: only when
// nothing is to be received are such peers the odd ones.
std::vector<Missing> PayloadFlows::MissingPayload() const {
  std::vector<Missing> receives = MissingPayload(/*sends=*/false);
  return receives.empty() ? MissingPayload(/*sends=*/true) : receives;
}

std::vector<Missing> PayloadFlows::MissingPayload(bool sends) const {
  std::vector<Missing> missing;
  for (const Flow& flow : flows_) {
    if (flow.sends != sends || flow.done()) continue;
    // A peer whose piece is here but not combined yet is not the one that is missing.
    if (flow.staged && !flow.pieces.empty() && flow.pieces.front().transfer->done) continue;
    if (flow.staged && flow.pieces.empty() && flow.trailer_transfer == nullptr) continue;
    const int64_t open = static_cast<int64_t>(flow.pieces.size()) + (flow.trailer_transfer != nullptr ? 1 : 0);
    missing.push_back({.rank = flow.peer,
                       .what = flow.sends ? "does not take its payload" : "its payload has not come",
                       .piece = !flow.sends,
                       .index = seat_.peer(flow.peer).receives_started - open});
  }
  return missing;
}

}  // namespace evenkeel::comm
