// The conformance cases of grouped calls.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_calls.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr Operation kCollectives[] = {Operation::kAllReduce,     Operation::kAllGather,      Operation::kAllGatherV,
                                      Operation::kReduceScatter, Operation::kReduceScatterV, Operation::kAllToAll,
                                      Operation::kAllToAllV,     Operation::kBroadcast};

using Specs = std::vector<CallSpec>;

// The calls of one rank with their buffers, which hold the same each time.
class Calls {
 public:
  Calls(const Specs& specs, int size, int rank) {
    for (size_t i = 0; i < specs.size(); ++i) {
      buffers_.push_back(std::make_unique<CallBuffers>(specs[i], size, rank));
      CallBuffers& b = *buffers_.back();
      const DType dtype = specs[i].dtype;
      b.send.Write(UniqueData(dtype, rank, 31 + 2 * i, b.send.bytes() / SizeOf(dtype)));
      b.recv.Write(UniqueData(dtype, rank, 32 + 2 * i, b.recv.bytes() / SizeOf(dtype)));
      b.send.Remember();
      b.recv.Remember();
      calls_.push_back(MakeCall(specs[i], size, rank, &b));
    }
  }

  const std::vector<GroupedCall>& calls() const { return calls_; }

  absl::Status CheckSame(const Specs& specs, Calls& other) {
    for (size_t i = 0; i < calls_.size(); ++i) {
      const std::string what = absl::StrCat("call ", i, " (", OperationName(specs[i].operation), " ",
                                            DTypeName(specs[i].dtype), " n=", specs[i].n, "): ");
      for (auto buffer : {&CallBuffers::send, &CallBuffers::recv}) {
        GuardedBuffer& mine = (*buffers_[i]).*buffer;
        GuardedBuffer& theirs = (*other.buffers_[i]).*buffer;
        EK_RETURN_IF_ERROR(mine.CheckData(what, specs[i].dtype, absl::MakeConstSpan(theirs.data(), theirs.bytes())));
        EK_RETURN_IF_ERROR(mine.CheckGuards(what));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckUntouched() const {
    for (const auto& buffers : buffers_) EK_RETURN_IF_ERROR(buffers->CheckUntouched());
    return absl::OkStatus();
  }

 private:
  std::vector<std::unique_ptr<CallBuffers>> buffers_;
  std::vector<GroupedCall> calls_;
};

// Up to 12 calls of any kind; extents below, around and above what is packed.
Specs RandomSpecs(uint64_t seed, int size, int64_t large) {
  const PhiloxStream random(PhiloxKey(seed).Add("grouped calls"));
  uint64_t at = 0;
  const auto below = [&random, &at](int64_t n) { return static_cast<int64_t>(random.Below(at++, n)); };
  Specs specs(below(13));
  for (CallSpec& spec : specs) {
    spec.operation = kCollectives[below(std::size(kCollectives))];
    spec.dtype = kAllDTypes[below(std::size(kAllDTypes))];
    do {
      spec.reduce = kAllReduceOps[below(std::size(kAllReduceOps))];
    } while (!CheckReduction(spec.dtype, spec.reduce).ok());
    const int64_t packed = 4096 / SizeOf(spec.dtype);
    const int64_t extents[] = {0, 1, 7, 257, packed, packed + 1, 2 * packed + 1, below(8) == 0 ? large : 31};
    spec.n = extents[below(std::size(extents))];
    spec.root = static_cast<int>(below(size));
    spec.mixture = below(4);
    const bool moves_apart = spec.operation == Operation::kAllToAll || spec.operation == Operation::kAllToAllV ||
                             spec.operation == Operation::kBroadcast;
    spec.in_place = !moves_apart && below(2) == 0;
  }
  return specs;
}

int64_t Messages(const LedgerCounts& counts) {
  int64_t messages = 0;
  for (const LedgerEntry& entry : counts.sent[static_cast<int>(Axis::kWorld)]) messages += entry.messages_sent;
  return messages;
}

// Same bits and same bytes as the calls made one by one, in at most as many messages.
absl::Status SameAsOneByOne(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const Specs specs = RandomSpecs(seed, group->size(), options.large);
    Calls grouped(specs, group->size(), group->rank()), single(specs, group->size(), group->rank());
    FreshStream stream(options);
    const LedgerCounts start = backend.ledger().Snapshot();
    for (const GroupedCall& call : single.calls()) {
      EK_RETURN_IF_ERROR(stream.Await(RunOne(call, *group, *stream)));
    }
    const LedgerCounts middle = backend.ledger().Snapshot();
    EK_RETURN_IF_ERROR(stream.Await(group->RunGrouped(grouped.calls(), *stream)));
    const LedgerCounts by_one = middle - start, by_group = backend.ledger().Snapshot() - middle;
    const absl::Status same = grouped.CheckSame(specs, single);
    if (!same.ok()) return absl::InternalError(absl::StrCat("seed ", seed, ": ", same.message()));
    if (by_group.bytes(Axis::kWorld) != by_one.bytes(Axis::kWorld) || by_group.collectives != by_one.collectives ||
        Messages(by_group) > Messages(by_one)) {
      return absl::InternalError(absl::StrCat("seed ", seed, ": grouped ", by_group.bytes(Axis::kWorld), " bytes in ",
                                              Messages(by_group), " messages, one by one ", by_one.bytes(Axis::kWorld),
                                              " in ", Messages(by_one)));
    }
  }
  return absl::OkStatus();
}

Specs UsualSpecs() {
  return {{.operation = Operation::kAllReduce, .n = 16},
          {.operation = Operation::kAllToAllV, .dtype = DType::kI32, .matrix_seed = 5},
          {.operation = Operation::kAllGather, .dtype = DType::kBF16, .n = 3000},
          {.operation = Operation::kReduceScatterV, .n = 40, .mixture = 1},
          {.operation = Operation::kBroadcast, .n = 5}};
}

struct Difference {
  std::string what = {};  // in the text of the error
  Specs theirs = UsualSpecs();
};

std::vector<Difference> Differences(int size, int odd) {
  std::vector<Difference> all;
  const auto add = [&all](std::string what) -> Specs& {
    all.push_back({.what = std::move(what)});
    return all.back().theirs;
  };
  add("call 0 of the group (all_reduce): element counts differ")[0].n = 17;
  add("call 0 of the group (all_reduce): reduction operators differ")[0].reduce = ReduceOp::kMax;
  add("call 2 of the group (all_gather): dtypes differ")[2].dtype = DType::kF16;
  add("call 4 of the group (broadcast): roots differ")[4].root = 1;
  add("operations differ")[2].operation = Operation::kAllToAll;
  add("counts vectors differ")[3].mixture = 2;
  add("the ranks group different numbers of calls; nothing was transferred").pop_back();
  CallSpec& exchange = add("call 1 of the group (all_to_all_v): send and receive counts differ")[1];
  exchange.changed_entry = size + (odd + 1) % size;
  exchange.changed_to = 13;  // more than the matrix has anywhere
  return all;
}

absl::Status ExpectNamed(Backend& backend, const ConformanceOptions& options, const Difference& difference, int odd) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  Calls calls(group->rank() == odd ? difference.theirs : UsualSpecs(), group->size(), group->rank());
  const LedgerCounts before = backend.ledger().Snapshot();
  const absl::Status status = stream.Await(group->RunGrouped(calls.calls(), *stream));
  if (status.code() != absl::StatusCode::kFailedPrecondition || !absl::StrContains(status.message(), difference.what)) {
    return Wrong(absl::StrCat("FailedPrecondition with '", difference.what, "' wanted"), status);
  }
  EK_RETURN_IF_ERROR(CheckContext(status, *group, 0, odd));
  EK_RETURN_IF_ERROR(calls.CheckUntouched());
  const LedgerCounts booked = backend.ledger().Snapshot() - before;
  if (booked.bytes(Axis::kWorld) != 0 || booked.total_collectives() != 0) {
    return absl::InternalError("payload or collectives were booked although no call was made");
  }
  return CheckBroken(options, *group);
}

absl::Status DifferencesAreNamed(Backend& backend, const ConformanceOptions& options) {
  for (int odd = 0; odd < backend.size(); ++odd) {
    for (const Difference& difference : Differences(backend.size(), odd)) {
      EK_RETURN_IF_ERROR(ExpectNamed(backend, options, difference, odd));
    }
  }
  return NextGroupWorks(backend, options);
}

// One rank's own arguments are bad in one of the calls.
absl::Status BadCallIsNamed(Backend& backend, const ConformanceOptions& options) {
  for (int odd = 0; odd < backend.size(); ++odd) {
    for (const bool overlap : {false, true}) {
      EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
      FreshStream stream(options);
      Calls good(UsualSpecs(), group->size(), group->rank());
      std::vector<GroupedCall> calls = good.calls();
      // Inside what call 2 writes.
      if (group->rank() == odd && overlap) calls[0].recv = TensorView(calls[2].recv.raw(), DType::kF32, Shape({16}));
      if (group->rank() == odd && !overlap) calls[2].recv = calls[2].recv.Rows(0, 1);
      const absl::Status status = stream.Await(group->RunGrouped(calls, *stream));
      const bool is_odd = group->rank() == odd;
      const absl::StatusCode code = is_odd ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kFailedPrecondition;
      const absl::string_view text = !is_odd   ? "refuses grouped"
                                     : overlap ? "call 0 and call 2 of the group overlap"
                                               : "call 2 of the group (all_gather): recv has 1 elements";
      if (status.code() != code || !absl::StrContains(status.message(), text)) {
        return Wrong(absl::StrCat("'", text, "' wanted"), status);
      }
      EK_RETURN_IF_ERROR(good.CheckUntouched());
      EK_RETURN_IF_ERROR(CheckBroken(options, *group));
    }
  }
  return NextGroupWorks(backend, options);
}

}  // namespace

std::vector<ConformanceCase> GroupedOperationCases(const ConformanceOptions& options) {
  return {
      {"GroupedCallsAreTheCallsOneByOne", 1, [options](Backend& backend) { return SameAsOneByOne(backend, options); }}};
}

std::vector<ConformanceCase> GroupedAgreementCases(const ConformanceOptions& options) {
  return {{"C01_GroupedCallsThatDifferAreNamed", 2,
           [options](Backend& backend) { return DifferencesAreNamed(backend, options); }},
          {"C13_BadCallOfAGroupIsNamed", 2, [options](Backend& backend) { return BadCallIsNamed(backend, options); }}};
}

}  // namespace evenkeel::comm
