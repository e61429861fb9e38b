#include "evenkeel/zero3/replica_check.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::zero3 {
namespace {

uint64_t DigestOf(const ConstTensorView& view) { return Digest64(view.raw(), static_cast<size_t>(view.num_bytes())); }

// Digests of all ranks for one entry: who is not with the most.
std::vector<RankFinding> OddRanks(absl::Span<const uint64_t> digests) {
  uint64_t common = digests[0];
  int64_t most = 0;
  for (uint64_t candidate : digests) {
    const int64_t votes = std::count(digests.begin(), digests.end(), candidate);
    if (votes > most) {
      most = votes;
      common = candidate;
    }
  }
  std::vector<RankFinding> odd;
  for (size_t r = 0; r < digests.size(); ++r) {
    if (digests[r] == common) continue;
    odd.push_back(
        {static_cast<int>(r), absl::StrCat("has digest ", absl::Hex(digests[r]), ", most have ", absl::Hex(common))});
  }
  return odd;
}

}  // namespace

ReplicaCheck::ReplicaCheck(std::vector<Unit*> units, const ModelGroups& groups, Device* device, Stream* compute,
                           Stream* comm)
    : units_(std::move(units)), groups_(groups), device_(device), compute_(compute), comm_(comm) {
  Begin();
}

void ReplicaCheck::Begin() {
  taken_.assign(units_.size(), false);
  gathered_.assign(units_.size(), 0);
}

absl::Status ReplicaCheck::Add(int unit, absl::Span<const ConstTensorView> views, Stream& stream) {
  taken_[static_cast<size_t>(unit)] = true;
  return stream.Launch([this, unit, copies = std::vector<ConstTensorView>(views.begin(), views.end())] {
    uint64_t digest = 0;
    for (const ConstTensorView& view : copies) digest = CombineDigests(digest, DigestOf(view));
    gathered_[static_cast<size_t>(unit)] = digest;
    return absl::OkStatus();
  });
}

// Which units were gathered in a step is the same on all ranks; the others compare as zero.
std::vector<ReplicaCheck::Entry> ReplicaCheck::UnitEntries(Family family) const {
  std::vector<Entry> entries;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = *units_[u];
    if (unit.members().family != family || unit.group() == nullptr) continue;
    entries.push_back({unit.name(), unit.layout().replicated ? DigestOf(unit.weight_shard()) : gathered_[u]});
  }
  return entries;
}

// This rank's elements of every TP-replicated parameter: lanes of one replica own the same ones.
std::vector<ReplicaCheck::Entry> ReplicaCheck::LaneEntries() const {
  std::vector<Entry> entries;
  for (const Unit* unit : units_) {
    for (size_t p = 0; p < unit->specs().size(); ++p) {
      const ParameterSpec& spec = unit->specs()[p];
      if (!spec.tp_replicated) continue;
      Entry entry{spec.name, 0};
      for (const ShardFragment& f : unit->fragments()) {
        if (f.parameter != static_cast<int>(p)) continue;
        entry.digest = CombineDigests(entry.digest, DigestOf(unit->Weights(f.weight_offset, spec.dtype, f.count)));
      }
      entries.push_back(std::move(entry));
    }
  }
  return entries;
}

absl::Status ReplicaCheck::CompareOver(comm::Communicator* group, const std::vector<Entry>& entries, Stream& stream,
                                       absl::Status* found) {
  if (group == nullptr || group->size() == 1 || entries.empty()) return absl::OkStatus();
  const int64_t count = static_cast<int64_t>(entries.size());
  std::vector<uint64_t> all(entries.size() * static_cast<size_t>(group->size()));
  EK_ASSIGN_OR_RETURN(Buffer own, device_->Allocate(count * 8));
  EK_ASSIGN_OR_RETURN(Buffer gathered, device_->Allocate(count * 8 * group->size()));
  std::vector<uint64_t> mine;
  for (const Entry& entry : entries) mine.push_back(entry.digest);
  EK_RETURN_IF_ERROR(stream.Copy(own.data(), mine.data(), count * 8));
  EK_RETURN_IF_ERROR(group->AllGather(TensorView(own.data(), DType::kI64, Shape({count})),
                                      TensorView(gathered.data(), DType::kI64, Shape({count * group->size()})),
                                      stream));
  EK_RETURN_IF_ERROR(stream.Copy(all.data(), gathered.data(), gathered.bytes()));
  EK_RETURN_IF_ERROR(stream.Synchronize());
  for (size_t e = 0; e < entries.size(); ++e) {
    std::vector<uint64_t> digests;
    for (int r = 0; r < group->size(); ++r) digests.push_back(all[static_cast<size_t>(r) * entries.size() + e]);
    ErrorContext where;
    where.findings = OddRanks(digests);
    if (where.findings.empty() || !found->ok()) continue;
    where.module = "zero3";
    where.operation = "compare replicas";
    where.group = group->group().name;
    where.rank = group->rank();
    where.size = group->size();
    where.next_step = "the step was not taken; restart from the last checkpoint";
    *found = MakeError(absl::StatusCode::kDataLoss, where, absl::StrCat("copies of ", entries[e].name, " differ"));
  }
  return absl::OkStatus();
}

absl::Status ReplicaCheck::Compare(absl::Status* found) {
  *found = absl::OkStatus();
  EK_RETURN_IF_ERROR(CompareOver(groups_.dp, UnitEntries(Family::kDense), *comm_, found));
  EK_RETURN_IF_ERROR(CompareOver(groups_.edp, UnitEntries(Family::kExpert), *comm_, found));
  return CompareOver(groups_.tp, LaneEntries(), *compute_, found);
}

}  // namespace evenkeel::zero3
