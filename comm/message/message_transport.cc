#include "evenkeel/comm/message/message_transport.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// Tags of one group: [channel 12 bits][kind 2 bits][counter 16 bits], channel 0 is the mailroom's.
constexpr int kCounterBits = 16;
constexpr int kKindBits = 2;
constexpr int kNumChannels = (1 << (30 - kCounterBits - kKindBits)) - 1;
// How long a rank whose limit has passed listens for others that gave up at the same moment.
constexpr absl::Duration kGrace = absl::Milliseconds(50);
// How long a rank that gives up waits for room for its notices.
constexpr absl::Duration kFlush = absl::Milliseconds(200);

enum TagKind { kRecordTag = 0, kPayloadTag = 1, kPairFlag = 2 };

struct RecordHeader {
  char fingerprint[kFingerprintBytes] = {};
  uint32_t row_length = 0;
  uint32_t payload_bytes = 0;
  uint64_t tail_digest = 0;  // of the two lengths, the row and the payload
};
static_assert(sizeof(RecordHeader) == 80);

uint64_t TailDigest(const RecordHeader& header, const char* tail) {
  const uint64_t lengths = (uint64_t{header.row_length} << 32) | header.payload_bytes;
  return CombineDigests(lengths, Digest64(tail, header.row_length * sizeof(int64_t) + header.payload_bytes));
}

struct Trailer {
  uint64_t digest = 0;
  int64_t bytes = 0;
};

// What goes to and comes from one peer.
struct Peer {
  int world_rank = -1;
  // Records.
  std::string out_record;
  std::string in_record;
  Transfer record_out, record_in;
  bool knows_last = false;
  Fingerprint last;  // of the newest record of the peer
  bool eager_sent = false;
  const char* eager = nullptr;  // payload that came with the record
  int64_t eager_bytes = 0;
  // Payload pieces, counted over the life of the group.
  std::atomic<int64_t> pieces_sent{0};
  int64_t pieces_received = 0;
};

// The pieces of one span, a few of them under way, oldest first.
struct Flow {
  int peer = -1;
  bool sends = false;
  std::byte* data = nullptr;  // sends: only read
  int64_t bytes = 0;
  int64_t started = 0;   // bytes
  int64_t finished = 0;  // bytes
  struct Piece {
    int64_t offset = 0;
    int64_t bytes = 0;
    std::unique_ptr<Transfer> transfer = nullptr;
  };
  std::deque<Piece> pieces = {};
  uint64_t digest = 0;
  Trailer trailer = {};
  std::unique_ptr<Transfer> trailer_transfer = nullptr;
  bool staged = false;  // received through staging blocks, `data` unused

  bool done() const { return finished == bytes && (trailer_transfer == nullptr || trailer_transfer->done); }
};

class MessageTransport final : public Transport {
 public:
  MessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options, const Group& group, int rank,
                   int64_t epoch, const ProposalSerials& serials, bool pair)
      : wire_(wire),
        mailroom_(mailroom),
        options_(options),
        group_(group),
        rank_(rank),
        epoch_(epoch),
        serials_(serials),
        is_pair_(pair),
        piece_bytes_(std::max<int64_t>(64, options.piece_bytes / 64 * 64)),
        peers_(group.size()),
        fingerprints_(group.size()),
        rows_(static_cast<size_t>(group.size()) * 2 * group.size(), 0),
        pairs_(group.size()) {
    for (int i = 0; i < group.size(); ++i) peers_[i].world_rank = group.ranks[i];
    if (!is_pair_) mailroom_->OpenEpoch(epoch_);
  }

  ~MessageTransport() override {
    TakeBackRecords();
    pairs_.clear();  // their farewell comes first
    if (status().ok()) TellPeers(ControlMessage::Kind::kLeft, absl::OkStatus());
    if (!is_pair_) mailroom_->CloseEpoch(epoch_);
  }

  const Group& group() const override { return group_; }
  int rank() const override { return rank_; }
  int64_t epoch() const override { return epoch_; }

  absl::Status Agree(const Call& call, const Posting& posting, Agreement* agreement) override {
    EK_RETURN_IF_ERROR(CheckUsable(call));
    call_start_ = wire_->Now();
    in_agree_.store(true, std::memory_order_relaxed);
    const absl::Status status = AgreeOrFail(call, posting);
    if (!status.ok()) return Break(status);
    in_agree_.store(false, std::memory_order_relaxed);
    agreement->fingerprints = fingerprints_;
    agreement->rows = rows_;
    return absl::OkStatus();
  }

  absl::Status Exchange(const Call& call, const Phase& phase) override {
    EK_RETURN_IF_ERROR(CheckUsable(call));
    const absl::Status status = phase.combine == nullptr ? Move(call, phase) : MoveAndCombine(call, phase);
    for (Peer& peer : peers_) {
      peer.eager_sent = false;
      peer.eager = nullptr;
    }
    return status.ok() ? status : Break(status);
  }

  absl::StatusOr<Transport*> Pair(int peer) override {
    EK_CHECK(!is_pair_ && peer >= 0 && peer < size() && peer != rank_);
    if (pairs_[peer] == nullptr) {
      const int low = std::min(peer, rank_), high = std::max(peer, rank_);
      Group two{.axis = group_.axis, .name = group_.name, .ranks = {group_.ranks[low], group_.ranks[high]}};
      const ProposalSerials serials = {serials_[low], serials_[high]};
      auto pair = std::make_unique<MessageTransport>(wire_, mailroom_, options_, two, rank_ == low ? 0 : 1, epoch_,
                                                     serials, /*pair=*/true);
      pair->outer_ranks_ = {low, high};
      pair->outer_size_ = size();
      pairs_[peer] = std::move(pair);
    }
    return pairs_[peer].get();
  }

  void Abort(const absl::Status& cause) override {
    {
      absl::MutexLock lock(&mutex_);
      if (!first_cause_.ok()) return;
      first_cause_ = cause;
    }
    TellPeers(ControlMessage::Kind::kAbort, cause);
  }

 private:
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return first_cause_;
  }

  // ---- Errors -----------------------------------------------------------------------------------------------------

  int OuterRank(int rank) const { return outer_ranks_.empty() ? rank : outer_ranks_[rank]; }

  ErrorContext Context(const Call& call) const {
    ErrorContext context = CallContext(group_, epoch_, OuterRank(rank_), call);
    if (outer_size_ > 0) context.size = outer_size_;
    return context;
  }

  absl::Status CheckUsable(const Call& call) {
    if (absl::Status cause = status(); !cause.ok()) return BrokenGroupError(Context(call), cause);
    if (wire_->status().ok()) return absl::OkStatus();
    std::vector<Missing> all;
    for (int i = 0; i < size(); ++i) {
      if (i != rank_) all.push_back({.rank = i});
    }
    return WireError(call, all);
  }

  // Keeps the cause, tells the peers, and leaves no message behind that could touch memory of the caller.
  absl::Status Break(const absl::Status& cause) {
    Abort(cause);
    // While payload may be touched, which it may no longer once the call has returned: a notice that finds no room on
    // its way waits behind it.
    mailroom_->Flush(kFlush);
    TakeBackRecords();
    bool clean = true;
    for (Flow& flow : flows_) {
      for (Flow::Piece& piece : flow.pieces) clean &= TakeBack(std::move(piece.transfer));
      if (flow.trailer_transfer != nullptr) clean &= TakeBack(std::move(flow.trailer_transfer));
    }
    flows_.clear();
    if (!clean) {
      wire_->Condemn(Annotate(cause, "payload of a failed call is still under way"));
      (void)staging_.release();
    }
    return cause;
  }

  bool TakeBack(std::unique_ptr<Transfer> transfer) {
    if (wire_->Cancel(transfer.get())) return true;
    (void)transfer.release();  // the wire still knows it
    return false;
  }

  // Records live in this object's memory; where the wire cannot give one back, the memory stays for ever.
  void TakeBackRecords() {
    for (Peer& peer : peers_) {
      (void)wire_->Cancel(&peer.record_in);
      if (peer.record_out.done || wire_->Cancel(&peer.record_out)) continue;
      new std::string(std::move(peer.out_record));
    }
  }

  void TellPeers(ControlMessage::Kind kind, const absl::Status& cause) {
    for (int i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      ControlMessage message{.kind = kind,
                             .pair = is_pair_,
                             .in_agree = in_agree_.load(std::memory_order_relaxed),
                             .id = epoch_,
                             .a = records_sent_.load(std::memory_order_relaxed),
                             .b = peers_[i].pieces_sent.load(std::memory_order_relaxed)};
      if (!cause.ok()) message.body = EncodeStatus(cause);
      mailroom_->Post(peers_[i].world_rank, message);
    }
  }

  std::string LastOf(int i) const {
    if (!peers_[i].knows_last) return "nothing came from it in this group";
    return absl::StrCat("its last call: ", DescribeFingerprint(peers_[i].last));
  }

  // ---- Waiting ----------------------------------------------------------------------------------------------------

  // What a rank waits for from one peer: a record, pieces, or that the peer takes what was sent.
  struct Missing {
    int rank = -1;
    const char* what = "";
    bool record = false;  // its record of this call
    bool piece = false;   // payload piece number `index` of the group's life
    int64_t index = 0;
  };

  // The notice of group rank i, as far as it concerns what is missing: an error, or OK when what is missing can still
  // arrive.
  absl::Status JudgeNotice(const Call& call, const Missing& missing) {
    const int world_rank = peers_[missing.rank].world_rank;
    std::optional<ControlMessage> notice = mailroom_->FindNotice(world_rank, epoch_, is_pair_);
    if (!notice.has_value() && is_pair_) notice = mailroom_->FindNotice(world_rank, epoch_, false);
    if (!notice.has_value()) {
      std::optional<absl::Status> cause = mailroom_->FindVoid(world_rank, serials_[missing.rank]);
      if (cause.has_value()) return Adopt(Context(call), *cause, missing.rank);
      return absl::OkStatus();
    }
    const bool same_stream = notice->pair == is_pair_;
    if (same_stream && missing.record && notice->a > records_sent_.load(std::memory_order_relaxed) - 1) {
      return absl::OkStatus();  // sent before it stopped: still on its way
    }
    if (same_stream && missing.piece && notice->b > missing.index) return absl::OkStatus();
    ErrorContext context = Context(call);
    context.elapsed = wire_->Now() - call_start_;
    context.limit = call.limit;
    if (notice->kind == ControlMessage::Kind::kLeft) {
      context.findings.push_back({OuterRank(missing.rank), absl::StrCat("has left the group; ", LastOf(missing.rank))});
      return TransportError(absl::StatusCode::kUnavailable, std::move(context), "a rank is gone");
    }
    return Adopt(std::move(context), DecodeStatus(notice->body), missing.rank);
  }

  // The error of a rank that waits for rank `from`, which has given the group up because of `cause`.
  absl::Status Adopt(ErrorContext context, const absl::Status& cause, int from) {
    const bool about_absence = absl::IsDeadlineExceeded(cause) || absl::IsUnavailable(cause) || absl::IsDataLoss(cause);
    const std::optional<ErrorContext> theirs = GetErrorContext(cause);
    if (!about_absence || !theirs.has_value()) {
      return BrokenGroupError(std::move(context), cause);
    }
    context.findings = theirs->findings;
    return TransportError(cause.code(), std::move(context),
                          absl::StrCat("rank ", OuterRank(from), " gave the group up in ", theirs->operation));
  }

  // Whether one of the missing ranks can never come. A rank that died or left after it had given the group up is not
  // the cause: what it said is.
  absl::Status FindGone(const Call& call, const std::vector<Missing>& missing) {
    for (const Missing& m : missing) {
      if (!CauseOf(m.rank).has_value()) EK_RETURN_IF_ERROR(JudgeHealth(call, m));
    }
    for (const Missing& m : missing) EK_RETURN_IF_ERROR(JudgeNotice(call, m));
    return absl::OkStatus();
  }

  absl::Status JudgeHealth(const Call& call, const Missing& missing) {
    const PeerHealth health = wire_->Health(peers_[missing.rank].world_rank, /*describe=*/false);
    std::string what;
    if (health.state == PeerHealth::State::kDead) {
      what = health.text.empty() ? "is dead" : health.text;
    } else if (mailroom_->SaidGoodbye(peers_[missing.rank].world_rank)) {
      what = "has left the world";
    } else {
      return absl::OkStatus();
    }
    ErrorContext context = Context(call);
    context.findings.push_back({OuterRank(missing.rank), absl::StrCat(what, "; ", LastOf(missing.rank))});
    context.elapsed = wire_->Now() - call_start_;
    context.limit = call.limit;
    return TransportError(absl::StatusCode::kUnavailable, std::move(context), "a rank is gone");
  }

  // The limit has passed. A peer that this rank misses may itself miss others, and give up at the same moment: what
  // such peers say within a short grace replaces them in the findings.
  absl::Status TooLate(const Call& call, const std::vector<Missing>& missing) {
    const absl::Duration now = wire_->Now();
    std::map<int, std::string> odd;  // by group rank
    for (int attempt = 0;; ++attempt) {
      mailroom_->Poll();
      odd = OddRanks(missing);
      const bool settled = odd.size() <= 1 || wire_->Now() >= now + kGrace;
      if (settled) break;
      wire_->Pause({.attempt = attempt, .until = now + kGrace, .since = now});
    }
    ErrorContext context = Context(call);
    for (auto& [rank, had] : odd) context.findings.push_back({rank, had});
    context.elapsed = wire_->Now() - call_start_;
    context.limit = call.limit;
    return TransportError(absl::StatusCode::kDeadlineExceeded, std::move(context), "ranks are absent");
  }

  std::map<int, std::string> OddRanks(const std::vector<Missing>& missing) {
    std::map<int, std::string> odd;
    for (const Missing& m : missing) {
      const int world_rank = peers_[m.rank].world_rank;
      if (const std::optional<absl::Status> cause = CauseOf(m.rank); cause.has_value()) {
        const std::optional<ErrorContext> theirs = GetErrorContext(*cause);
        if (theirs.has_value() && !Names(*theirs, OuterRank(rank_)) && !theirs->findings.empty()) {
          for (const RankFinding& finding : theirs->findings) {
            odd.emplace(finding.rank, absl::StrCat("rank ", OuterRank(m.rank), " says: ", finding.had));
          }
          continue;
        }
      }
      const PeerHealth health = wire_->Health(world_rank, /*describe=*/true);
      std::string had = absl::StrCat(m.what, "; ", LastOf(m.rank));
      if (!health.text.empty()) absl::StrAppend(&had, "; ", health.text);
      odd.insert_or_assign(OuterRank(m.rank), std::move(had));
    }
    return odd;
  }

  // Why group rank i has given the group up, when it has.
  std::optional<absl::Status> CauseOf(int i) {
    const int world_rank = peers_[i].world_rank;
    const std::optional<ControlMessage> notice = mailroom_->FindNotice(world_rank, epoch_, is_pair_);
    if (!notice.has_value()) return mailroom_->FindVoid(world_rank, serials_[i]);
    if (notice->kind != ControlMessage::Kind::kAbort) return std::nullopt;
    return DecodeStatus(notice->body);
  }

  static bool Names(const ErrorContext& context, int rank) {
    return std::any_of(context.findings.begin(), context.findings.end(),
                       [rank](const RankFinding& finding) { return finding.rank == rank; });
  }

  // Polls `advance` until it says that everything is there. `missing` lists what is not.
  template <typename Advance, typename ListMissing>
  absl::Status Wait(const Call& call, absl::Duration busy_for, Advance advance, ListMissing list_missing) {
    const absl::Duration limit = call_start_ + call.limit;
    const absl::Duration since = wire_->Now();
    for (int attempt = 0;; ++attempt) {
      bool finished = false;
      EK_RETURN_IF_ERROR(advance(&finished));
      if (finished) return absl::OkStatus();
      if (!wire_->status().ok()) return WireError(call, list_missing());
      const bool too_late = attempt % 16 == 15 && wire_->Now() >= limit;
      const bool look = wire_->Pause({.attempt = attempt, .until = limit, .since = since, .busy_for = busy_for});
      if (!look && !too_late) continue;
      if (absl::Status cause = status(); !cause.ok()) return BrokenGroupError(Context(call), cause);
      mailroom_->Poll();
      const std::vector<Missing> missing = list_missing();
      if (wire_->Now() >= limit) {
        EK_RETURN_IF_ERROR(advance(&finished));
        return finished ? absl::OkStatus() : TooLate(call, list_missing());
      }
      absl::Status gone = FindGone(call, missing);
      if (gone.ok()) continue;
      // What a rank had sent before it went may have arrived since the last look.
      for (int look_again = 0; look_again < 64 && !finished; ++look_again) EK_RETURN_IF_ERROR(advance(&finished));
      if (finished) return absl::OkStatus();
      mailroom_->Poll();
      if (gone = FindGone(call, list_missing()); !gone.ok()) return gone;
    }
  }

  // The wire carries nothing any more: a dead rank of the group is named first.
  absl::Status WireError(const Call& call, const std::vector<Missing>& missing) {
    for (const Missing& m : missing) EK_RETURN_IF_ERROR(JudgeHealth(call, m));
    const absl::Status cause = wire_->status();
    if (absl::IsAborted(cause)) return BrokenGroupError(Context(call), cause);
    return TransportError(cause.code(), Context(call), cause.message());
  }

  // ---- Records ----------------------------------------------------------------------------------------------------

  int Tag(TagKind kind, int64_t counter) const {
    const int channel = static_cast<int>(epoch_ % kNumChannels) + 1;
    const int flags = kind | (is_pair_ ? kPairFlag : 0);
    return (((channel << kKindBits) | flags) << kCounterBits) | static_cast<int>(counter & ((1 << kCounterBits) - 1));
  }

  void WriteRecord(const Posting& posting, int i) {
    Peer& peer = peers_[i];
    RecordHeader header;
    std::memcpy(header.fingerprint, &posting.fingerprint, kFingerprintBytes);
    header.row_length = static_cast<uint32_t>(posting.row.size());
    const SendSpan span = posting.first != nullptr ? posting.first->sends[i] : SendSpan();
    peer.eager_sent = span.bytes > 0 && span.bytes <= options_.eager_bytes;
    const size_t row_bytes = posting.row.size() * sizeof(int64_t);
    if (peer.eager_sent) header.payload_bytes = static_cast<uint32_t>(span.bytes);
    peer.out_record.resize(sizeof(header) + row_bytes + header.payload_bytes);
    char* tail = peer.out_record.data() + sizeof(header);
    if (row_bytes > 0) std::memcpy(tail, posting.row.data(), row_bytes);
    if (peer.eager_sent) std::memcpy(tail + row_bytes, span.data, header.payload_bytes);
    header.tail_digest = TailDigest(header, tail);
    std::memcpy(peer.out_record.data(), &header, sizeof(header));
  }

  absl::Status ReadRecord(const Call& call, int i) {
    Peer& peer = peers_[i];
    RecordHeader header;
    const auto bytes = static_cast<size_t>(std::max<int64_t>(0, peer.record_in.bytes));
    const char* tail = peer.in_record.data() + sizeof(header);
    bool whole = bytes >= sizeof(header);
    if (whole) {
      std::memcpy(&header, peer.in_record.data(), sizeof(header));
      whole = header.row_length <= 2 * static_cast<size_t>(size()) &&
              bytes == sizeof(header) + header.row_length * sizeof(int64_t) + header.payload_bytes &&
              header.tail_digest == TailDigest(header, tail);
    }
    if (!whole) {
      ErrorContext context = Context(call);
      context.findings.push_back(
          {OuterRank(i), absl::StrCat("its record of ", peer.record_in.bytes, " bytes is damaged")});
      return TransportError(absl::StatusCode::kDataLoss, std::move(context), "a record is damaged");
    }
    std::memcpy(&fingerprints_[i], header.fingerprint, kFingerprintBytes);
    peer.last = fingerprints_[i];
    peer.knows_last = true;
    if (header.row_length > 0) {
      std::memcpy(&rows_[static_cast<size_t>(i) * 2 * size()], tail, header.row_length * sizeof(int64_t));
    }
    peer.eager = tail + header.row_length * sizeof(int64_t);
    peer.eager_bytes = header.payload_bytes;
    return absl::OkStatus();
  }

  absl::Status AgreeOrFail(const Call& call, const Posting& posting) {
    EK_CHECK(posting.row.size() <= 2 * static_cast<size_t>(size()));
    const int tag = Tag(kRecordTag, records_sent_.load(std::memory_order_relaxed));
    const size_t capacity = sizeof(RecordHeader) + 2 * size() * sizeof(int64_t) + options_.eager_bytes;
    std::vector<Transfer*> all;
    for (int i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      Peer& peer = peers_[i];
      peer.in_record.resize(capacity);
      EK_RETURN_IF_ERROR(wire_->StartReceive(peer.world_rank, tag, peer.in_record.data(),
                                             static_cast<int64_t>(capacity), &peer.record_in));
      all.push_back(&peer.record_in);
    }
    // Begin with the next rank, so that not all ranks queue up at the same one.
    for (int step = 1; step < size(); ++step) {
      const int i = (rank_ + step) % size();
      WriteRecord(posting, i);
      EK_RETURN_IF_ERROR(wire_->StartSend(peers_[i].world_rank, tag, peers_[i].out_record.data(),
                                          static_cast<int64_t>(peers_[i].out_record.size()), &peers_[i].record_out));
      all.push_back(&peers_[i].record_out);
    }
    records_sent_.fetch_add(1, std::memory_order_relaxed);
    EK_RETURN_IF_ERROR(Wait(
        call, absl::ZeroDuration(),
        [&](bool* finished) {
          EK_RETURN_IF_ERROR(wire_->Test(all));
          *finished = std::all_of(all.begin(), all.end(), [](const Transfer* t) { return t->done; });
          return absl::OkStatus();
        },
        [&] { return MissingRecords(); }));
    // A rank that comes last may come too late: the others have waited for it and may have given up.
    EK_RETURN_IF_ERROR(CheckNobodyGaveUp(call));
    for (int i = 0; i < size(); ++i) {
      if (i != rank_) EK_RETURN_IF_ERROR(ReadRecord(call, i));
    }
    fingerprints_[rank_] = posting.fingerprint;
    std::copy(posting.row.begin(), posting.row.end(), rows_.begin() + static_cast<size_t>(rank_) * 2 * size());
    return absl::OkStatus();
  }

  absl::Status CheckNobodyGaveUp(const Call& call) {
    mailroom_->Poll();
    for (int i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      const std::optional<ControlMessage> notice = mailroom_->FindNotice(peers_[i].world_rank, epoch_, is_pair_);
      const bool in_this_call = notice.has_value() && notice->kind == ControlMessage::Kind::kAbort &&
                                notice->in_agree && notice->a == records_sent_.load(std::memory_order_relaxed);
      if (in_this_call) return Adopt(Context(call), DecodeStatus(notice->body), i);
    }
    return absl::OkStatus();
  }

  std::vector<Missing> MissingRecords() const {
    std::vector<Missing> missing;
    for (int i = 0; i < size(); ++i) {
      if (i == rank_) continue;
      if (!peers_[i].record_in.done) {
        missing.push_back({.rank = i, .what = "has not entered this call", .record = true});
      } else if (!peers_[i].record_out.done) {
        missing.push_back({.rank = i, .what = "does not take this rank's record"});
      }
    }
    return missing;
  }

  // ---- Payload ----------------------------------------------------------------------------------------------------

  absl::Status Advance(Flow& flow) {
    Peer& peer = peers_[flow.peer];
    while (!flow.pieces.empty() && flow.pieces.front().transfer->done) {
      const Flow::Piece& piece = flow.pieces.front();
      if (!flow.sends && piece.transfer->bytes != piece.bytes) return WrongPiece(flow, piece);
      if (options_.payload_digest && !flow.sends) {
        flow.digest = CombineDigests(flow.digest, Digest64(PieceData(flow, piece.offset), piece.bytes));
      }
      flow.finished += piece.bytes;
      flow.pieces.pop_front();
    }
    const auto window = static_cast<size_t>(flow.staged ? 2 : options_.window);
    while (flow.started < flow.bytes && flow.pieces.size() < window &&
           (!flow.staged || flow.started < combined_ + 2 * piece_bytes_)) {
      Flow::Piece piece{.offset = flow.started, .bytes = std::min(piece_bytes_, flow.bytes - flow.started)};
      piece.transfer = std::make_unique<Transfer>();
      flow.started += piece.bytes;
      std::byte* data = PieceData(flow, piece.offset);
      if (flow.sends) {
        if (options_.payload_digest) flow.digest = CombineDigests(flow.digest, Digest64(data, piece.bytes));
        EK_RETURN_IF_ERROR(wire_->StartSend(peer.world_rank, Tag(kPayloadTag, peer.pieces_sent++), data, piece.bytes,
                                            piece.transfer.get()));
      } else {
        EK_RETURN_IF_ERROR(wire_->StartReceive(peer.world_rank, Tag(kPayloadTag, peer.pieces_received++), data,
                                               piece.bytes, piece.transfer.get()));
      }
      flow.pieces.push_back(std::move(piece));
    }
    return options_.payload_digest && flow.started == flow.bytes ? AdvanceTrailer(flow) : absl::OkStatus();
  }

  absl::Status AdvanceTrailer(Flow& flow) {
    Peer& peer = peers_[flow.peer];
    if (flow.trailer_transfer != nullptr) return absl::OkStatus();
    flow.trailer_transfer = std::make_unique<Transfer>();
    if (!flow.sends) {
      return wire_->StartReceive(peer.world_rank, Tag(kPayloadTag, peer.pieces_received++), &flow.trailer,
                                 sizeof(Trailer), flow.trailer_transfer.get());
    }
    flow.trailer = {.digest = flow.digest, .bytes = flow.bytes};
    return wire_->StartSend(peer.world_rank, Tag(kPayloadTag, peer.pieces_sent++), &flow.trailer, sizeof(Trailer),
                            flow.trailer_transfer.get());
  }

  std::byte* PieceData(const Flow& flow, int64_t offset) {
    return flow.staged ? Staged(flow.peer, offset) : flow.data + offset;
  }

  absl::Status WrongPiece(const Flow& flow, const Flow::Piece& piece) {
    ErrorContext context = Context(*current_call_);
    context.findings.push_back(
        {OuterRank(flow.peer), absl::StrCat("a piece of ", piece.bytes, " bytes came with ", piece.transfer->bytes)});
    return TransportError(absl::StatusCode::kDataLoss, std::move(context), "payload is damaged");
  }

  absl::Status CheckTrailers() {
    if (!options_.payload_digest) return absl::OkStatus();
    for (const Flow& flow : flows_) {
      if (flow.sends || (flow.trailer.digest == flow.digest && flow.trailer.bytes == flow.bytes)) continue;
      ErrorContext context = Context(*current_call_);
      context.findings.push_back(
          {OuterRank(flow.peer), absl::StrCat("the digest of its ", flow.bytes, " bytes is not what it sent")});
      return TransportError(absl::StatusCode::kDataLoss, std::move(context), "payload is damaged");
    }
    return absl::OkStatus();
  }

  // Flows to and from every peer that has bytes to move and did not move them with the record.
  int64_t PlanFlows(const Phase& phase, bool staged) {
    flows_.clear();
    int64_t bytes = 0;
    for (int step = 1; step < size(); ++step) {
      const int to = (rank_ + step) % size();
      const SendSpan& send = phase.sends[to];
      if (send.bytes > 0 && !peers_[to].eager_sent) {
        // The wire only reads what is sent.
        auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(send.data));
        flows_.push_back({.peer = to, .sends = true, .data = data, .bytes = send.bytes});
        bytes += send.bytes;
      }
      const int from = (rank_ + size() - step) % size();
      const ReceiveSpan& receive = phase.receives[from];
      const int64_t expected = staged ? phase.block_bytes : receive.bytes;
      if (expected > 0 && !CameWithRecord(from, expected)) {
        flows_.push_back(
            {.peer = from, .data = static_cast<std::byte*>(receive.data), .bytes = expected, .staged = staged});
        bytes += expected;
      }
    }
    return bytes;
  }

  bool CameWithRecord(int i, int64_t bytes) const {
    return peers_[i].eager != nullptr && peers_[i].eager_bytes > 0 && peers_[i].eager_bytes == bytes;
  }

  absl::Status MoveFlows(bool* all_done) {
    for (bool again = true; again;) {
      open_.clear();
      for (Flow& flow : flows_) {
        EK_RETURN_IF_ERROR(Advance(flow));
        for (Flow::Piece& piece : flow.pieces) open_.push_back(piece.transfer.get());
        if (flow.trailer_transfer != nullptr) open_.push_back(flow.trailer_transfer.get());
      }
      EK_RETURN_IF_ERROR(wire_->Test(open_));
      again = std::any_of(flows_.begin(), flows_.end(),
                          [](const Flow& flow) { return !flow.pieces.empty() && flow.pieces.front().transfer->done; });
    }
    *all_done = std::all_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.done(); });
    return absl::OkStatus();
  }

  // Payload at a pessimistic 0.5 GB/s: so long a wait is no reason to fall asleep.
  static absl::Duration BusyFor(int64_t bytes) {
    return std::min(absl::Nanoseconds(2 * bytes), absl::Milliseconds(50));
  }

  absl::Status Move(const Call& call, const Phase& phase) {
    current_call_ = &call;
    const int64_t bytes = PlanFlows(phase, /*staged=*/false);
    for (int i = 0; i < size(); ++i) {
      if (i == rank_ || phase.receives[i].bytes <= 0 || !CameWithRecord(i, phase.receives[i].bytes)) continue;
      std::memcpy(phase.receives[i].data, peers_[i].eager, static_cast<size_t>(phase.receives[i].bytes));
    }
    if (!flows_.empty()) {
      EK_RETURN_IF_ERROR(Wait(
          call, BusyFor(bytes), [&](bool* finished) { return MoveFlows(finished); }, [&] { return MissingPayload(); }));
      EK_RETURN_IF_ERROR(CheckTrailers());
    }
    flows_.clear();
    return absl::OkStatus();
  }

  std::byte* Staged(int peer, int64_t offset) {
    const int64_t slot = offset / piece_bytes_ % 2;
    return staging_.get() + (peer * 2 + slot) * piece_bytes_;
  }

  absl::Status MoveAndCombine(const Call& call, const Phase& phase) {
    current_call_ = &call;
    combined_ = 0;
    const int64_t bytes = PlanFlows(phase, /*staged=*/true);
    const bool any_staged = std::any_of(flows_.begin(), flows_.end(), [](const Flow& flow) { return flow.staged; });
    if (any_staged && staging_ == nullptr) staging_.reset(new std::byte[2 * piece_bytes_ * size()]);
    EK_RETURN_IF_ERROR(Wait(
        call, BusyFor(bytes),
        [&](bool* finished) {
          do {
            EK_RETURN_IF_ERROR(MoveFlows(finished));
          } while (CombineNext(phase));
          *finished = *finished && combined_ == phase.block_bytes;
          return absl::OkStatus();
        },
        [&] { return MissingPayload(); }));
    EK_RETURN_IF_ERROR(CheckTrailers());
    flows_.clear();
    return absl::OkStatus();
  }

  // Combines the next piece when it has come from all ranks.
  bool CombineNext(const Phase& phase) {
    const int64_t length = std::min(piece_bytes_, phase.block_bytes - combined_);
    if (length <= 0) return false;
    for (const Flow& flow : flows_) {
      if (flow.staged && flow.finished < combined_ + length) return false;
    }
    sources_.resize(size());
    for (int i = 0; i < size(); ++i) {
      if (i == rank_) {
        sources_[i] = static_cast<const std::byte*>(phase.sends[i].data) + combined_;
      } else if (CameWithRecord(i, phase.block_bytes)) {
        sources_[i] = peers_[i].eager + combined_;
      } else {
        sources_[i] = Staged(i, combined_);
      }
    }
    (*phase.combine)(combined_, length, sources_);
    combined_ += length;
    return true;
  }

  // Whom this rank waits for. A peer that does not take payload may itself wait for one that does not send: only when
  // nothing is to be received are such peers the odd ones.
  std::vector<Missing> MissingPayload() const {
    std::vector<Missing> receives = MissingPayload(/*sends=*/false);
    return receives.empty() ? MissingPayload(/*sends=*/true) : receives;
  }

  std::vector<Missing> MissingPayload(bool sends) const {
    std::vector<Missing> missing;
    for (const Flow& flow : flows_) {
      if (flow.sends != sends || flow.done()) continue;
      const Peer& peer = peers_[flow.peer];
      // A peer whose piece is here but not combined yet is not the one that is missing.
      if (flow.staged && !flow.pieces.empty() && flow.pieces.front().transfer->done) continue;
      if (flow.staged && flow.pieces.empty() && flow.trailer_transfer == nullptr) continue;
      const int64_t open = static_cast<int64_t>(flow.pieces.size()) + (flow.trailer_transfer != nullptr ? 1 : 0);
      missing.push_back({.rank = flow.peer,
                         .what = flow.sends ? "does not take its payload" : "its payload has not come",
                         .piece = !flow.sends,
                         .index = peer.pieces_received - open});
    }
    return missing;
  }

  Wire* const wire_;
  Mailroom* const mailroom_;
  const MessageOptions options_;
  const Group group_;
  const int rank_;
  const int64_t epoch_;
  const ProposalSerials serials_;
  const bool is_pair_;
  const int64_t piece_bytes_;
  std::vector<int> outer_ranks_;  // of a pair: the group ranks behind 0 and 1
  int outer_size_ = 0;

  std::vector<Peer> peers_;
  std::vector<Fingerprint> fingerprints_;
  std::vector<int64_t> rows_;
  std::vector<std::unique_ptr<MessageTransport>> pairs_;
  std::atomic<int64_t> records_sent_{0};
  std::atomic<bool> in_agree_{false};
  absl::Duration call_start_ = absl::ZeroDuration();
  const Call* current_call_ = nullptr;

  std::vector<Flow> flows_;
  std::vector<Transfer*> open_;
  std::unique_ptr<std::byte[]> staging_;  // two pieces per peer
  int64_t combined_ = 0;                  // bytes of the block
  std::vector<const void*> sources_;

  mutable absl::Mutex mutex_;
  absl::Status first_cause_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::Status CheckMessageOptions(const MessageOptions& options) {
  if (options.eager_bytes < 0 || options.eager_bytes > 2560) {
    return absl::InvalidArgumentError(absl::StrCat("eager_bytes ", options.eager_bytes, " is outside [0, 2560]"));
  }
  if (options.piece_bytes < 64 || options.piece_bytes >= (int64_t{1} << 31)) {
    return absl::InvalidArgumentError(absl::StrCat("piece_bytes ", options.piece_bytes, " is outside [64, 2^31)"));
  }
  if (options.window < 1 || options.window > 64) {
    return absl::InvalidArgumentError(absl::StrCat("window ", options.window, " is outside [1, 64]"));
  }
  return absl::OkStatus();
}

uint64_t DigestOfMessageOptions(const MessageOptions& options) {
  return Digest64(absl::StrCat(options.eager_bytes, " ", options.piece_bytes, " ", options.window, " ",
                               options.payload_digest ? 1 : 0));
}

std::unique_ptr<Transport> CreateMessageTransport(Wire* wire, Mailroom* mailroom, const MessageOptions& options,
                                                  const Group& group, int rank, int64_t epoch,
                                                  const ProposalSerials& serials) {
  return std::make_unique<MessageTransport>(wire, mailroom, options, group, rank, epoch, serials, /*pair=*/false);
}

}  // namespace evenkeel::comm
