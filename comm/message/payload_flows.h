// The payload of one phase over messages: what MessageTransport::Exchange does.
//
// The span to and the span from each peer is a flow of pieces, a few of them under way at a time, straight from and
// into the caller's memory; pieces to be combined go through two staging blocks per peer, cache-sized. What came with
// the records (record_exchange.h) is not sent again.
#ifndef EVENKEEL_COMM_MESSAGE_PAYLOAD_FLOWS_H_
#define EVENKEEL_COMM_MESSAGE_PAYLOAD_FLOWS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/message/absence.h"
#include "evenkeel/comm/message/group_seat.h"
#include "evenkeel/comm/message/record_exchange.h"
#include "evenkeel/comm/message/wire.h"
#include "evenkeel/comm/scratch_memory.h"
#include "evenkeel/comm/transport.h"

namespace evenkeel::comm {

// Not thread-safe: of the thread that makes the calls.
class PayloadFlows {
 public:
  // All outlive it.
  PayloadFlows(GroupSeat* seat, Absence* absence, const RecordExchange* records, ScratchMemory* scratch);

  // Memory for phases that combine; before the first of them. ResourceExhausted when there is none.
  absl::Status ReserveStaging();

  // Moves, or moves and combines, what `phase` says. Errors: those of Absence::Wait; DataLoss for a piece of another
  // size or a digest that differs. After an error TakeBack must follow.
  absl::Status Run(const Call& call, const Phase& phase);

  // Leaves no message behind that could touch memory of the caller. False when the wire cannot promise it: the staging
  // blocks then stay for ever.
  bool TakeBack();

 private:
  struct Trailer {
    uint64_t digest = 0;
    int64_t bytes = 0;
  };
  struct Piece {
    int64_t offset = 0;
    int64_t bytes = 0;
    std::unique_ptr<Transfer> transfer = nullptr;
  };
  // The pieces of one span, a few of them under way, oldest first.
  struct Flow {
    int peer = -1;
    bool sends = false;
    std::byte* data = nullptr;  // sends: only read
    int64_t bytes = 0;
    int64_t piece_bytes = 0;  // the most of one piece
    int64_t started = 0;      // bytes
    int64_t finished = 0;     // bytes
    std::deque<Piece> pieces = {};
    int64_t first_index = 0;   // of its pieces in the group's life
    int64_t num_finished = 0;  // pieces
    uint64_t digest = 0;
    Trailer trailer = {};
    std::unique_ptr<Transfer> trailer_transfer = nullptr;
    bool staged = false;  // received through staging blocks, `data` unused

    bool done() const { return finished == bytes && (trailer_transfer == nullptr || trailer_transfer->done); }
  };

  absl::Status Move(const Call& call, const Phase& phase);
  absl::Status MoveAndCombine(const Call& call, const Phase& phase);
  bool CombineNext(const Phase& phase);
  int64_t PlanFlows(const Phase& phase, bool combines);
  absl::Status StartSends(const Call& call);
  absl::Status MoveFlows(const Call& call, Progress* progress);
  absl::Status Advance(const Call& call, Flow& flow);
  absl::Status AdvanceTrailer(Flow& flow);
  absl::Status WrongPiece(const Call& call, const Flow& flow, const Piece& piece) const;
  absl::Status CheckTrailers(const Call& call) const;
  std::byte* PieceData(const Flow& flow, int64_t offset);
  std::byte* Staged(int peer, int64_t offset);
  std::vector<Missing> MissingPayload() const;
  std::vector<Missing> MissingPayload(bool sends) const;
  int PayloadTag(int64_t counter) const { return seat_.Tag(GroupSeat::TagKind::kPayload, counter); }

  GroupSeat& seat_;
  Absence& absence_;
  const RecordExchange& records_;
  const int64_t piece_bytes_;    // of a flow that lands in the caller's memory
  const int64_t combine_bytes_;  // of one that is combined on arrival
  std::vector<Flow> flows_;
  std::vector<Transfer*> open_;
  ScratchMemory* const scratch_;
  ScratchBlock staging_;  // two pieces per peer
  int64_t combined_ = 0;  // bytes of the block
  std::vector<const void*> sources_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MESSAGE_PAYLOAD_FLOWS_H_
