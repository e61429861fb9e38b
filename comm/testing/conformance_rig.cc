#include "evenkeel/comm/testing/conformance_rig.h"

#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

void Append(Bytes* to, absl::Span<const std::byte> from) { to->insert(to->end(), from.begin(), from.end()); }

absl::Span<const std::byte> Slice(const Bytes& data, DType dtype, int64_t begin, int64_t n) {
  return absl::MakeSpan(data).subspan(begin * SizeOf(dtype), n * SizeOf(dtype));
}

Counts Offsets(const Counts& counts) {
  Counts offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

// The inputs of all ranks: everybody can compute them.
std::vector<Bytes> Inputs(DType dtype, int size, uint64_t salt, int64_t n) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r) inputs.push_back(UniqueData(dtype, r, salt, n));
  return inputs;
}

absl::StatusOr<Bytes> Oracle(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs) {
  std::string complaint;
  Bytes expected = ReductionOracle(dtype, op, inputs, &complaint);
  if (!complaint.empty()) return absl::InternalError(complaint);
  return expected;
}

int64_t EvenBlock(int64_t n, int size, int rank) { return n / size + (rank < n % size ? 1 : 0); }

}  // namespace

absl::StatusOr<std::unique_ptr<Rig>> Rig::Create(Backend& backend, const ConformanceOptions& options) {
  return Create(backend, options, WorldGroup(backend.size()));
}

absl::StatusOr<std::unique_ptr<Rig>> Rig::Create(Backend& backend, const ConformanceOptions& options,
                                                 const Group& group) {
  auto rig = std::unique_ptr<Rig>(new Rig(backend));
  rig->check_bytes_ = !options.two_level;
  HostDevice::Options device_options;
  device_options.stream_mode = options.stream_mode;
  rig->device_ = HostDevice::Create(device_options);
  EK_ASSIGN_OR_RETURN(rig->stream_, rig->device_->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(rig->group_, backend.CreateGroup(group));
  return rig;
}

absl::Status Rig::Finish(const absl::Status& issued, int64_t expected_bytes) {
  EK_RETURN_IF_ERROR(issued);
  EK_RETURN_IF_ERROR(stream_->Synchronize());
  const LedgerCounts now = backend_.ledger().Snapshot();
  const int64_t booked = (now - before_).bytes(Axis::kWorld);
  before_ = now;
  if (booked == expected_bytes || !check_bytes_) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("booked ", booked, " bytes, the closed form says ", expected_bytes));
}

absl::Status AllReduceOnce(Rig& rig, DType dtype, ReduceOp op, int64_t n, bool in_place, int skew) {
  const std::vector<Bytes> inputs = Inputs(dtype, rig.size(), 11, n);
  EK_ASSIGN_OR_RETURN(const Bytes expected, Oracle(dtype, op, inputs));
  GuardedBuffer send(n * SizeOf(dtype), skew), recv(n * SizeOf(dtype), 3 * skew);
  send.Write(inputs[rig.rank()]);
  send.Remember();
  GuardedBuffer& result = in_place ? send : recv;
  const int64_t own = EvenBlock(n, rig.size(), rig.rank());
  const int64_t moved = rig.size() == 1 ? 0 : (n - own) + own * (rig.size() - 1);
  EK_RETURN_IF_ERROR(
      rig.Finish(rig.group().AllReduce(send.View(dtype), result.View(dtype), op, rig.stream()), moved * SizeOf(dtype)));
  EK_RETURN_IF_ERROR(result.CheckData("recv", dtype, expected));
  EK_RETURN_IF_ERROR(result.CheckGuards("recv"));
  return in_place ? absl::OkStatus() : send.CheckUntouched("send");
}

absl::Status AllGatherOnce(Rig& rig, DType dtype, const Counts& counts, bool equal, bool in_place) {
  const Counts offsets = Offsets(counts);
  const int64_t own = counts[rig.rank()];
  Bytes expected;
  for (int r = 0; r < rig.size(); ++r) Append(&expected, UniqueData(dtype, r, 12, counts[r]));
  GuardedBuffer send(own * SizeOf(dtype)), recv(offsets.back() * SizeOf(dtype));
  const Bytes input = UniqueData(dtype, rig.rank(), 12, own);
  send.Write(input);
  send.Remember();
  if (in_place) recv.Write(input, offsets[rig.rank()] * SizeOf(dtype));
  const ConstTensorView from = in_place ? recv.View(dtype, offsets[rig.rank()], own) : send.View(dtype);
  const absl::Status issued = equal ? rig.group().AllGather(from, recv.View(dtype), rig.stream())
                                    : rig.group().AllGatherV(from, recv.View(dtype), counts, rig.stream());
  EK_RETURN_IF_ERROR(rig.Finish(issued, own * (rig.size() - 1) * SizeOf(dtype)));
  EK_RETURN_IF_ERROR(recv.CheckData("recv", dtype, expected));
  EK_RETURN_IF_ERROR(recv.CheckGuards("recv"));
  return send.CheckUntouched("send");
}

absl::Status ReduceScatterOnce(Rig& rig, DType dtype, ReduceOp op, const Counts& counts, bool equal, bool in_place) {
  const Counts offsets = Offsets(counts);
  const int64_t own = counts[rig.rank()];
  const std::vector<Bytes> inputs = Inputs(dtype, rig.size(), 13, offsets.back());
  std::vector<Bytes> blocks;
  for (const Bytes& input : inputs) {
    blocks.emplace_back();
    Append(&blocks.back(), Slice(input, dtype, offsets[rig.rank()], own));
  }
  EK_ASSIGN_OR_RETURN(const Bytes expected, Oracle(dtype, op, blocks));
  GuardedBuffer send(offsets.back() * SizeOf(dtype)), recv(own * SizeOf(dtype));
  send.Write(inputs[rig.rank()]);
  send.Remember();
  const TensorView to = in_place ? send.View(dtype, offsets[rig.rank()], own) : recv.View(dtype);
  const absl::Status issued = equal ? rig.group().ReduceScatter(send.View(dtype), to, op, rig.stream())
                                    : rig.group().ReduceScatterV(send.View(dtype), to, counts, op, rig.stream());
  EK_RETURN_IF_ERROR(rig.Finish(issued, (offsets.back() - own) * SizeOf(dtype)));
  if (in_place) recv.Write(absl::MakeSpan(static_cast<const std::byte*>(to.raw()), own * SizeOf(dtype)));
  EK_RETURN_IF_ERROR(recv.CheckData("recv", dtype, expected));
  EK_RETURN_IF_ERROR(recv.CheckGuards("recv"));
  if (!in_place) return send.CheckUntouched("send");
  Bytes rest = inputs[rig.rank()];  // only this rank's block may have changed
  if (own > 0) std::memcpy(rest.data() + offsets[rig.rank()] * SizeOf(dtype), expected.data(), expected.size());
  EK_RETURN_IF_ERROR(send.CheckData("send", dtype, rest));
  return send.CheckGuards("send");
}

absl::Status AllToAllOnce(Rig& rig, DType dtype, const std::vector<Counts>& matrix, bool equal, int skew) {
  const int rank = rig.rank();
  Counts recv_counts;
  for (int r = 0; r < rig.size(); ++r) recv_counts.push_back(matrix[r][rank]);
  const Counts send_offsets = Offsets(matrix[rank]);
  Bytes expected;
  for (int r = 0; r < rig.size(); ++r) {
    const Counts offsets = Offsets(matrix[r]);
    const Bytes input = UniqueData(dtype, r, 14, offsets.back());
    Append(&expected, Slice(input, dtype, offsets[rank], matrix[r][rank]));
  }
  GuardedBuffer send(send_offsets.back() * SizeOf(dtype), skew);
  GuardedBuffer recv(Offsets(recv_counts).back() * SizeOf(dtype), 3 * skew);
  send.Write(UniqueData(dtype, rank, 14, send_offsets.back()));
  send.Remember();
  const absl::Status issued =
      equal ? rig.group().AllToAll(send.View(dtype), recv.View(dtype), rig.stream())
            : rig.group().AllToAllV(send.View(dtype), matrix[rank], recv.View(dtype), recv_counts, rig.stream());
  EK_RETURN_IF_ERROR(rig.Finish(issued, (send_offsets.back() - matrix[rank][rank]) * SizeOf(dtype)));
  EK_RETURN_IF_ERROR(recv.CheckData("recv", dtype, expected));
  EK_RETURN_IF_ERROR(recv.CheckGuards("recv"));
  return send.CheckUntouched("send");
}

absl::Status BroadcastOnce(Rig& rig, DType dtype, int root, int64_t n) {
  GuardedBuffer buffer(n * SizeOf(dtype));
  if (rig.rank() == root) buffer.Write(UniqueData(dtype, root, 15, n));
  const int64_t moved = rig.rank() == root ? n * (rig.size() - 1) * SizeOf(dtype) : 0;
  EK_RETURN_IF_ERROR(rig.Finish(rig.group().Broadcast(buffer.View(dtype), root, rig.stream()), moved));
  EK_RETURN_IF_ERROR(buffer.CheckData("buffer", dtype, UniqueData(dtype, root, 15, n)));
  return buffer.CheckGuards("buffer");
}

absl::Status SendRecvOnce(Rig& rig, DType dtype, int64_t n) {
  const int next = (rig.rank() + 1) % rig.size();
  const int before = (rig.rank() + rig.size() - 1) % rig.size();
  GuardedBuffer buffer(n * SizeOf(dtype)), token(n * SizeOf(dtype));
  const Bytes expected = UniqueData(dtype, 0, 16, n);
  token.Write(expected);
  if (rig.rank() == 0) EK_RETURN_IF_ERROR(rig.group().Send(token.View(dtype), next, rig.stream()));
  EK_RETURN_IF_ERROR(rig.group().Recv(buffer.View(dtype), before, rig.stream()));
  if (rig.rank() != 0) EK_RETURN_IF_ERROR(rig.group().Send(buffer.View(dtype), next, rig.stream()));
  EK_RETURN_IF_ERROR(rig.Finish(absl::OkStatus(), n * SizeOf(dtype)));
  EK_RETURN_IF_ERROR(buffer.CheckData("token", dtype, expected));
  return buffer.CheckGuards("token");
}

ConformanceCase RigCase(const ConformanceOptions& options, std::string name, std::function<absl::Status(Rig&)> body) {
  return {std::move(name), 1, [options, body = std::move(body)](Backend& backend) -> absl::Status {
            EK_ASSIGN_OR_RETURN(const std::unique_ptr<Rig> rig, Rig::Create(backend, options));
            const absl::Status status = body(*rig);
            // Nothing that a queued call touches may go before it is done.
            const absl::Status late = rig->stream().Synchronize();
            return status.ok() ? late : status;
          }};
}

}  // namespace evenkeel::comm
