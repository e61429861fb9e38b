// The conformance cases in which ranks disagree.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_calls.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr Operation kCollectives[] = {Operation::kAllReduce,     Operation::kAllGather,      Operation::kAllGatherV,
                                      Operation::kReduceScatter, Operation::kReduceScatterV, Operation::kAllToAll,
                                      Operation::kAllToAllV,     Operation::kBroadcast,      Operation::kBarrier,
                                      Operation::kGrouped};
// How many ranks an error lists one by one (fingerprint.h).
constexpr int kAllListed = 8;

// What an error must say: all ranks are listed with what each had.
struct Expected {
  std::string what = {};
  std::string usual_had = {};
  std::string odd_had = {};
  std::vector<RankFinding> findings = {};  // or exactly these, where only some ranks are at odds
};

absl::Status CheckFindings(const absl::Status& status, const Expected& expected, int size, int odd) {
  const std::vector<RankFinding> findings = GetErrorContext(status)->findings;
  if (!expected.findings.empty()) {
    return findings == expected.findings ? absl::OkStatus() : Wrong("other findings wanted", status);
  }
  if (size > kAllListed) return absl::OkStatus();
  if (static_cast<int>(findings.size()) != size) return Wrong("not all ranks are listed", status);
  for (int rank = 0; rank < size; ++rank) {
    const std::string& had = rank == odd ? expected.odd_had : expected.usual_had;
    if (findings[rank].rank != rank || findings[rank].had != had) {
      return Wrong(absl::StrCat("'rank ", rank, " ", had, "' wanted"), status);
    }
  }
  return absl::OkStatus();
}

// One call in which rank `odd` does `theirs` and the others `usual`, in a group that is newer than epoch `*epoch`,
// which becomes its own.
absl::Status ExpectDisagreement(Backend& backend, const ConformanceOptions& options, const CallSpec& usual,
                                const CallSpec& theirs, int odd, const Expected& expected, int64_t* epoch) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  if (group->epoch() <= *epoch) return absl::InternalError("the group after a broken one has no new epoch");
  *epoch = group->epoch();
  FreshStream stream(options);
  EK_RETURN_IF_ERROR(group->Barrier(*stream));
  const CallSpec& spec = group->rank() == odd ? theirs : usual;
  CallBuffers buffers(spec, group->size(), group->rank());
  const LedgerCounts before = backend.ledger().Snapshot();
  const absl::Status status = stream.Await(IssueCall(spec, *group, *stream, &buffers));
  const std::string what = absl::StrCat(expected.what, "; nothing was transferred");
  if (status.code() != absl::StatusCode::kFailedPrecondition || !absl::StrContains(status.message(), what)) {
    return Wrong(absl::StrCat("FailedPrecondition with '", what, "' wanted"), status);
  }
  EK_RETURN_IF_ERROR(CheckContext(status, *group, 1, odd));
  EK_RETURN_IF_ERROR(CheckFindings(status, expected, group->size(), odd));
  EK_RETURN_IF_ERROR(buffers.CheckUntouched());
  if ((backend.ledger().Snapshot() - before).bytes(Axis::kWorld) != 0) {
    return absl::InternalError("payload was booked although nothing was transferred");
  }
  return CheckBroken(options, *group);
}

// Every rank is the odd one once.
absl::Status RotateOdd(Backend& backend, const ConformanceOptions& options, const CallSpec& usual,
                       const CallSpec& theirs, const Expected& expected) {
  int64_t epoch = -1;
  for (int odd = 0; odd < backend.size(); ++odd) {
    const absl::Status status = ExpectDisagreement(backend, options, usual, theirs, odd, expected, &epoch);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(OperationName(usual.operation), " against ", OperationName(theirs.operation),
                                       ", odd rank ", odd, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

// Counts from 1 to a million; the odd rank has one more, or none.
absl::Status CountsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const Operation operation : {Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter,
                                    Operation::kAllToAll, Operation::kBroadcast}) {
    for (const int64_t n : {int64_t{1}, int64_t{1000}, options.large, int64_t{1'000'000}}) {
      if (n > options.large && (backend.size() > 4 || operation == Operation::kAllToAll)) continue;
      const CallSpec usual{.operation = operation, .dtype = n > options.large ? DType::kU8 : DType::kF32, .n = n};
      for (const int64_t odd_n : {n + 1, int64_t{0}}) {
        if (n > options.large && odd_n == 0) continue;
        CallSpec theirs = usual;
        theirs.n = odd_n;
        const int64_t blocks = operation == Operation::kAllToAll ? backend.size() : 1;  // its count is of all blocks
        EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                     {.what = "element counts differ",
                                      .usual_had = absl::StrCat("has count ", n * blocks),
                                      .odd_had = absl::StrCat("has count ", odd_n * blocks)}));
      }
    }
  }
  for (const Operation operation : {Operation::kAllGatherV, Operation::kReduceScatterV}) {
    for (int entry = 0; entry < backend.size(); ++entry) {
      const CallSpec usual{.operation = operation};
      CallSpec theirs = usual;
      theirs.changed_entry = entry;
      theirs.changed_to = 13;
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                   {.what = absl::StrCat("counts vectors differ at index ", entry),
                                    .usual_had = absl::StrCat("has counts[", entry, "] = 16"),
                                    .odd_had = absl::StrCat("has counts[", entry, "] = 13")}));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status DTypesDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const DType a : kAllDTypes) {
    for (const DType b : kAllDTypes) {
      if (a == b) continue;
      const CallSpec usual{.dtype = a};
      const CallSpec theirs{.dtype = b};
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                   {.what = "dtypes differ",
                                    .usual_had = absl::StrCat("has dtype ", DTypeName(a)),
                                    .odd_had = absl::StrCat("has dtype ", DTypeName(b))}));
    }
  }
  return NextGroupWorks(backend, options);
}

// All pairs of operators that some dtype offers both of.
absl::Status OperatorsDiffer(Backend& backend, const ConformanceOptions& options, ReduceOp a, ReduceOp b) {
  for (const DType dtype : {DType::kF32, DType::kI32}) {
    if (!CheckReduction(dtype, a).ok() || !CheckReduction(dtype, b).ok()) continue;
    for (const Operation operation : {Operation::kAllReduce, Operation::kReduceScatter, Operation::kReduceScatterV}) {
      const CallSpec usual{.operation = operation, .dtype = dtype, .reduce = a};
      const CallSpec theirs{.operation = operation, .dtype = dtype, .reduce = b};
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                   {.what = "reduction operators differ",
                                    .usual_had = absl::StrCat("has operator ", ReduceOpName(a)),
                                    .odd_had = absl::StrCat("has operator ", ReduceOpName(b))}));
    }
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status OperatorsOrRootsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const ReduceOp a : kAllReduceOps) {
    for (const ReduceOp b : kAllReduceOps) {
      if (a != b) EK_RETURN_IF_ERROR(OperatorsDiffer(backend, options, a, b));
    }
  }
  for (int a = 0; a < backend.size(); ++a) {
    for (int b = 0; b < backend.size(); ++b) {
      if (a == b) continue;
      const CallSpec usual{.operation = Operation::kBroadcast, .root = a};
      const CallSpec theirs{.operation = Operation::kBroadcast, .root = b};
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                   {.what = "roots differ",
                                    .usual_had = absl::StrCat("has root ", a),
                                    .odd_had = absl::StrCat("has root ", b)}));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status OperationsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const Operation a : kCollectives) {
    for (const Operation b : kCollectives) {
      if (a == b) continue;
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, {.operation = a}, {.operation = b},
                                   {.what = "operations differ",
                                    .usual_had = absl::StrCat("calls ", OperationName(a)),
                                    .odd_had = absl::StrCat("calls ", OperationName(b))}));
    }
  }
  return NextGroupWorks(backend, options);
}

// A random matrix; one entry that the odd rank has is changed by +-1, to 0, or doubled: every rank learns the pair and
// both numbers.
absl::Status CountMatrixDiffers(Backend& backend, const ConformanceOptions& options) {
  const int size = backend.size();
  int64_t epoch = -1;
  for (int odd = 0; odd < size; ++odd) {
    for (int entry = 0; entry < 2 * size; ++entry) {
      const int64_t seed = odd * 2 * size + entry;
      const bool is_send = entry < size;
      const int from = is_send ? odd : entry - size, to = is_send ? entry : odd;
      const int64_t right = MatrixEntry(seed, from, to);
      for (const int64_t changed : {right + 1, right - 1, int64_t{0}, right * 2}) {
        if (changed == right || changed < 0) continue;
        const CallSpec usual{.operation = Operation::kAllToAllV, .matrix_seed = seed};
        CallSpec theirs = usual;
        theirs.changed_entry = entry;
        theirs.changed_to = changed;
        const Expected expected{
            .what = "send and receive counts differ",
            .findings = {{from, absl::StrCat("sends ", is_send ? changed : right, " elements to rank ", to)},
                         {to, absl::StrCat("expects ", is_send ? right : changed, " elements from rank ", from)}}};
        EK_RETURN_IF_ERROR(ExpectDisagreement(backend, options, usual, theirs, odd, expected, &epoch));
      }
    }
  }
  return NextGroupWorks(backend, options);
}

// A rank that has skipped a call is found at the next one, by whatever differs first.
absl::Status CallSkipped(Backend& backend, const ConformanceOptions& options) {
  for (int odd = 0; odd < backend.size(); ++odd) {
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
    FreshStream stream(options);
    const CallSpec first{.operation = Operation::kAllReduce}, skipped{.operation = Operation::kAllReduce, .n = 15};
    CallBuffers done(first, group->size(), group->rank());
    EK_RETURN_IF_ERROR(stream.Await(IssueCall(first, *group, *stream, &done)));
    CallBuffers buffers(first, group->size(), group->rank());
    const CallSpec& spec = group->rank() == odd ? first : skipped;
    const absl::Status status = stream.Await(IssueCall(spec, *group, *stream, &buffers));
    if (status.code() != absl::StatusCode::kFailedPrecondition) return Wrong("FailedPrecondition wanted", status);
    EK_RETURN_IF_ERROR(CheckContext(status, *group, 1, odd));
    EK_RETURN_IF_ERROR(buffers.CheckUntouched());
  }
  return NextGroupWorks(backend, options);
}

absl::Status DeadlinesDiffer(Backend& backend, const ConformanceOptions& options) {
  for (int odd = 0; odd < backend.size(); ++odd) {
    EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
    FreshStream stream(options);
    EK_RETURN_IF_ERROR(group->SetDeadline(absl::Seconds(group->rank() == odd ? 21 : 20)));
    const absl::Status status = stream.Await(group->Barrier(*stream));
    if (!absl::StrContains(status.message(), "deadlines differ")) return Wrong("'deadlines differ' wanted", status);
    EK_RETURN_IF_ERROR(CheckContext(status, *group, 0, odd));
  }
  return NextGroupWorks(backend, options);
}

}  // namespace

std::vector<ConformanceCase> AgreementCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases;
  const auto add = [&cases, &options](std::string name, absl::Status (*body)(Backend&, const ConformanceOptions&)) {
    cases.push_back({std::move(name), 2, [options, body](Backend& backend) { return body(backend, options); }});
  };
  add("C01_CountsDiffer", CountsDiffer);
  add("C02_DTypesDiffer", DTypesDiffer);
  add("C03_OperatorsOrRootsDiffer", OperatorsOrRootsDiffer);
  add("C04_OperationsDiffer", OperationsDiffer);
  add("C07_CountMatrixDiffers", CountMatrixDiffers);
  add("C08_OneCallSkipped", CallSkipped);
  add("DeadlinesDiffer", DeadlinesDiffer);
  for (ConformanceCase& grouped : GroupedAgreementCases(options)) cases.push_back(std::move(grouped));
  for (ConformanceCase& refusal : RefusalCases(options)) cases.push_back(std::move(refusal));
  return cases;
}

std::vector<ConformanceCase> ConformanceCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases = OperationCases(options);
  for (ConformanceCase& agreement : AgreementCases(options)) cases.push_back(std::move(agreement));
  for (ConformanceCase& memory : MemoryCases(options)) cases.push_back(std::move(memory));
  return cases;
}

}  // namespace evenkeel::comm
