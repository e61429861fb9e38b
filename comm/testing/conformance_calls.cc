#include "evenkeel/comm/testing/conformance_calls.h"

#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kRoom = 16;  // elements a rank beside n

int64_t Sum(const std::vector<int64_t>& counts) { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

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

absl::Status IssueCall(const CallSpec& spec, Communicator& group, Stream& stream, CallBuffers* buffers) {
  const int size = group.size();
  const auto send = [&spec, buffers](int64_t n) { return buffers->send.View(spec.dtype, 0, n); };
  const auto recv = [&spec, buffers](int64_t n) { return buffers->recv.View(spec.dtype, 0, n); };
  std::vector<int64_t> counts(size, spec.n), recv_counts(size, spec.n);
  for (int r = 0; r < size && spec.matrix_seed >= 0 && spec.operation == Operation::kAllToAllV; ++r) {
    counts[r] = MatrixEntry(spec.matrix_seed, group.rank(), r);
    recv_counts[r] = MatrixEntry(spec.matrix_seed, r, group.rank());
  }
  if (spec.changed_entry >= size) recv_counts[spec.changed_entry - size] = spec.changed_to;
  if (spec.changed_entry >= 0 && spec.changed_entry < size) counts[spec.changed_entry] = spec.changed_to;
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
