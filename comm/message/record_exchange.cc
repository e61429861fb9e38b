#include "evenkeel/comm/message/record_exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

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

}  // namespace

RecordExchange::RecordExchange(GroupSeat* seat, Absence* absence)
    : seat_(*seat),
      absence_(*absence),
      peers_(seat->size()),
      fingerprints_(seat->size()),
      rows_(static_cast<size_t>(seat->size()) * 2 * seat->size(), 0) {}

absl::Status RecordExchange::Exchange(const Call& call, const Posting& posting) {
  const int size = seat_.size();
  EK_CHECK(posting.row.size() <= 2 * static_cast<size_t>(size));
  Wire& wire = seat_.wire();
  const int tag = seat_.Tag(GroupSeat::TagKind::kRecord, seat_.records_sent());
  const size_t capacity = sizeof(RecordHeader) + 2 * size * sizeof(int64_t) + seat_.options().eager_bytes;
  std::vector<Transfer*> all;
  for (int i = 0; i < size; ++i) {
    if (i == seat_.rank()) continue;
    Peer& peer = peers_[i];
    peer.in_record.resize(capacity);
    EK_RETURN_IF_ERROR(wire.StartReceive(seat_.peer(i).world_rank, tag, peer.in_record.data(),
                                         static_cast<int64_t>(capacity), &peer.record_in));
    all.push_back(&peer.record_in);
  }
  // Begin with the next rank, so that not all ranks queue up at the same one.
  for (int step = 1; step < size; ++step) {
    const int i = (seat_.rank() + step) % size;
    WriteRecord(posting, i);
    Peer& peer = peers_[i];
    EK_RETURN_IF_ERROR(wire.StartSend(seat_.peer(i).world_rank, tag, peer.out_record.data(),
                                      static_cast<int64_t>(peer.out_record.size()), &peer.record_out));
    all.push_back(&peer.record_out);
  }
  seat_.CountRecord();
  EK_RETURN_IF_ERROR(absence_.Wait(
      call, absl::ZeroDuration(),
      [&](Progress* progress) {
        EK_RETURN_IF_ERROR(wire.Test(all));
        progress->finished = std::all_of(all.begin(), all.end(), [](const Transfer* t) { return t->done; });
        return absl::OkStatus();
      },
      [&] { return MissingRecords(); }));
  EK_RETURN_IF_ERROR(absence_.CheckNobodyGaveUp(call));
  for (int i = 0; i < size; ++i) {
    if (i != seat_.rank()) EK_RETURN_IF_ERROR(ReadRecord(call, i));
  }
  fingerprints_[seat_.rank()] = posting.fingerprint;
  std::copy(posting.row.begin(), posting.row.end(),
            rows_.begin() + static_cast<size_t>(seat_.rank()) * 2 * static_cast<size_t>(size));
  return absl::OkStatus();
}

const std::byte* RecordExchange::CameWithRecord(int i, int64_t bytes) const {
  const Peer& peer = peers_[i];
  const bool came = peer.eager != nullptr && bytes > 0 && peer.eager_bytes == bytes;
  return came ? reinterpret_cast<const std::byte*>(peer.eager) : nullptr;
}

void RecordExchange::ForgetPayload() {
  for (Peer& peer : peers_) {
    peer.eager_sent = false;
    peer.eager = nullptr;
  }
}

void RecordExchange::TakeBack() {
  for (Peer& peer : peers_) {
    (void)seat_.wire().Cancel(&peer.record_in);
    if (peer.record_out.done || seat_.wire().Cancel(&peer.record_out)) continue;
    new std::string(std::move(peer.out_record));
  }
}

void RecordExchange::WriteRecord(const Posting& posting, int i) {
  Peer& peer = peers_[i];
  RecordHeader header;
  std::memcpy(header.fingerprint, &posting.fingerprint, kFingerprintBytes);
  header.row_length = static_cast<uint32_t>(posting.row.size());
  const SendSpan span = posting.first != nullptr ? posting.first->sends[i] : SendSpan();
  peer.eager_sent = span.bytes > 0 && span.bytes <= seat_.options().eager_bytes;
  const size_t row_bytes = posting.row.size() * sizeof(int64_t);
  if (peer.eager_sent) header.payload_bytes = static_cast<uint32_t>(span.bytes);
  peer.out_record.resize(sizeof(header) + row_bytes + header.payload_bytes);
  char* tail = peer.out_record.data() + sizeof(header);
  if (row_bytes > 0) std::memcpy(tail, posting.row.data(), row_bytes);
  if (peer.eager_sent) std::memcpy(tail + row_bytes, span.data, header.payload_bytes);
  header.tail_digest = TailDigest(header, tail);
  std::memcpy(peer.out_record.data(), &header, sizeof(header));
}

absl::Status RecordExchange::ReadRecord(const Call& call, int i) {
  Peer& peer = peers_[i];
  const auto row_capacity = 2 * static_cast<size_t>(seat_.size());
  RecordHeader header;
  const auto bytes = static_cast<size_t>(std::max<int64_t>(0, peer.record_in.bytes));
  const char* tail = peer.in_record.data() + sizeof(header);
  bool whole = bytes >= sizeof(header);
  if (whole) {
    std::memcpy(&header, peer.in_record.data(), sizeof(header));
    whole = header.row_length <= row_capacity &&
            bytes == sizeof(header) + header.row_length * sizeof(int64_t) + header.payload_bytes &&
            header.tail_digest == TailDigest(header, tail);
  }
  if (!whole) {
    ErrorContext context = seat_.Context(call);
    context.findings.push_back(
        {seat_.OuterRank(i), absl::StrCat("its record of ", peer.record_in.bytes, " bytes is damaged")});
    return TransportError(absl::StatusCode::kDataLoss, std::move(context), "a record is damaged");
  }
  std::memcpy(&fingerprints_[i], header.fingerprint, kFingerprintBytes);
  seat_.peer(i).last = fingerprints_[i];
  seat_.peer(i).knows_last = true;
  if (header.row_length > 0) {
    std::memcpy(&rows_[static_cast<size_t>(i) * row_capacity], tail, header.row_length * sizeof(int64_t));
  }
  peer.eager = tail + header.row_length * sizeof(int64_t);
  peer.eager_bytes = header.payload_bytes;
  return absl::OkStatus();
}

std::vector<Missing> RecordExchange::MissingRecords() const {
  std::vector<Missing> missing;
  for (int i = 0; i < seat_.size(); ++i) {
    if (i == seat_.rank()) continue;
    if (!peers_[i].record_in.done) {
      missing.push_back({.rank = i, .what = "has not entered this call", .record = true});
    } else if (!peers_[i].record_out.done) {
      missing.push_back({.rank = i, .what = "does not take this rank's record"});
    }
  }
  return missing;
}

}  // namespace evenkeel::comm
