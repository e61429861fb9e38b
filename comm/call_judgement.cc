#include "evenkeel/comm/call_judgement.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/count_matrix.h"

namespace evenkeel::comm {
namespace {

bool IsPairCall(const Fingerprint& f) {
  return f.operation == static_cast<uint8_t>(Operation::kSend) || f.operation == static_cast<uint8_t>(Operation::kRecv);
}

std::optional<Disagreement> JudgePair(const Agreement& agreement) {
  Fingerprint pair[2] = {agreement.fingerprints[0], agreement.fingerprints[1]};
  for (const Fingerprint& f : pair) {
    if (!CheckFingerprint(f).ok() || f.local_status != 0 || !IsPairCall(f)) return FindDisagreement(pair);
  }
  if (pair[0].operation != pair[1].operation) {
    pair[1].operation = pair[0].operation;
    pair[1] = SealFingerprint(pair[1]);
    return FindDisagreement(pair);
  }
  Disagreement found{.what = "one rank of a pair must send and the other receive"};
  for (int i = 0; i < 2; ++i) {
    found.findings.push_back({i, absl::StrCat("calls ", OperationName(static_cast<Operation>(pair[i].operation)))});
  }
  return found;
}

bool HasEqualCounts(Operation operation) {
  return operation == Operation::kAllGatherV || operation == Operation::kReduceScatterV;
}

bool AllCall(Operation operation, absl::Span<const Fingerprint> all) {
  for (const Fingerprint& f : all) {
    if (f.operation != static_cast<uint8_t>(operation) || f.local_status != 0) return false;
  }
  return true;
}

}  // namespace

std::optional<Disagreement> Judge(const CallPlan& plan, const Agreement& agreement) {
  if (!plan.members.empty()) {
    std::optional<Disagreement> odd = JudgePair(agreement);
    if (odd.has_value()) {
      for (RankFinding& finding : odd->findings) finding.rank = plan.members[finding.rank];
    }
    return odd;
  }
  const int size = static_cast<int>(agreement.fingerprints.size());
  std::optional<Disagreement> odd = FindDisagreement(agreement.fingerprints);
  if (HasEqualCounts(plan.operation) && odd.has_value() && AllCall(plan.operation, agreement.fingerprints)) {
    // The vectors themselves say more than their totals and digests, unless something else differs first.
    std::optional<Disagreement> counts = FindCountsDifference(agreement.rows, 2 * size, size);
    if (counts.has_value() && (odd->what == "element counts differ" || odd->what == "counts vectors differ")) {
      return counts;
    }
  }
  if (odd.has_value() || plan.operation != Operation::kAllToAllV) return odd;
  return FindCountMismatch(agreement.rows, size);
}

}  // namespace evenkeel::comm
