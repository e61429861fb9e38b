// The conformance cases in which one rank's own arguments are bad.
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_calls.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

// Bad arguments on one rank. The others make the right call.
struct Refusal {
  const char* name;
  const char* text;  // in the odd rank's own message
  std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> bad;
  std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> good;
};

std::function<absl::Status(Communicator&, Stream&, CallBuffers*)> Good(Operation operation) {
  return [operation](Communicator& group, Stream& stream, CallBuffers* buffers) {
    return IssueCall({.operation = operation}, group, stream, buffers);
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

std::vector<ConformanceCase> RefusalCases(const ConformanceOptions& options) {
  const auto refuse = [&options](std::vector<Refusal> (*refusals)()) {
    return [options, refusals](Backend& backend) { return CheckRefusals(backend, options, refusals()); };
  };
  return {{"C12_OverflowsAndCountsRefused", 2, refuse(CountRefusals)},
          {"C13_PlacementsRefused", 2, refuse(PlacementRefusals)},
          {"BadDeadlinesAndPeers", 1, [options](Backend& backend) { return BadDeadlinesAndPeers(backend, options); }}};
}

}  // namespace evenkeel::comm
