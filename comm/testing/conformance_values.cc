// The conformance cases about what is in the buffers and where they lie.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/reduction.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/conformance_rig.h"
#include "evenkeel/comm/testing/guarded_buffer.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel::comm {
namespace {

constexpr DType kFloating[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};

// C11: nothing at all in every operation (null pointers), then a rank that sends nothing, one that gets nothing.
absl::Status NothingToMove(Rig& rig) {
  const int size = rig.size();
  const Counts none(size, 0);
  for (const DType dtype : kAllDTypes) {
    EK_RETURN_IF_ERROR(AllReduceOnce(rig, dtype, ReduceOp::kSum, 0, false, 0));
    for (const bool equal : {false, true}) {
      EK_RETURN_IF_ERROR(AllGatherOnce(rig, dtype, none, equal, false));
      EK_RETURN_IF_ERROR(ReduceScatterOnce(rig, dtype, ReduceOp::kSum, none, equal, false));
      EK_RETURN_IF_ERROR(AllToAllOnce(rig, dtype, std::vector<Counts>(size, none), equal, 0));
    }
    for (int root = 0; root < size; ++root) EK_RETURN_IF_ERROR(BroadcastOnce(rig, dtype, root, 0));
    if (size > 1) EK_RETURN_IF_ERROR(SendRecvOnce(rig, dtype, 0));
    for (int odd = 0; odd < size; ++odd) {
      Counts counts(size, 5);
      counts[odd] = 0;
      EK_RETURN_IF_ERROR(AllGatherOnce(rig, dtype, counts, false, false));
      EK_RETURN_IF_ERROR(ReduceScatterOnce(rig, dtype, ReduceOp::kSum, counts, false, false));
      std::vector<Counts> no_row(size, Counts(size, 3)), no_column(size, Counts(size, 3));
      no_row[odd] = none;
      for (Counts& row : no_column) row[odd] = 0;
      EK_RETURN_IF_ERROR(AllToAllOnce(rig, dtype, no_row, false, 0));
      EK_RETURN_IF_ERROR(AllToAllOnce(rig, dtype, no_column, false, 0));
    }
  }
  return absl::OkStatus();
}

// C15: every byte offset, of what is sent and of what is received.
absl::Status Unaligned(Rig& rig) {
  for (const DType dtype : kAllDTypes) {
    for (int skew = 0; skew < 16; ++skew) {
      EK_RETURN_IF_ERROR(AllReduceOnce(rig, dtype, ReduceOp::kSum, 301, skew % 2 == 0, skew));
      EK_RETURN_IF_ERROR(AllToAllOnce(rig, dtype, std::vector<Counts>(rig.size(), Counts(rig.size(), 37)), true, skew));
    }
  }
  return absl::OkStatus();
}

template <typename T>
void Put(T value, int i, std::byte* to) {
  std::memcpy(to + i * sizeof(T), &value, sizeof(T));
}
template <typename T>
double Get(int i, const std::byte* from) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  if constexpr (std::is_same_v<T, double>) return value;
  return static_cast<double>(static_cast<float>(value));
}

void PutFloat(DType dtype, float value, int i, std::byte* to) {
  if (dtype == DType::kF64) return Put(static_cast<double>(value), i, to);
  if (dtype == DType::kF32) return Put(value, i, to);
  if (dtype == DType::kBF16) return Put(BF16(value), i, to);
  Put(F16(value), i, to);
}
double GetFloat(DType dtype, int i, const std::byte* from) {
  if (dtype == DType::kF64) return Get<double>(i, from);
  if (dtype == DType::kF32) return Get<float>(i, from);
  return dtype == DType::kBF16 ? Get<BF16>(i, from) : Get<F16>(i, from);
}

// All ranks hold the same bytes.
absl::Status SameOnAllRanks(Rig& rig, const std::byte* data, int64_t bytes) {
  const auto digest = static_cast<int64_t>(Digest64(data, static_cast<size_t>(bytes)));
  std::vector<int64_t> digests(rig.size());
  EK_RETURN_IF_ERROR(rig.group().AllGather(ConstTensorView(&digest, DType::kI64, Shape({1})),
                                           TensorView(digests.data(), DType::kI64, Shape({rig.size()})), rig.stream()));
  EK_RETURN_IF_ERROR(rig.stream().Synchronize());
  for (int r = 0; r < rig.size(); ++r) {
    if (digests[r] != digest) return absl::InternalError(absl::StrCat("rank ", r, " holds other bits"));
  }
  return absl::OkStatus();
}

// What rank `odd` holds meets finite values of the others.
absl::Status SpecialValuesOnce(Rig& rig, DType dtype, ReduceOp op, int odd) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const bool is_odd = rig.rank() == odd;
  alignas(16) std::byte values[4 * sizeof(double)];
  const float mine[] = {is_odd ? kNan : static_cast<float>(rig.rank() + 1), is_odd ? kInf : 1.0f,
                        is_odd ? -kInf : -1.0f, is_odd ? -0.0f : 0.0f};
  for (int i = 0; i < 4; ++i) PutFloat(dtype, mine[i], i, values);
  const TensorView view(values, dtype, Shape({4}));
  EK_RETURN_IF_ERROR(rig.group().AllReduce(view, view, op, rig.stream()));
  EK_RETURN_IF_ERROR(rig.stream().Synchronize());
  const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg, one = rig.size() == 1;
  const double plus = sums || op == ReduceOp::kMax || one ? kInf : 1.0;
  const double minus = sums || op == ReduceOp::kMin || one ? -kInf : -1.0;
  const bool negative_zero = op == ReduceOp::kMin || one;
  double got[4];
  for (int i = 0; i < 4; ++i) got[i] = GetFloat(dtype, i, values);
  if (!std::isnan(got[0]) || got[1] != plus || got[2] != minus || got[3] != 0.0 ||
      std::signbit(got[3]) != negative_zero) {
    return absl::InternalError(absl::StrCat(DTypeName(dtype), " ", ReduceOpName(op), " with the odd rank ", odd,
                                            " gives ", got[0], ", ", got[1], ", ", got[2], ", ", got[3]));
  }
  return SameOnAllRanks(rig, values, 4 * SizeOf(dtype));
}

// C16: a NaN, infinities and a negative zero on every rank in turn.
absl::Status SpecialValues(Rig& rig) {
  for (const DType dtype : kFloating) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kAvg}) {
      for (int odd = 0; odd < rig.size(); ++odd) EK_RETURN_IF_ERROR(SpecialValuesOnce(rig, dtype, op, odd));
    }
  }
  return absl::OkStatus();
}

// C17: large addends that cancel over the ranks, then one that a 16-bit running sum would lose; and an average whose
// sum has no 16-bit value.
absl::Status SixteenBitSums(Rig& rig) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (int odd = 0; odd < rig.size(); ++odd) {
      std::byte values[2 * sizeof(double)];
      const int next = (odd + 1) % rig.size();
      const float addend = rig.rank() == odd ? 1e4f : rig.rank() == next ? -1e4f : 1.0f;
      PutFloat(dtype, rig.size() == 1 ? 1.0f : addend, 0, values);
      PutFloat(dtype, 6e4f, 1, values);
      const TensorView view(values, dtype, Shape({2}));
      const TensorView sum(values, dtype, Shape({1})), average(values + 2, dtype, Shape({1}));
      EK_RETURN_IF_ERROR(rig.group().AllReduce(sum, sum, ReduceOp::kSum, rig.stream()));
      EK_RETURN_IF_ERROR(rig.group().AllReduce(average, average, ReduceOp::kAvg, rig.stream()));
      EK_RETURN_IF_ERROR(rig.stream().Synchronize());
      std::byte large[sizeof(double)];
      PutFloat(dtype, 6e4f, 0, large);
      const double expected = rig.size() == 1 ? 1.0 : rig.size() - 2;
      if (GetFloat(dtype, 0, values) != expected || GetFloat(dtype, 1, values) != GetFloat(dtype, 0, large)) {
        return absl::InternalError(absl::StrCat(DTypeName(dtype), ": sum ", GetFloat(dtype, 0, values), ", wanted ",
                                                expected, "; average ", GetFloat(dtype, 1, values)));
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
  return SameOnAllRanks(rig, expected.data(), n * 4);
}

// By group size, from 1: a digest of what sums and averages give in all floating dtypes, on every backend, in every
// form, in pieces of any size, on any machine. It changes with the tree, the rounding, or the data of UniqueData only.
constexpr uint64_t kKnownBits[] = {
    0xc47e1ad7e20ae345, 0xbe576ca9ad39ad09, 0xbbfb0711732e2bad, 0xe200813b8e52f34f,
    0xd9c4fd98e668fc68, 0x6a4d33d35def5fe9, 0x80194abbacc9d1f5, 0x4e9372e110fdcdb5,
};

absl::Status KnownBits(Rig& rig) {
  constexpr int64_t kN = 1021;
  if (rig.size() > static_cast<int>(std::size(kKnownBits))) return absl::OkStatus();
  uint64_t digest = 0;
  for (const DType dtype : kFloating) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg}) {
      GuardedBuffer values(kN * SizeOf(dtype));
      values.Write(UniqueData(dtype, rig.rank(), 19, kN));
      EK_RETURN_IF_ERROR(rig.group().AllReduce(values.View(dtype), values.View(dtype), op, rig.stream()));
      EK_RETURN_IF_ERROR(rig.stream().Synchronize());
      digest = CombineDigests(digest, Digest64(values.data(), static_cast<size_t>(values.bytes())));
    }
  }
  if (digest == kKnownBits[rig.size() - 1]) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat("the sums of %d ranks have digest %#x", rig.size(), digest));
}

}  // namespace

std::vector<ConformanceCase> ValueCases(const ConformanceOptions& options) {
  return {RigCase(options, "C11_NothingToMove", NothingToMove),
          RigCase(options, "C15_UnalignedBuffers", Unaligned),
          RigCase(options, "C16_NanInfinityAndZeroOnEveryRank", SpecialValues),
          RigCase(options, "C17_SixteenBitSumsAndAverages", SixteenBitSums),
          RigCase(options, "C18_SumsHaveTheirKnownBits", KnownBits),
          RigCase(options, "C18_BucketsChangeNoBitAndRanksAgree",
                  [options](Rig& rig) { return BucketsAndRanks(rig, options); })};
}

}  // namespace evenkeel::comm
