#include "evenkeel/comm/fingerprint.h"

#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/reduce_op.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::comm {
namespace {

constexpr int kNumDTypes = 7;
constexpr int kNumReduceOps = 5;
// Above this many ranks only the odd ones and one of the majority are listed.
constexpr int kMaxListedRanks = 8;

uint32_t Checksum(const Fingerprint& fingerprint) {
  return static_cast<uint32_t>(Digest64(&fingerprint, kFingerprintBytes - sizeof(uint32_t)));
}

std::string DTypeText(uint8_t dtype) {
  return dtype == kNoDType ? "none" : std::string(DTypeName(static_cast<DType>(dtype)));
}

std::string ReduceOpText(uint8_t op) {
  return op == kNoReduceOp ? "none" : std::string(ReduceOpName(static_cast<ReduceOp>(op)));
}

// One comparable field: its value as a number, and what to say about it.
struct Field {
  const char* what;
  uint64_t (*value)(const Fingerprint&);
  std::string (*had)(const Fingerprint&);
};

constexpr uint8_t kComparedFlags = kFlagTwoLevel;

const Field kFields[] = {
    {"groups differ", [](const Fingerprint& f) { return f.group; },
     [](const Fingerprint& f) { return absl::StrFormat("is in group %016x", f.group); }},
    {"epochs differ", [](const Fingerprint& f) { return static_cast<uint64_t>(f.epoch); },
     [](const Fingerprint& f) { return absl::StrCat("is in epoch ", f.epoch); }},
    {"operations differ", [](const Fingerprint& f) { return uint64_t{f.operation}; },
     [](const Fingerprint& f) { return absl::StrCat("calls ", OperationName(static_cast<Operation>(f.operation))); }},
    {"sequence numbers differ", [](const Fingerprint& f) { return static_cast<uint64_t>(f.sequence); },
     [](const Fingerprint& f) { return absl::StrCat("is at sequence ", f.sequence); }},
    {"dtypes differ", [](const Fingerprint& f) { return uint64_t{f.dtype}; },
     [](const Fingerprint& f) { return absl::StrCat("has dtype ", DTypeText(f.dtype)); }},
    {"reduction operators differ", [](const Fingerprint& f) { return uint64_t{f.reduce_op}; },
     [](const Fingerprint& f) { return absl::StrCat("has operator ", ReduceOpText(f.reduce_op)); }},
    {"roots differ", [](const Fingerprint& f) { return static_cast<uint64_t>(f.root); },
     [](const Fingerprint& f) { return absl::StrCat("has root ", f.root); }},
    {"forms differ", [](const Fingerprint& f) { return static_cast<uint64_t>(f.flags & kComparedFlags); },
     [](const Fingerprint& f) {
       return std::string((f.flags & kFlagTwoLevel) != 0 ? "uses the two-level form" : "uses the direct form");
     }},
    {"element counts differ", [](const Fingerprint& f) { return static_cast<uint64_t>(f.count); },
     [](const Fingerprint& f) { return absl::StrCat("has count ", f.count); }},
    {"counts vectors differ", [](const Fingerprint& f) { return f.counts_digest; },
     [](const Fingerprint& f) { return absl::StrFormat("has counts with digest %016x", f.counts_digest); }},
    {"deadlines differ", [](const Fingerprint& f) { return uint64_t{f.deadline_ms}; },
     [](const Fingerprint& f) { return absl::StrCat("has a deadline of ", f.deadline_ms, " ms"); }},
};

// All ranks, or in large groups those that are not of the majority, and the majority's first.
std::vector<RankFinding> ListOdd(absl::Span<const Fingerprint> all, const Field& field) {
  std::map<uint64_t, int> votes;
  for (const Fingerprint& f : all) ++votes[field.value(f)];
  uint64_t majority = field.value(all[0]);
  for (const auto& [value, count] : votes) {
    if (count > votes[majority]) majority = value;
  }
  const bool list_all = all.size() <= kMaxListedRanks;
  bool majority_listed = false;
  std::vector<RankFinding> findings;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const bool odd = field.value(all[rank]) != majority;
    if (!list_all && !odd && majority_listed) continue;
    majority_listed = majority_listed || !odd;
    findings.push_back({static_cast<int>(rank), field.had(all[rank])});
  }
  return findings;
}

// The common case in one comparison a rank.
bool AllSame(absl::Span<const Fingerprint> all) {
  for (const Fingerprint& f : all) {
    if (std::memcmp(&f, &all[0], kFingerprintBytes) != 0) return false;
  }
  return true;
}

std::optional<Disagreement> FindDamaged(absl::Span<const Fingerprint> all) {
  Disagreement found;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::Status status = CheckFingerprint(all[rank]);
    if (status.ok()) continue;
    if (found.findings.empty()) {
      found.code = status.code() == absl::StatusCode::kDataLoss ? status.code() : absl::StatusCode::kFailedPrecondition;
      found.what = "a fingerprint cannot be read";
    }
    found.findings.push_back({static_cast<int>(rank), absl::StrCat("sent: ", status.message())});
  }
  if (found.findings.empty()) return std::nullopt;
  return found;
}

std::optional<Disagreement> FindRefusals(absl::Span<const Fingerprint> all) {
  Disagreement found{.what = "a rank refuses the call because its own arguments are bad"};
  bool only_memory = true;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Fingerprint& f = all[rank];
    if (f.local_status == 0) continue;
    only_memory = only_memory && f.local_status == static_cast<uint32_t>(absl::StatusCode::kResourceExhausted);
    const auto code = static_cast<absl::StatusCode>(f.local_status);
    found.findings.push_back(
        {static_cast<int>(rank), absl::StrCat("refuses ", OperationName(static_cast<Operation>(f.operation)), ": ",
                                              absl::StatusCodeToString(code))});
  }
  if (found.findings.empty()) return std::nullopt;
  if (only_memory) {
    found.code = absl::StatusCode::kResourceExhausted;
    found.what = "a rank has no memory for the call";
  }
  return found;
}

}  // namespace

Fingerprint SealFingerprint(const Fingerprint& fingerprint) {
  Fingerprint sealed = fingerprint;
  sealed.protocol = kProtocol;
  sealed.checksum = Checksum(sealed);
  return sealed;
}

absl::Status CheckFingerprint(const Fingerprint& f) {
  if (f.protocol != kProtocol) {
    return absl::FailedPreconditionError(
        absl::StrFormat("protocol %08x, this build speaks %08x", f.protocol, kProtocol));
  }
  if (f.checksum != Checksum(f)) {
    return absl::DataLossError(absl::StrFormat("fingerprint checksum %08x, computed %08x", f.checksum, Checksum(f)));
  }
  if (f.operation >= kNumOperations) {
    return absl::InvalidArgumentError(absl::StrCat("unknown operation ", f.operation));
  }
  if (f.dtype != kNoDType && f.dtype >= kNumDTypes) {
    return absl::InvalidArgumentError(absl::StrCat("unknown dtype ", f.dtype));
  }
  if (f.reduce_op != kNoReduceOp && f.reduce_op >= kNumReduceOps) {
    return absl::InvalidArgumentError(absl::StrCat("unknown reduction operator ", f.reduce_op));
  }
  if (f.count < 0) return absl::InvalidArgumentError(absl::StrCat("negative count ", f.count));
  return absl::OkStatus();
}

absl::StatusOr<Fingerprint> ParseFingerprint(absl::Span<const uint8_t> bytes) {
  if (bytes.size() != kFingerprintBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a fingerprint has ", kFingerprintBytes, " bytes, not ", bytes.size()));
  }
  Fingerprint fingerprint;
  std::memcpy(&fingerprint, bytes.data(), kFingerprintBytes);
  const absl::Status status = CheckFingerprint(fingerprint);
  if (!status.ok()) return status;
  return fingerprint;
}

std::string DescribeFingerprint(const Fingerprint& f) {
  std::string text = f.operation < kNumOperations ? std::string(OperationName(static_cast<Operation>(f.operation)))
                                                  : absl::StrCat("operation ", f.operation);
  if (f.dtype < kNumDTypes) absl::StrAppend(&text, " ", DTypeText(f.dtype));
  if (f.reduce_op < kNumReduceOps) absl::StrAppend(&text, " ", ReduceOpText(f.reduce_op));
  if (f.root != kNoRoot) absl::StrAppend(&text, " root ", f.root);
  absl::StrAppend(&text, " count ", f.count, " seq ", f.sequence, " epoch ", f.epoch);
  return text;
}

std::optional<Disagreement> FindDisagreement(absl::Span<const Fingerprint> all) {
  if (AllSame(all) && all[0].local_status == 0 && CheckFingerprint(all[0]).ok()) return std::nullopt;
  if (auto damaged = FindDamaged(all)) return damaged;
  if (auto refusals = FindRefusals(all)) return refusals;
  for (const Field& field : kFields) {
    for (const Fingerprint& f : all) {
      if (field.value(f) == field.value(all[0])) continue;
      return Disagreement{.what = field.what, .findings = ListOdd(all, field)};
    }
  }
  return std::nullopt;
}

}  // namespace evenkeel::comm
