// The conformance cases whose calls are right.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

using Bytes = std::vector<std::byte>;
using Counts = std::vector<int64_t>;

void Append(Bytes* to, absl::Span<const std::byte> from) { to->insert(to->end(), from.begin(), from.end()); }

absl::Span<const std::byte> Slice(const Bytes& data, DType dtype, int64_t begin, int64_t n) {
  return absl::MakeSpan(data).subspan(begin * SizeOf(dtype), n * SizeOf(dtype));
}

Counts Offsets(const Counts& counts) {
  Counts offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

// Irregular counts with zeros in every row and column, and a rank that gets nothing.
int64_t CountOf(int from, int to, int64_t n) {
  if (to == 1 || (from + to) % 3 == 2) return 0;
  return n * (1 + (2 * from + to) % 4) / 2;
}

// One rank of the world under test, with a group of all ranks and a stream of its own.
class Rig {
 public:
  static absl::StatusOr<std::unique_ptr<Rig>> Create(Backend& backend, const ConformanceOptions& options) {
    auto rig = std::unique_ptr<Rig>(new Rig(backend));
    rig->check_bytes_ = !options.two_level;
    HostDevice::Options device_options;
    device_options.stream_mode = options.stream_mode;
    rig->device_ = HostDevice::Create(device_options);
    EK_ASSIGN_OR_RETURN(rig->stream_, rig->device_->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(rig->group_, backend.CreateGroup(WorldGroup(backend.size())));
    return rig;
  }

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  Communicator& group() { return *group_; }
  Stream& stream() { return *stream_; }

  // Awaits the call, then checks the bytes that it booked.
  absl::Status Finish(const absl::Status& issued, int64_t expected_bytes) {
    EK_RETURN_IF_ERROR(issued);
    EK_RETURN_IF_ERROR(stream_->Synchronize());
    const LedgerCounts now = backend_.ledger().Snapshot();
    const int64_t booked = (now - before_).bytes(Axis::kWorld);
    before_ = now;
    if (booked == expected_bytes || !check_bytes_) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("booked ", booked, " bytes, the closed form says ", expected_bytes));
  }

 private:
  explicit Rig(Backend& backend) : backend_(backend), before_(backend.ledger().Snapshot()) {}

  Backend& backend_;
  LedgerCounts before_;
  bool check_bytes_ = true;
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<HostDevice> device_;
  std::unique_ptr<Stream> stream_;
};

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

absl::Status AllToAllOnce(Rig& rig, DType dtype, const std::vector<Counts>& matrix, bool equal) {
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
  GuardedBuffer send(send_offsets.back() * SizeOf(dtype)), recv(Offsets(recv_counts).back() * SizeOf(dtype));
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

// A token goes round the ring: rank 0 sends first, the others pass on what they got.
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

absl::Status Annotated(const absl::Status& status, absl::string_view where) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

// Calls `body(dtype, n)` for every dtype and extent; names them in what fails.
template <typename Body>
absl::Status ForEachExtent(const ConformanceOptions& options, const Body& body) {
  for (const DType dtype : kAllDTypes) {
    for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{257}, options.large}) {
      const absl::Status status = body(dtype, n);
      if (!status.ok()) return Annotated(status, absl::StrCat(DTypeName(dtype), " n=", n));
    }
  }
  return absl::OkStatus();
}

absl::Status ReduceAll(Rig& rig, const ConformanceOptions& options, bool scatter) {
  return ForEachExtent(options, [&rig, &options, scatter](DType dtype, int64_t n) -> absl::Status {
    for (const ReduceOp op : kAllReduceOps) {
      if (!CheckReduction(dtype, op).ok()) continue;
      if (n == options.large && (op == ReduceOp::kMin || op == ReduceOp::kMax)) continue;
      for (const bool in_place : {false, true}) {
        const absl::Status status = scatter ? ReduceScatterOnce(rig, dtype, op, Counts(rig.size(), n), true, in_place)
                                            : AllReduceOnce(rig, dtype, op, n, in_place, 0);
        if (!status.ok()) return Annotated(status, absl::StrCat(ReduceOpName(op), in_place ? " in place" : ""));
      }
    }
    return absl::OkStatus();
  });
}

Counts IrregularCounts(int size, int64_t n) {
  Counts counts(size);
  for (int r = 0; r < size; ++r) counts[r] = CountOf(r, r + 2, n);
  return counts;
}

std::vector<Counts> Matrix(int size, int64_t n, bool equal) {
  std::vector<Counts> matrix(size, Counts(size, n));
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size && !equal; ++to) matrix[from][to] = CountOf(from, to, n);
  }
  return matrix;
}

// C16: a NaN, an infinity and a negative zero on every rank in turn.
absl::Status SpecialValues(Rig& rig) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int odd = 0; odd < rig.size(); ++odd) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg}) {
      float values[] = {static_cast<float>(rig.rank() + 1), 1.0f, -1.0f, rig.rank() == odd ? -0.0f : 0.0f};
      if (rig.rank() == odd) {
        values[0] = kNan;
        values[1] = kInf;
        values[2] = -kInf;
      }
      const TensorView view(values, DType::kF32, Shape({4}));
      EK_RETURN_IF_ERROR(rig.group().AllReduce(view, view, op, rig.stream()));
      EK_RETURN_IF_ERROR(rig.stream().Synchronize());
      const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg;
      const bool one = rig.size() == 1;
      const float plus = sums || op == ReduceOp::kMax || one ? kInf : 1.0f;
      const float minus = sums || op == ReduceOp::kMin || one ? -kInf : -1.0f;
      const bool negative_zero = op == ReduceOp::kMin || one;
      if (!std::isnan(values[0]) || values[1] != plus || values[2] != minus || values[3] != 0.0f ||
          std::signbit(values[3]) != negative_zero) {
        return absl::InternalError(absl::StrCat(ReduceOpName(op), " with the odd rank ", odd, " gives ", values[0],
                                                ", ", values[1], ", ", values[2], ", ", values[3]));
      }
    }
  }
  return absl::OkStatus();
}

// C18: buckets of any size give the bits of one call, and all ranks hold the same bits.
absl::Status BucketsAndRanks(Rig& rig, const ConformanceOptions& options) {
  const int64_t n = std::min<int64_t>(options.large, 5003);
  const Bytes input = UniqueData(DType::kF32, rig.rank(), 18, n);
  GuardedBuffer whole(n * 4);
  whole.Write(input);
  EK_RETURN_IF_ERROR(
      rig.group().AllReduce(whole.View(DType::kF32), whole.View(DType::kF32), ReduceOp::kSum, rig.stream()));
  EK_RETURN_IF_ERROR(rig.stream().Synchronize());
  const Bytes expected(whole.data(), whole.data() + n * 4);
  for (const int64_t bucket : {int64_t{1000}, int64_t{4096}, n - 1}) {
    GuardedBuffer parts(n * 4);
    parts.Write(input);
    for (int64_t begin = 0; begin < n; begin += bucket) {
      const TensorView part = parts.View(DType::kF32, begin, std::min(bucket, n - begin));
      EK_RETURN_IF_ERROR(rig.group().AllReduce(part, part, ReduceOp::kSum, rig.stream()));
    }
    EK_RETURN_IF_ERROR(rig.stream().Synchronize());
    EK_RETURN_IF_ERROR(parts.CheckData(absl::StrCat("bucket ", bucket), DType::kF32, expected));
  }
  int64_t digest = static_cast<int64_t>(Digest64(expected.data(), expected.size()));
  std::vector<int64_t> digests(rig.size());
  EK_RETURN_IF_ERROR(rig.group().AllGather(ConstTensorView(&digest, DType::kI64, Shape({1})),
                                           TensorView(digests.data(), DType::kI64, Shape({rig.size()})), rig.stream()));
  EK_RETURN_IF_ERROR(rig.stream().Synchronize());
  for (int r = 0; r < rig.size(); ++r) {
    if (digests[r] != digest) return absl::InternalError(absl::StrCat("rank ", r, " holds other bits"));
  }
  return absl::OkStatus();
}

// Every rank is in two more groups, used in turn: halves and strides.
absl::Status SubGroups(Backend& backend, const ConformanceOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Rig> rig, Rig::Create(backend, options));
  const int rank = backend.rank();
  Group half{.axis = Axis::kTp, .name = "tp", .ranks = {}};
  Group stride{.axis = Axis::kDp, .name = "dp", .ranks = {}};
  for (int r = 0; r < backend.size(); ++r) {
    if (r / 2 == rank / 2) half.ranks.push_back(r);
    if (r % 2 == rank % 2) stride.ranks.insert(stride.ranks.begin(), r);  // in falling order
  }
  EK_ASSIGN_OR_RETURN(const auto tp, backend.CreateGroup(half));
  EK_ASSIGN_OR_RETURN(const auto dp, backend.CreateGroup(stride));
  for (int round = 0; round < 10; ++round) {
    for (Communicator* group : {tp.get(), dp.get()}) {
      int32_t mine = rank * 100 + round;
      std::vector<int32_t> all(group->size());
      EK_RETURN_IF_ERROR(group->AllGather(ConstTensorView(&mine, DType::kI32, Shape({1})),
                                          TensorView(all.data(), DType::kI32, Shape({group->size()})), rig->stream()));
      EK_RETURN_IF_ERROR(rig->stream().Synchronize());
      for (int i = 0; i < group->size(); ++i) {
        if (all[i] != group->group().ranks[i] * 100 + round) return absl::InternalError("wrong order in a sub-group");
      }
    }
  }
  return rig->Finish(rig->group().Barrier(rig->stream()), 0);
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

absl::Status Unaligned(Rig& rig) {
  for (const DType dtype : kAllDTypes) {
    for (int skew = 1; skew < 4; ++skew) {
      EK_RETURN_IF_ERROR(AllReduceOnce(rig, dtype, ReduceOp::kSum, 301, skew == 2, skew));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<ConformanceCase> OperationCases(const ConformanceOptions& options) {
  std::vector<ConformanceCase> cases;
  const auto add = [&cases, &options](std::string name, std::function<absl::Status(Rig&)> body) {
    cases.push_back(RigCase(options, std::move(name), std::move(body)));
  };
  add("AllReduce", [options](Rig& rig) { return ReduceAll(rig, options, false); });
  add("ReduceScatter", [options](Rig& rig) { return ReduceAll(rig, options, true); });
  add("ReduceScatterV", [options](Rig& rig) {
    return ForEachExtent(options, [&rig](DType dtype, int64_t n) {
      const Counts counts = IrregularCounts(rig.size(), n);
      const absl::Status apart = ReduceScatterOnce(rig, dtype, ReduceOp::kSum, counts, false, false);
      return apart.ok() ? ReduceScatterOnce(rig, dtype, ReduceOp::kMax, counts, false, true) : apart;
    });
  });
  for (const bool in_place : {false, true}) {
    const std::string suffix = in_place ? "InPlace" : "";
    add("AllGather" + suffix, [options, in_place](Rig& rig) {
      return ForEachExtent(options, [&rig, in_place](DType dtype, int64_t n) {
        return AllGatherOnce(rig, dtype, Counts(rig.size(), n), true, in_place);
      });
    });
    add("AllGatherV" + suffix, [options, in_place](Rig& rig) {
      return ForEachExtent(options, [&rig, in_place](DType dtype, int64_t n) {
        return AllGatherOnce(rig, dtype, IrregularCounts(rig.size(), n), false, in_place);
      });
    });
  }
  for (const bool equal : {true, false}) {
    add(equal ? "AllToAll" : "C11_AllToAllVWithEmptyRowsAndColumns", [options, equal](Rig& rig) {
      return ForEachExtent(options, [&rig, equal](DType dtype, int64_t n) {
        return AllToAllOnce(rig, dtype, Matrix(rig.size(), n, equal), equal);
      });
    });
  }
  add("BroadcastFromEveryRoot", [options](Rig& rig) {
    return ForEachExtent(options, [&rig](DType dtype, int64_t n) -> absl::Status {
      for (int root = 0; root < rig.size(); ++root) EK_RETURN_IF_ERROR(BroadcastOnce(rig, dtype, root, n));
      return absl::OkStatus();
    });
  });
  add("Barrier", [](Rig& rig) -> absl::Status {
    for (int i = 0; i < 5; ++i) EK_RETURN_IF_ERROR(rig.Finish(rig.group().Barrier(rig.stream()), 0));
    return absl::OkStatus();
  });
  add("SendRecvRound", [options](Rig& rig) {
    if (rig.size() == 1) return absl::OkStatus();
    return ForEachExtent(options, [&rig](DType dtype, int64_t n) { return SendRecvOnce(rig, dtype, n); });
  });
  add("C15_UnalignedBuffers", Unaligned);
  add("C16_NanInfinityAndZeroOnEveryRank", SpecialValues);
  add("C18_BucketsChangeNoBitAndRanksAgree", [options](Rig& rig) { return BucketsAndRanks(rig, options); });
  cases.push_back({"SubGroupsInTurn", 1, [options](Backend& backend) { return SubGroups(backend, options); }});
  return cases;
}

}  // namespace evenkeel::comm
