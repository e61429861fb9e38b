#include "evenkeel/comm/testing/conformance_calls.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kRoom = 16;  // elements a rank beside n

using Counts = std::vector<int64_t>;

int64_t Sum(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

// What rank `from` sends to rank `to` in an all_to_all_v of `spec`.
int64_t Entry(const CallSpec& spec, int from, int to) {
  if (spec.matrix_seed >= 0) return MatrixEntry(spec.matrix_seed, from, to);
  if (spec.mixture < 0) return spec.n;
  const int64_t choices[] = {0, 7, spec.n / 2, spec.n};
  return std::min(spec.n, choices[(from * 5 + to * 3 + spec.mixture) % 4]);
}

bool HasCounts(Operation operation) {
  return operation == Operation::kAllGatherV || operation == Operation::kReduceScatterV ||
         operation == Operation::kAllToAllV;
}

// The counts of the call, and of all_to_all_v those of what it receives, with the changed entry; else empty.
Counts CountsOf(const CallSpec& spec, int size, int rank) {
  Counts counts;
  const bool is_exchange = spec.operation == Operation::kAllToAllV;
  for (int r = 0; r < size && HasCounts(spec.operation); ++r) {
    counts.push_back(is_exchange ? Entry(spec, rank, r) : spec.mixture < 0 ? spec.n : Entry(spec, r, r + 2));
  }
  if (spec.changed_entry >= 0 && spec.changed_entry < static_cast<int>(counts.size())) {
    counts[spec.changed_entry] = spec.changed_to;
  }
  return counts;
}
Counts RecvCountsOf(const CallSpec& spec, int size, int rank) {
  Counts counts;
  for (int r = 0; r < size && spec.operation == Operation::kAllToAllV; ++r) counts.push_back(Entry(spec, r, rank));
  if (spec.changed_entry >= size && !counts.empty()) counts[spec.changed_entry - size] = spec.changed_to;
  return counts;
}

}  // namespace

int64_t MatrixEntry(int64_t seed, int from, int to) {
  return static_cast<int64_t>(
      PhiloxStream(PhiloxKey(static_cast<uint64_t>(seed)).Add("count matrix")).Below(from * 64 + to, 13));
}

CallBuffers::CallBuffers(const CallSpec& spec, int size, int rank)
    : send((size * (spec.n + kRoom)) * SizeOf(spec.dtype)), recv((size * (spec.n + kRoom)) * SizeOf(spec.dtype)) {
  send.Write(UniqueData(DType::kU8, rank, 21, send.bytes()));
  recv.Write(UniqueData(DType::kU8, rank, 22, recv.bytes()));
  send.Remember();
  recv.Remember();
}

absl::Status CallBuffers::CheckUntouched() const {
  EK_RETURN_IF_ERROR(send.CheckUntouched("send"));
  return recv.CheckUntouched("recv");
}

GroupedCall MakeCall(const CallSpec& spec, int size, int rank, CallBuffers* buffers) {
  const auto send = [&spec, buffers](int64_t n, int64_t at = 0) { return buffers->send.View(spec.dtype, at, n); };
  const auto recv = [&spec, buffers](int64_t n, int64_t at = 0) { return buffers->recv.View(spec.dtype, at, n); };
  const Counts counts = CountsOf(spec, size, rank), recv_counts = RecvCountsOf(spec, size, rank);
  const int64_t own = counts.empty() ? 0 : counts[rank];
  const int64_t before = counts.empty() ? 0 : Sum(Counts(counts.begin(), counts.begin() + rank));
  GroupedCall call{.operation = spec.operation, .reduce_op = spec.reduce, .root = spec.root};
  const auto gather = [&](int64_t block, int64_t all, int64_t at) {
    call.send = spec.in_place ? recv(block, at) : send(block);
    call.recv = recv(all);
  };
  const auto scatter = [&](int64_t block, int64_t all, int64_t at) {
    call.send = send(all);
    call.recv = spec.in_place ? send(block, at) : recv(block);
  };
  switch (spec.operation) {
    case Operation::kAllReduce:
      gather(spec.n, spec.n, 0);
      break;
    case Operation::kAllGather:
      gather(spec.n, spec.n * size, spec.n * rank);
      break;
    case Operation::kAllGatherV:
      gather(own, Sum(counts), before);
      break;
    case Operation::kReduceScatter:
      scatter(spec.n, spec.n * size, spec.n * rank);
      break;
    case Operation::kReduceScatterV:
      scatter(own, Sum(counts), before);
      break;
    case Operation::kAllToAll:
      call.send = send(spec.n * size);
      call.recv = recv(spec.n * size);
      break;
    case Operation::kAllToAllV:
      call.send = send(Sum(counts));
      call.recv = recv(Sum(recv_counts));
      break;
    default:
      call.recv = recv(spec.n);
  }
  call.counts = counts;
  call.recv_counts = recv_counts;
  return call;
}

absl::Status IssueCall(const CallSpec& spec, Communicator& group, Stream& stream, CallBuffers* buffers) {
  if (spec.operation == Operation::kBarrier) return group.Barrier(stream);
  if (spec.operation != Operation::kGrouped) {
    return RunOne(MakeCall(spec, group.size(), group.rank(), buffers), group, stream);
  }
  CallSpec exchange = spec;
  exchange.operation = Operation::kAllToAllV;
  exchange.matrix_seed = std::max<int64_t>(0, spec.matrix_seed);
  GroupedCall second = MakeCall(exchange, group.size(), group.rank(), buffers);
  const int64_t sent = second.send.num_elements(), received = second.recv.num_elements();
  CallGroup calls;
  calls.AllReduce(buffers->send.View(spec.dtype, sent, spec.n), buffers->recv.View(spec.dtype, received, spec.n),
                  spec.reduce);
  calls.AllToAllV(second.send, second.counts, second.recv, second.recv_counts);
  return calls.Run(group, stream);
}

absl::Status Wrong(absl::string_view what, const absl::Status& got) {
  return absl::InternalError(absl::StrCat(what, ", got: ", got.ToString()));
}

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

FreshStream::FreshStream(const ConformanceOptions& options) {
  HostDevice::Options device_options;
  device_options.stream_mode = options.stream_mode;
  device_ = HostDevice::Create(device_options);
  stream_ = *device_->CreateStream("comm");
}

absl::Status FreshStream::Await(const absl::Status& issued) {
  const absl::Status late = stream_->Synchronize();
  return issued.ok() ? late : issued;
}

absl::Status CheckBroken(const ConformanceOptions& options, Communicator& group) {
  FreshStream stream(options);
  const absl::Status again = stream.Await(group.Barrier(*stream));
  if (again.code() != absl::StatusCode::kAborted) return Wrong("a call on a broken group must be Aborted", again);
  if (group.status().ok()) return absl::InternalError("the group does not keep its first cause");
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

}  // namespace evenkeel::comm
