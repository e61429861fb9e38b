// The exchange of records by which the ranks of a group agree on a call: what MessageTransport::Agree does.
//
// A record is the fingerprint, a row of counts, and payload of at most MessageOptions::eager_bytes for that peer, with
// a digest of it all. It goes to every peer and comes from every peer.
#ifndef EVENKEEL_COMM_MESSAGE_RECORD_EXCHANGE_H_
#define EVENKEEL_COMM_MESSAGE_RECORD_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/message/absence.h"
#include "evenkeel/comm/message/group_seat.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// Not thread-safe: of the thread that makes the calls.
class RecordExchange {
 public:
  // Both outlive it.
  RecordExchange(GroupSeat* seat, Absence* absence);

  // Sends this rank's record to all peers and takes theirs. Errors: those of Absence::Wait; the cause of a peer that
  // gave up this call; DataLoss for a damaged record.
  absl::Status Exchange(const Call& call, const Posting& posting);

  // Of the newest exchange, by group rank.
  absl::Span<const Fingerprint> fingerprints() const { return fingerprints_; }
  absl::Span<const int64_t> rows() const { return rows_; }

  // Whether the payload for rank i went with its record.
  bool WentWithRecord(int i) const { return peers_[i].eager_sent; }
  // The `bytes` bytes of payload that came with rank i's record, or null when it did not bring so many.
  const std::byte* CameWithRecord(int i, int64_t bytes) const;
  // The first phase of the call is over: its payload is not that of the next.
  void ForgetPayload();

  // Leaves no message behind: where the wire cannot give one back, its memory stays for ever.
  void TakeBack();

 private:
  struct Peer {
    std::string out_record;
    std::string in_record;
    Transfer record_out, record_in;
    bool eager_sent = false;
    const char* eager = nullptr;  // payload that came with the record
    int64_t eager_bytes = 0;
  };

  void WriteRecord(const Posting& posting, int i);
  absl::Status ReadRecord(const Call& call, int i);
  std::vector<Missing> MissingRecords() const;

  GroupSeat& seat_;
  Absence& absence_;
  std::vector<Peer> peers_;
  std::vector<Fingerprint> fingerprints_;
  std::vector<int64_t> rows_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_RECORD_EXCHANGE_H_
