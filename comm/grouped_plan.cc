#include "evenkeel/comm/grouped_plan.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/call_judgement.h"
#include "evenkeel/comm/count_matrix.h"
#include "evenkeel/comm/grouped_overlap.h"
#include "evenkeel/comm/grouped_packing.h"
#include "evenkeel/comm/phase_plan.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

bool IsPacked(int64_t bytes) { return bytes > 0 && bytes <= kMostPackedBytes; }

CallPlan PlanOne(const GroupedCall& call, Place place) {
  switch (call.operation) {
    case Operation::kAllReduce:
      return PlanAllReduce(call.send, call.recv, call.reduce_op, place);
    case Operation::kAllGather:
      return PlanAllGather(call.send, call.recv, place);
    case Operation::kAllGatherV:
      return PlanAllGatherV(call.send, call.recv, call.counts, place);
    case Operation::kReduceScatter:
      return PlanReduceScatter(call.send, call.recv, call.reduce_op, place);
    case Operation::kReduceScatterV:
      return PlanReduceScatterV(call.send, call.recv, call.counts, call.reduce_op, place);
    case Operation::kAllToAll:
      return PlanAllToAll(call.send, call.recv, place);
    case Operation::kAllToAllV:
      return PlanAllToAllV(call.send, call.counts, call.recv, call.recv_counts, place);
    case Operation::kBroadcast:
      return PlanBroadcast(call.recv, call.root, place);
    default: {
      CallPlan plan;
      plan.operation = call.operation;
      plan.bad_argument = absl::InvalidArgumentError("cannot be grouped");
      return plan;
    }
  }
}

std::string NameOf(int index, const CallPlan& part) {
  return absl::StrCat("call ", index, " of the group (", OperationName(part.operation), ")");
}

// What all ranks must have equal in a call, but for the counts of all_to_all_v.
uint64_t DigestOf(const CallPlan& part) {
  const int64_t fields[] = {static_cast<int64_t>(part.operation),
                            part.dtype,
                            part.reduce_op,
                            part.root,
                            part.count,
                            static_cast<int64_t>(part.counts_digest),
                            part.two_level ? 1 : 0};
  return Digest64(fields, sizeof(fields));
}

void Append(std::vector<LocalStep> steps, std::vector<LocalStep>* to) {
  for (LocalStep& step : steps) to->push_back(std::move(step));
}

// A call's phases without its local steps after the last.
struct Part {
  std::vector<PhasePlan> exchanges = {};
  std::vector<LocalStep> last_steps = {};
  bool packs = false;  // small blocks are packed
  int counted = -1;    // which of GroupedCounts::parts: what blocks there are only the exchanged counts tell
  bool depends_on_counts() const { return counted >= 0; }
};

// Builds the phases of a grouped plan, level by level.
class Levels {
 public:
  Levels(Place place, CallPlan* plan) : place_(place), plan_(*plan) {}

  absl::Status Build();

 private:
  void TakeParts();
  absl::Status AddLevel(int level);
  absl::Status AddRows();
  // Whether anything of a phase is packed, and whether anything is left, on any rank; both where only the counts tell.
  struct Split {
    bool packed = false;
    bool large = false;
  };
  // Packs what is small of `phase` and leaves the rest in it.
  Split SplitPhase(const Part& part, PhasePlan* phase, GroupedPacking* packing, std::vector<LocalStep>* after);
  Split SplitReduction(PhasePlan* phase, GroupedPacking* packing);
  void Emit(PhasePlan phase);

  const Place place_;
  CallPlan& plan_;
  std::vector<Part> parts_;
  std::vector<LocalStep> before_;  // of the next exchange
};

absl::Status Levels::Build() {
  TakeParts();
  if (place_.size == 1) {
    for (Part& part : parts_) {
      for (PhasePlan& phase : part.exchanges) plan_.phases.push_back(std::move(phase));
    }
    return absl::OkStatus();
  }
  if (plan_.grouped_counts.has_value()) EK_RETURN_IF_ERROR(AddRows());
  int num_levels = 0;
  for (const Part& part : parts_) num_levels = std::max(num_levels, static_cast<int>(part.exchanges.size()));
  for (int level = 0; level < num_levels; ++level) EK_RETURN_IF_ERROR(AddLevel(level));
  if (before_.empty()) return absl::OkStatus();
  PhasePlan last = EmptyPhase(place_.size);
  last.is_local = true;
  Emit(std::move(last));
  return absl::OkStatus();
}

void Levels::TakeParts() {
  for (size_t i = 0; i < plan_.parts.size(); ++i) {
    CallPlan& from = plan_.parts[i];
    Part part{.packs = !from.two_level};
    if (from.operation == Operation::kAllToAllV && place_.size > 1) {
      if (!plan_.grouped_counts.has_value()) plan_.grouped_counts.emplace();
      part.counted = static_cast<int>(plan_.grouped_counts->parts.size());
      plan_.grouped_counts->parts.push_back(static_cast<int>(i));
      plan_.grouped_counts->own_phases.push_back(-1);
    }
    for (PhasePlan& phase : from.phases) {
      Append(std::move(phase.before), &part.last_steps);
      if (phase.is_local) continue;
      phase.before = std::exchange(part.last_steps, {});
      part.exchanges.push_back(std::move(phase));
    }
    from.phases.clear();
    for (ScratchBlock& block : from.scratch) plan_.scratch.push_back(std::move(block));
    from.scratch.clear();
    parts_.push_back(std::move(part));
  }
}

absl::Status Levels::AddLevel(int level) {
  GroupedPacking packing(place_);
  std::vector<LocalStep> after;
  bool packed_for_sure = false, packed_perhaps = false;
  std::vector<PhasePlan> large;
  std::vector<int> large_counted;  // Part::counted of each
  for (Part& part : parts_) {
    if (level >= static_cast<int>(part.exchanges.size())) continue;
    PhasePlan phase = std::move(part.exchanges[level]);
    Append(std::move(phase.before), &before_);
    const Split split = part.packs ? SplitPhase(part, &phase, &packing, &after) : Split{.large = true};
    (part.depends_on_counts() ? packed_perhaps : packed_for_sure) |= split.packed;
    if (split.large) {
      large.push_back(std::move(phase));
      large_counted.push_back(part.counted);
    }
    if (level + 1 == static_cast<int>(part.exchanges.size())) Append(std::move(part.last_steps), &after);
  }
  EK_ASSIGN_OR_RETURN(PhasePlan packed, packing.Finish(&before_, &after, &plan_));
  if (packed_for_sure || packed_perhaps) {
    if (!packed_for_sure) plan_.grouped_counts->packed_phase = static_cast<int>(plan_.phases.size());
    Emit(std::move(packed));
  }
  for (size_t i = 0; i < large.size(); ++i) {
    if (large_counted[i] >= 0) {
      plan_.grouped_counts->own_phases[large_counted[i]] = static_cast<int>(plan_.phases.size());
    }
    Emit(std::move(large[i]));
  }
  // Nothing is stored before the ranks have agreed: not by what runs before the first exchange.
  Append(std::move(after), &before_);
  return absl::OkStatus();
}

// The phase that brings everybody's counts.
absl::Status Levels::AddRows() {
  GroupedPacking packing(place_);
  GroupedCounts& counts = *plan_.grouped_counts;
  for (const int part : counts.parts) {
    const std::vector<int64_t>& row = plan_.parts[part].row;
    const auto bytes = static_cast<int64_t>(row.size() * sizeof(int64_t));
    for (int r = 0; r < place_.size; ++r) {
      if (r == place_.rank) continue;
      packing.Send(r, row.data(), bytes);
      packing.Receive(r, nullptr, bytes);
    }
  }
  std::vector<LocalStep> after;
  EK_ASSIGN_OR_RETURN(PhasePlan rows, packing.Finish(&before_, &after, &plan_));
  for (int r = 0; r < place_.size; ++r) counts.rows_of.push_back(packing.ReceivedFrom(r));
  rows.is_control = true;
  Emit(std::move(rows));
  return absl::OkStatus();
}

Levels::Split Levels::SplitPhase(const Part& part, PhasePlan* phase, GroupedPacking* packing,
                                 std::vector<LocalStep>* after) {
  if (phase->reduces) return SplitReduction(phase, packing);
  Split split;
  for (int r = 0; r < place_.size; ++r) {
    SendSpan& send = phase->sends[r];
    ReceiveSpan& receive = phase->receives[r];
    for (const int64_t bytes : {send.bytes, receive.bytes}) {
      split.packed |= IsPacked(bytes);
      split.large |= bytes > kMostPackedBytes;
    }
    if (r == place_.rank) continue;
    if (IsPacked(send.bytes)) packing->Send(r, send.data, std::exchange(send.bytes, 0));
    if (IsPacked(receive.bytes)) packing->Receive(r, receive.data, std::exchange(receive.bytes, 0));
  }
  if (part.depends_on_counts()) split = {.packed = true, .large = true};
  // The own block is copied with the large ones, where it is known that there are some.
  if (part.depends_on_counts() || !split.large) {
    const SendSpan own = std::exchange(phase->sends[place_.rank], {});
    const ReceiveSpan to = std::exchange(phase->receives[place_.rank], {});
    AddCopy(to.data, own.data, own.bytes, after);
  }
  return split;
}

Levels::Split Levels::SplitReduction(PhasePlan* phase, GroupedPacking* packing) {
  Split split;
  for (const SendSpan& send : phase->sends) {
    split.packed |= IsPacked(send.bytes);
    split.large |= send.bytes > kMostPackedBytes;
  }
  const bool own_is_packed = IsPacked(phase->block_bytes);
  if (own_is_packed) packing->Combine(*phase);
  for (int r = 0; r < place_.size; ++r) {
    if (own_is_packed) phase->receives[r].bytes = 0;
    if (r == place_.rank || !IsPacked(phase->sends[r].bytes)) continue;
    packing->Send(r, phase->sends[r].data, std::exchange(phase->sends[r].bytes, 0));
  }
  if (own_is_packed) {
    phase->block_bytes = 0;
    phase->sends[place_.rank].bytes = 0;
  }
  return split;
}

void Levels::Emit(PhasePlan phase) {
  phase.before = std::exchange(before_, {});
  plan_.phases.push_back(std::move(phase));
}

absl::Status Fill(absl::Span<const GroupedCall> calls, Place place, CallPlan* plan) {
  for (size_t i = 0; i < plan->parts.size(); ++i) {
    const absl::Status& bad = plan->parts[i].bad_argument;
    if (!bad.ok()) {
      return absl::Status(bad.code(), absl::StrCat(NameOf(static_cast<int>(i), plan->parts[i]), ": ", bad.message()));
    }
  }
  EK_RETURN_IF_ERROR(CheckApart(calls));
  return Levels(place, plan).Build();
}

// Row `part` (of the grouped all_to_all_v) of every rank, one after the other: what FindCountMismatch wants.
std::vector<int64_t> RowsOf(const CallPlan& plan, size_t index, Place place) {
  const auto row_length = 2 * static_cast<size_t>(place.size);
  std::vector<int64_t> rows(place.size * row_length);
  for (int r = 0; r < place.size; ++r) {
    int64_t* const row = rows.data() + r * row_length;
    if (r == place.rank) {
      const std::vector<int64_t>& own = plan.parts[plan.grouped_counts->parts[index]].row;
      std::copy(own.begin(), own.end(), row);
    } else {
      std::memcpy(row, plan.grouped_counts->rows_of[r] + index * row_length * sizeof(int64_t),
                  row_length * sizeof(int64_t));
    }
  }
  return rows;
}

Disagreement Named(int index, const CallPlan& part, Disagreement found) {
  found.what = absl::StrCat(NameOf(index, part), ": ", found.what);
  return found;
}

}  // namespace

CallPlan PlanGrouped(absl::Span<const GroupedCall> calls, Place place) {
  CallPlan plan;
  plan.operation = Operation::kGrouped;
  plan.count = static_cast<int64_t>(calls.size());
  for (const GroupedCall& call : calls) {
    plan.parts.push_back(PlanOne(call, place));
    plan.counts_digest = CombineDigests(plan.counts_digest, DigestOf(plan.parts.back()));
    plan.two_level = plan.two_level || plan.parts.back().two_level;
  }
  plan.bad_argument = Fill(calls, place, &plan);
  if (plan.bad_argument.ok()) return plan;
  plan.phases.clear();
  plan.scratch.clear();
  plan.grouped_counts.reset();
  return plan;
}

bool DifferOnlyInside(const Agreement& agreement) {
  std::vector<Fingerprint> all(agreement.fingerprints.begin(), agreement.fingerprints.end());
  for (Fingerprint& f : all) {
    if (!CheckFingerprint(f).ok() || f.operation != static_cast<uint8_t>(Operation::kGrouped)) return false;
    f.count = 0;
    f.counts_digest = 0;
    // Which form a call takes is part of its own fingerprint.
    f.flags = 0;
    f = SealFingerprint(f);
  }
  return !FindDisagreement(all).has_value();
}

absl::StatusOr<Disagreement> FindGroupedDifference(
    const CallPlan& plan, const Agreement& agreement,
    absl::FunctionRef<absl::Status(const CallPlan& part, Agreement* agreement)> agree) {
  Disagreement lengths{.what = "the ranks group different numbers of calls; nothing was transferred"};
  int64_t shortest = plan.count;
  for (size_t r = 0; r < agreement.fingerprints.size(); ++r) {
    const int64_t length = agreement.fingerprints[r].count;
    shortest = std::min(shortest, length);
    lengths.findings.push_back({static_cast<int>(r), absl::StrCat("groups ", length, " calls")});
  }
  for (int64_t i = 0; i < shortest; ++i) {
    const CallPlan& part = plan.parts[i];
    Agreement one;
    EK_RETURN_IF_ERROR(agree(part, &one));
    std::optional<Disagreement> odd = Judge(part, one);
    if (odd.has_value()) return Named(static_cast<int>(i), part, *std::move(odd));
  }
  return lengths;
}

std::optional<Disagreement> JudgeGroupedCounts(Place place, CallPlan* plan) {
  GroupedCounts& counts = *plan->grouped_counts;
  bool any_packed = false;
  std::vector<bool> has_large(counts.parts.size(), false);
  for (size_t i = 0; i < counts.parts.size(); ++i) {
    const CallPlan& part = plan->parts[counts.parts[i]];
    const std::vector<int64_t> rows = RowsOf(*plan, i, place);
    std::optional<Disagreement> odd = FindCountMismatch(rows, place.size);
    if (odd.has_value()) return Named(counts.parts[i], part, *std::move(odd));
    const int64_t most_packed = kMostPackedBytes / SizeOf(static_cast<DType>(part.dtype));  // elements
    for (int from = 0; from < place.size; ++from) {
      for (int to = 0; to < place.size; ++to) {
        const int64_t count = rows[static_cast<size_t>(from) * 2 * place.size + to];
        if (from != to && count > most_packed) has_large[i] = true;
        if (from != to && count > 0 && count <= most_packed && !part.two_level) any_packed = true;
      }
    }
  }
  if (counts.packed_phase >= 0) plan->phases[counts.packed_phase].is_local = !any_packed;
  for (size_t i = 0; i < counts.parts.size(); ++i) {
    if (counts.own_phases[i] >= 0) plan->phases[counts.own_phases[i]].is_local = !has_large[i];
  }
  return std::nullopt;
}

absl::Status CompleteGroupedPlan(Place place, CallPlan* plan) {
  const GroupedCounts& counts = *plan->grouped_counts;
  for (size_t i = 0; i < counts.parts.size(); ++i) {
    CallPlan& part = plan->parts[counts.parts[i]];
    if (!part.needs_completion()) continue;
    const std::vector<int64_t> rows = RowsOf(*plan, i, place);
    EK_RETURN_IF_ERROR(CompletePlan({.rows = rows}, place, &part));
    for (PhasePlan& phase : part.phases) plan->phases.push_back(std::move(phase));
    part.phases.clear();
    for (ScratchBlock& block : part.scratch) plan->scratch.push_back(std::move(block));
    part.scratch.clear();
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::comm
