// What a rank is about to do, in 64 bytes: compared over the group before any byte moves.
//
//   Fingerprint mine = MakeFingerprint({.operation = Operation::kAllReduce, .dtype = DType::kF32, ...});
//   ... exchange ...
//   std::optional<Disagreement> odd = FindDisagreement(all);   // the same answer on every rank
#ifndef EVENKEEL_COMM_FINGERPRINT_H_
#define EVENKEEL_COMM_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/operation.h"
#include "evenkeel/runtime/base/error_context.h"

namespace evenkeel::comm {

inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr uint8_t kNoDType = 0xff;
inline constexpr int32_t kNoRoot = -1;
// Carried for logs, may differ between ranks: the caller's send and recv are the same memory.
inline constexpr uint8_t kFlagInPlace = 1;
// Must be equal on all ranks: the two-level form over nodes.
inline constexpr uint8_t kFlagTwoLevel = 2;

// The wire format: little endian, no padding, moved as raw bytes. A peer's copy is believed only after
// ParseFingerprint or CheckFingerprint.
struct Fingerprint {
  uint32_t protocol = 0;            // kProtocol
  uint8_t operation = 0;            // Operation
  uint8_t dtype = kNoDType;         // DType
  uint8_t reduce_op = kNoReduceOp;  // ReduceOp
  uint8_t flags = 0;
  int32_t root = kNoRoot;     // broadcast: the root
  uint32_t local_status = 0;  // absl::StatusCode of the rank's own arguments: not 0 means "I refuse"
  uint64_t group = 0;         // digest of the group's axis and ranks
  int64_t epoch = 0;
  int64_t sequence = 0;
  int64_t count = 0;           // elements, as the operation defines them; 0 for all_to_all_v (its rows are checked)
  uint64_t counts_digest = 0;  // of the counts vector that must be equal on all ranks, else 0
  uint32_t deadline_ms = 0;    // rounded up
  uint32_t checksum = 0;       // of the 60 bytes before
};
inline constexpr size_t kFingerprintBytes = 64;
static_assert(sizeof(Fingerprint) == kFingerprintBytes);
inline constexpr uint32_t kProtocol = 0x314b4501;  // "EK1", layout version 1

// Fills in protocol and checksum.
Fingerprint SealFingerprint(const Fingerprint& fingerprint);

// DataLoss when the checksum is wrong; FailedPrecondition when the protocol differs (both versions in the text);
// InvalidArgument when a field is outside its enumeration.
absl::Status CheckFingerprint(const Fingerprint& fingerprint);
// The same for bytes from outside: InvalidArgument when there are not exactly 64.
absl::StatusOr<Fingerprint> ParseFingerprint(absl::Span<const uint8_t> bytes);

// "all_reduce f32 sum count 8 seq 3 epoch 1", for logs and messages.
std::string DescribeFingerprint(const Fingerprint& fingerprint);

// Why a call cannot go on, and who had what.
struct Disagreement {
  absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
  std::string what = {};                   // "element counts differ"
  std::vector<RankFinding> findings = {};  // by group rank
  friend bool operator==(const Disagreement&, const Disagreement&) = default;
};

// Compares the fingerprints of all ranks, index = group rank; nothing when they agree. Order: damaged records, ranks
// that refuse, then group, epoch, operation, sequence, dtype, operator, root, flags, counts, deadline: the first field
// that differs is reported with what each rank has. Pure, so every rank finds the same.
std::optional<Disagreement> FindDisagreement(absl::Span<const Fingerprint> fingerprints);

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_FINGERPRINT_H_
