// The conformance cases in which ranks disagree, or one refuses.
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/fingerprint.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// One call as data; extents follow from `n` as the operation wants them.
struct CallSpec {
  Operation operation = Operation::kAllReduce;
  DType dtype = DType::kF32;
  ReduceOp reduce = ReduceOp::kSum;
  int64_t n = 16;
  int root = 0;
  // Added to one entry of the counts of a v-call: index `changed_entry` of send counts, then receive counts.
  int changed_entry = -1;
  int64_t change = 0;
};

constexpr Operation kCollectives[] = {Operation::kAllReduce,     Operation::kAllGather,      Operation::kAllGatherV,
                                      Operation::kReduceScatter, Operation::kReduceScatterV, Operation::kAllToAll,
                                      Operation::kAllToAllV,     Operation::kBroadcast,      Operation::kBarrier};

// The buffers of one call, filled, and what they held before it.
struct CallBuffers {
  CallBuffers(const CallSpec& spec, int size, int rank)
      : send((size * (spec.n + 8)) * SizeOf(spec.dtype)), recv((size * (spec.n + 8)) * SizeOf(spec.dtype)) {
    send.Write(UniqueData(DType::kU8, rank, 21, send.bytes()));
    recv.Write(UniqueData(DType::kU8, rank, 22, recv.bytes()));
    send.Remember();
    recv.Remember();
  }
  absl::Status CheckUntouched() const {
    EK_RETURN_IF_ERROR(send.CheckUntouched("send"));
    return recv.CheckUntouched("recv");
  }
  GuardedBuffer send;
  GuardedBuffer recv;
};

int64_t Sum(const std::vector<int64_t>& counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return sum;
}

absl::Status Issue(const CallSpec& spec, Communicator& group, Stream& stream, CallBuffers* buffers) {
  const int size = group.size();
  const auto send = [&spec, buffers](int64_t n) { return buffers->send.View(spec.dtype, 0, n); };
  const auto recv = [&spec, buffers](int64_t n) { return buffers->recv.View(spec.dtype, 0, n); };
  std::vector<int64_t> counts(size, spec.n), recv_counts(size, spec.n);
  if (spec.changed_entry >= size) recv_counts[spec.changed_entry - size] += spec.change;
  if (spec.changed_entry >= 0 && spec.changed_entry < size) counts[spec.changed_entry] += spec.change;
  switch (spec.operation) {
    case Operation::kAllReduce:
      return group.AllReduce(send(spec.n), recv(spec.n), spec.reduce, stream);
    case Operation::kAllGather:
      return group.AllGather(send(spec.n), recv(spec.n * size), stream);
    case Operation::kAllGatherV:
      return group.AllGatherV(send(counts[group.rank()]), recv(Sum(counts)), counts, stream);
    case Operation::kReduceScatter:
      return group.ReduceScatter(send(spec.n * size), recv(spec.n), spec.reduce, stream);
    case Operation::kReduceScatterV:
      return group.ReduceScatterV(send(Sum(counts)), recv(counts[group.rank()]), counts, spec.reduce, stream);
    case Operation::kAllToAll:
      return group.AllToAll(send(spec.n * size), recv(spec.n * size), stream);
    case Operation::kAllToAllV:
      return group.AllToAllV(send(Sum(counts)), counts, recv(Sum(recv_counts)), recv_counts, stream);
    case Operation::kBroadcast:
      return group.Broadcast(recv(spec.n), spec.root, stream);
    default:
      return group.Barrier(stream);
  }
}

absl::Status Wrong(absl::string_view what, const absl::Status& got) {
  return absl::InternalError(absl::StrCat(what, ", got: ", got.ToString()));
}

// The fields that every error of comm carries.
absl::Status CheckContext(const absl::Status& status, const Communicator& group, int64_t sequence, int odd) {
  const auto context = GetErrorContext(status);
  if (!context.has_value()) return Wrong("the error has no context", status);
  if (context->module != "comm" || context->group != "world" || context->epoch != group.epoch() ||
      context->sequence != sequence || context->rank != group.rank() || context->size != group.size() ||
      context->operation.empty() || context->next_step.empty()) {
    return Wrong("a field of the context is missing or wrong", status);
  }
  for (const RankFinding& finding : context->findings) {
    if (finding.rank == odd && !finding.had.empty()) return absl::OkStatus();
  }
  return Wrong(absl::StrCat("the odd rank ", odd, " is not named"), status);
}

// A stream that has seen no error yet.
class FreshStream {
 public:
  explicit FreshStream(const ConformanceOptions& options) {
    HostDevice::Options device_options;
    device_options.stream_mode = options.stream_mode;
    device_ = HostDevice::Create(device_options);
    stream_ = *device_->CreateStream("comm");
  }
  Stream& operator*() { return *stream_; }
  // What the call came to, however the stream runs.
  absl::Status Await(const absl::Status& issued) {
    const absl::Status late = stream_->Synchronize();
    return issued.ok() ? late : issued;
  }

 private:
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
};

absl::Status CheckBroken(const ConformanceOptions& options, Communicator& group) {
  FreshStream stream(options);
  const absl::Status again = stream.Await(group.Barrier(*stream));
  if (again.code() != absl::StatusCode::kAborted) return Wrong("a call on a broken group must be Aborted", again);
  if (group.status().ok()) return absl::InternalError("the group does not keep its first cause");
  return absl::OkStatus();
}

// One call in which rank `odd` does `theirs` and the others `usual`.
absl::Status ExpectDisagreement(Backend& backend, const ConformanceOptions& options, const CallSpec& usual,
                                const CallSpec& theirs, int odd, absl::string_view what) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  EK_RETURN_IF_ERROR(group->Barrier(*stream));
  const CallSpec& spec = group->rank() == odd ? theirs : usual;
  CallBuffers buffers(spec, group->size(), group->rank());
  const LedgerCounts before = backend.ledger().Snapshot();
  const absl::Status status = stream.Await(Issue(spec, *group, *stream, &buffers));
  if (status.code() != absl::StatusCode::kFailedPrecondition || !absl::StrContains(status.message(), what)) {
    return Wrong(absl::StrCat("FailedPrecondition with '", what, "' wanted"), status);
  }
  EK_RETURN_IF_ERROR(CheckContext(status, *group, 1, odd));
  EK_RETURN_IF_ERROR(buffers.CheckUntouched());
  if ((backend.ledger().Snapshot() - before).bytes(Axis::kWorld) != 0) {
    return absl::InternalError("payload was booked although nothing was transferred");
  }
  return CheckBroken(options, *group);
}

// Every rank is the odd one once; then the next group works.
absl::Status RotateOdd(Backend& backend, const ConformanceOptions& options, const CallSpec& usual,
                       const CallSpec& theirs, absl::string_view what) {
  for (int odd = 0; odd < backend.size(); ++odd) {
    const absl::Status status = ExpectDisagreement(backend, options, usual, theirs, odd, what);
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(OperationName(usual.operation), " against ", OperationName(theirs.operation),
                                       ", odd rank ", odd, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status NextGroupWorks(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  int64_t value = backend.rank() + 1;
  const TensorView view(&value, DType::kI64, Shape({1}));
  EK_RETURN_IF_ERROR(stream.Await(group->AllReduce(view, view, ReduceOp::kSum, *stream)));
  const int64_t expected = int64_t{backend.size()} * (backend.size() + 1) / 2;
  if (value != expected) return absl::InternalError(absl::StrCat("sum ", value, ", wanted ", expected));
  return absl::OkStatus();
}

absl::Status CountsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const Operation operation : {Operation::kAllReduce, Operation::kAllGather, Operation::kReduceScatter,
                                    Operation::kAllToAll, Operation::kBroadcast}) {
    for (const int64_t n : {int64_t{1}, int64_t{1000}, options.large}) {
      CallSpec usual{.operation = operation, .n = n};
      CallSpec theirs = usual;
      theirs.n = n + 1;
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, "element counts differ"));
      theirs.n = 0;
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, "element counts differ"));
    }
  }
  for (const Operation operation : {Operation::kAllGatherV, Operation::kReduceScatterV}) {
    CallSpec usual{.operation = operation};
    CallSpec theirs = usual;
    theirs.changed_entry = backend.size() - 1;
    theirs.change = -3;
    EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs,
                                 absl::StrCat("counts vectors differ at index ", backend.size() - 1)));
  }
  return NextGroupWorks(backend, options);
}

absl::Status DTypesDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const DType a : kAllDTypes) {
    for (const DType b : kAllDTypes) {
      if (a == b) continue;
      const CallSpec usual{.dtype = a};
      const CallSpec theirs{.dtype = b};
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, "dtypes differ"));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status OperatorsOrRootsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const ReduceOp a : kAllReduceOps) {
    for (const ReduceOp b : kAllReduceOps) {
      if (a == b || a == ReduceOp::kBitOr || b == ReduceOp::kBitOr) continue;
      for (const Operation operation : {Operation::kAllReduce, Operation::kReduceScatter}) {
        const CallSpec usual{.operation = operation, .reduce = a};
        const CallSpec theirs{.operation = operation, .reduce = b};
        EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, "reduction operators differ"));
      }
    }
  }
  for (int a = 0; a < backend.size(); ++a) {
    for (int b = 0; b < backend.size(); ++b) {
      if (a == b) continue;
      const CallSpec usual{.operation = Operation::kBroadcast, .root = a};
      const CallSpec theirs{.operation = Operation::kBroadcast, .root = b};
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, "roots differ"));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status OperationsDiffer(Backend& backend, const ConformanceOptions& options) {
  for (const Operation a : kCollectives) {
    for (const Operation b : kCollectives) {
      if (a == b) continue;
      EK_RETURN_IF_ERROR(
          RotateOdd(backend, options, {.operation = a}, {.operation = b}, absl::StrCat("operations differ")));
    }
  }
  return NextGroupWorks(backend, options);
}

// One entry of the odd rank's counts changed: every rank learns the pair and both numbers.
absl::Status CountMatrixDiffers(Backend& backend, const ConformanceOptions& options) {
  const int size = backend.size();
  for (int entry = 0; entry < 2 * size; ++entry) {
    for (const int64_t change : {1, -1, 16, -16}) {
      const CallSpec usual{.operation = Operation::kAllToAllV};
      CallSpec theirs = usual;
      theirs.changed_entry = entry;
      theirs.change = change > 8 ? 8 : change;  // buffers hold 8 more elements a rank
      const std::string number = absl::StrCat(" ", 16 + theirs.change, " elements");
      EK_RETURN_IF_ERROR(RotateOdd(backend, options, usual, theirs, number));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status SequencesDiffer(Backend& backend, const ConformanceOptions& options) {
  // A rank that issues one call more than the others is found at the next call, by whatever differs first; here the
  // calls are of one kind, so that the next rendezvous pairs them and the odd rank is left alone at the end.
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  const CallSpec usual{.operation = Operation::kAllReduce};
  const CallSpec shorter{.operation = Operation::kAllReduce, .n = 15};
  for (const bool skips : {false, true}) {
    CallBuffers buffers(usual, group->size(), group->rank());
    if (skips) {
      // Rank 0 skipped a call of 15 elements: it is one call ahead of the others.
      const CallSpec& spec = group->rank() == 0 ? usual : shorter;
      const absl::Status status = stream.Await(Issue(spec, *group, *stream, &buffers));
      if (status.code() != absl::StatusCode::kFailedPrecondition) return Wrong("FailedPrecondition wanted", status);
      EK_RETURN_IF_ERROR(buffers.CheckUntouched());
    } else {
      EK_RETURN_IF_ERROR(stream.Await(Issue(usual, *group, *stream, &buffers)));
    }
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

// Bad arguments on one rank. The others make the right call.
struct Refusal {
  const char* name;
  const char* text;  // in the odd rank's own message
  std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> bad;
  std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> good;
};

std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> Good(Operation operation) {
  return [operation](Communicator& group, Stream& stream, CallBuffers* buffers) {
    return Issue({.operation = operation}, group, stream, buffers);
  };
}

TensorView F32(CallBuffers* b, bool send, int64_t begin, int64_t n) {
  return (send ? b->send : b->recv).View(DType::kF32, begin, n);
}

std::vector<Refusal> PlacementRefusals() {
  using C = Communicator;
  return {
      {"size", "recv has 15 elements, needs 16",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(F32(b, true, 0, 16), F32(b, false, 0, 15), ReduceOp::kSum, s);
       },
       Good(Operation::kAllReduce)},
      {"dtype", "send is f32, recv is i32",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(F32(b, true, 0, 16), b->recv.View(DType::kI32, 0, 16), ReduceOp::kSum, s);
       },
       Good(Operation::kAllReduce)},
      {"null", "recv is null but has 16 elements",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(F32(b, true, 0, 16), TensorView(nullptr, DType::kF32, Shape({16})), ReduceOp::kSum, s);
       },
       Good(Operation::kAllReduce)},
      {"overlap", "they overlap",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(F32(b, true, 0, 16), F32(b, true, 1, 16), ReduceOp::kSum, s);
       },
       Good(Operation::kAllReduce)},
      {"operator", "bitor is not offered for f32",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(F32(b, true, 0, 16), F32(b, false, 0, 16), ReduceOp::kBitOr, s);
       },
       Good(Operation::kAllReduce)},
      {"average", "avg is not offered for i32",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllReduce(b->send.View(DType::kI32, 0, 16), b->recv.View(DType::kI32, 0, 16), ReduceOp::kAvg, s);
       },
       Good(Operation::kAllReduce)},
      {"gather in place elsewhere", "they overlap; in place means byte",
       [](C& g, Stream& s, CallBuffers* b) {
         const int wrong = (g.rank() + 1) % g.size();
         return g.AllGather(F32(b, false, wrong * 16, 16), F32(b, false, 0, 16 * g.size()), s);
       },
       Good(Operation::kAllGather)},
      {"exchange in place", "no overlap is allowed",
       [](C& g, Stream& s, CallBuffers* b) {
         return g.AllToAll(F32(b, true, 0, 16 * g.size()), F32(b, true, 0, 16 * g.size()), s);
       },
       Good(Operation::kAllToAll)},
      {"indivisible", "not a multiple of",
       [](C& g, Stream& s, CallBuffers* b) {
         const int64_t n = 16 * g.size() - 1;
         return g.AllToAll(F32(b, true, 0, n), F32(b, false, 0, n), s);
       },
       Good(Operation::kAllToAll)},
      {"root", "is outside [0,",
       [](C& g, Stream& s, CallBuffers* b) { return g.Broadcast(F32(b, false, 0, 16), g.size(), s); },
       Good(Operation::kBroadcast)},
      {"negative root", "root -1 is outside",
       [](C& g, Stream& s, CallBuffers* b) { return g.Broadcast(F32(b, false, 0, 16), -1, s); },
       Good(Operation::kBroadcast)},
  };
}

absl::Status ExchangeWith(Communicator& group, Stream& stream, CallBuffers* buffers, int64_t first) {
  std::vector<int64_t> counts(group.size(), 16);
  const std::vector<int64_t> recv_counts = counts;
  counts[0] = first;
  return group.AllToAllV(F32(buffers, true, 0, 16 * group.size()), counts, F32(buffers, false, 0, 16 * group.size()),
                         recv_counts, stream);
}

std::vector<Refusal> CountRefusals() {
  using C = Communicator;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  return {
      {"bytes overflow", "overflow",
       [](C& g, Stream& s, CallBuffers* b) {
         const Shape huge({kMax / 2});
         return g.AllReduce(ConstTensorView(b->send.data(), DType::kF32, huge),
                            TensorView(b->recv.data(), DType::kF32, huge), ReduceOp::kSum, s);
       },
       Good(Operation::kAllReduce)},
      {"gathered overflow", "overflow",
       [](C& g, Stream& s, CallBuffers* b) {
         const Shape huge({kMax - 1});
         return g.AllGather(ConstTensorView(b->send.data(), DType::kU8, huge),
                            TensorView(b->recv.data(), DType::kU8, huge), s);
       },
       Good(Operation::kAllGather)},
      {"counts overflow", "overflow", [](C& g, Stream& s, CallBuffers* b) { return ExchangeWith(g, s, b, kMax); },
       Good(Operation::kAllToAllV)},
      {"negative count", "send_counts: counts[0] is -1",
       [](C& g, Stream& s, CallBuffers* b) { return ExchangeWith(g, s, b, -1); }, Good(Operation::kAllToAllV)},
      {"sum of counts", "the sum of its counts",
       [](C& g, Stream& s, CallBuffers* b) { return ExchangeWith(g, s, b, 17); }, Good(Operation::kAllToAllV)},
      {"length of counts", "counts has 1 entries for",
       [](C& g, Stream& s, CallBuffers* b) { return g.AllGatherV(F32(b, true, 0, 16), F32(b, false, 0, 16), {16}, s); },
       Good(Operation::kAllGatherV)},
  };
}

absl::Status CheckRefusal(Backend& backend, const ConformanceOptions& options, const Refusal& refusal, int odd) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  CallBuffers buffers({}, group->size(), group->rank());
  const bool is_odd = group->rank() == odd;
  const absl::Status status = stream.Await((is_odd ? refusal.bad : refusal.good)(*group, *stream, &buffers));
  const auto code = is_odd ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kFailedPrecondition;
  const absl::string_view text = is_odd ? absl::string_view(refusal.text) : "refuses";
  if (status.code() != code || !absl::StrContains(status.message(), text)) {
    return Wrong(absl::StrCat(refusal.name, ": ", absl::StatusCodeToString(code), " with '", text, "' wanted"), status);
  }
  if (!is_odd) EK_RETURN_IF_ERROR(CheckContext(status, *group, 0, odd));
  EK_RETURN_IF_ERROR(buffers.CheckUntouched());
  return CheckBroken(options, *group);
}

absl::Status CheckRefusals(Backend& backend, const ConformanceOptions& options, const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    for (int odd = 0; odd < backend.size(); ++odd) {
      EK_RETURN_IF_ERROR(CheckRefusal(backend, options, refusal, odd));
    }
  }
  return NextGroupWorks(backend, options);
}

absl::Status BadDeadlinesAndPeers(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  FreshStream stream(options);
  // A refused limit breaks nothing.
  for (const absl::Duration bad : {absl::ZeroDuration(), -absl::Seconds(1), absl::InfiniteDuration()}) {
    const absl::Status status = group->SetDeadline(bad);
    if (status.code() != absl::StatusCode::kInvalidArgument) return Wrong("InvalidArgument wanted", status);
  }
  EK_RETURN_IF_ERROR(stream.Await(group->Barrier(*stream)));
  float value = 1;
  const TensorView view(&value, DType::kF32, Shape({1}));
  for (const int peer : {group->rank(), -1, group->size()}) {
    EK_ASSIGN_OR_RETURN(const auto fresh, backend.CreateGroup(WorldGroup(backend.size())));
    FreshStream other(options);
    const absl::Status status = other.Await(fresh->Send(view, peer, *other));
    if (status.code() != absl::StatusCode::kInvalidArgument) return Wrong("InvalidArgument wanted", status);
  }
  return NextGroupWorks(backend, options);
}

}  // namespace

std::vector<ConformanceCase> AgreementCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases;
  const auto add = [&cases, &options](std::string name, int min_world,
                                      absl::Status (*body)(Backend&, const ConformanceOptions&)) {
    cases.push_back({std::move(name), min_world, [options, body](Backend& backend) { return body(backend, options); }});
  };
  add("C01_CountsDiffer", 2, CountsDiffer);
  add("C02_DTypesDiffer", 2, DTypesDiffer);
  add("C03_OperatorsOrRootsDiffer", 2, OperatorsOrRootsDiffer);
  add("C04_OperationsDiffer", 2, OperationsDiffer);
  add("C07_CountMatrixDiffers", 2, CountMatrixDiffers);
  add("C08_OneCallSkipped", 2, SequencesDiffer);
  add("DeadlinesDiffer", 2, DeadlinesDiffer);
  add("C12_OverflowsAndCountsRefused", 2,
      [](Backend& backend, const ConformanceOptions& o) { return CheckRefusals(backend, o, CountRefusals()); });
  add("C13_PlacementsRefused", 2,
      [](Backend& backend, const ConformanceOptions& o) { return CheckRefusals(backend, o, PlacementRefusals()); });
  add("BadDeadlinesAndPeers", 1, BadDeadlinesAndPeers);
  return cases;
}

std::vector<ConformanceCase> ConformanceCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases = OperationCases(options);
  for (ConformanceCase& agreement : AgreementCases(options)) cases.push_back(std::move(agreement));
  return cases;
}

}  // namespace evenkeel::comm
