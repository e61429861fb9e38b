#include "evenkeel/comm/reduction.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

// `out` may be one of the sources at the same index: no other dependence between iterations.
#if defined(__clang__)
// Where vectorizing is off (sanitizers) or does not pay, the plain loop is right too.
#pragma clang diagnostic ignored "-Wpass-failed"
#define EK_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define EK_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace evenkeel::comm {
namespace {

// Elements of a subtree's result between two levels of the tree: small enough for the first cache.
constexpr int64_t kBlock = 1024;
// Ranges of up to this many ranks are combined in registers.
constexpr int kMaxDirect = 4;

// How an element lies in memory (at any byte address) and what it is combined in.
template <typename T>
struct Stored {
  typedef T Bits __attribute__((aligned(1), may_alias));
  using Accumulator = T;
  static T Widen(T value) { return value; }
  static T Narrow(T value) { return value; }
};

template <>
struct Stored<BF16> {
  typedef uint16_t Bits __attribute__((aligned(1), may_alias));
  using Accumulator = float;
  static float Widen(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
  static uint16_t Narrow(float value) { return BF16(value).bits; }
};

template <>
struct Stored<F16> {
  typedef uint16_t Bits __attribute__((aligned(1), may_alias));
  using Accumulator = float;
  // Exact: shifts the fields into place and rescales the exponent; infinities and NaN get a full exponent.
  static float Widen(uint16_t bits) {
    const uint32_t magnitude = uint32_t{bits} & 0x7fffu;
    const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f);
    const uint32_t special = magnitude >= 0x7c00u ? 0x7f800000u : 0u;
    return std::bit_cast<float>(((uint32_t{bits} & 0x8000u) << 16) | scaled | special);
  }
  static uint16_t Narrow(float value) { return F16(value).bits; }
};

template <typename A>
using BitsOf = std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>;

struct Sum {
  template <typename A>
  static A Apply(A a, A b) {
    if constexpr (std::is_floating_point_v<A>) {
      return a + b;
    } else {
      using U = std::make_unsigned_t<A>;  // wraps instead of overflowing
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    }
  }
};

// Equal values have equal bits, but for the two zeros: there `and` gives +0 and `or` gives -0.
struct Max {
  template <typename A>
  static A Apply(A a, A b) {
    if constexpr (std::is_floating_point_v<A>) {
      const A both = std::bit_cast<A>(std::bit_cast<BitsOf<A>>(a) & std::bit_cast<BitsOf<A>>(b));
      return a == b ? both : ((a > b || a != a) ? a : b);
    } else {
      return a > b ? a : b;
    }
  }
};

struct Min {
  template <typename A>
  static A Apply(A a, A b) {
    if constexpr (std::is_floating_point_v<A>) {
      const A either = std::bit_cast<A>(std::bit_cast<BitsOf<A>>(a) | std::bit_cast<BitsOf<A>>(b));
      return a == b ? either : ((a < b || a != a) ? a : b);
    } else {
      return a < b ? a : b;
    }
  }
};

struct BitOr {
  template <typename A>
  static A Apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};

constexpr int SplitOf(int length) {
  int split = 1;
  while (split * 2 < length) split *= 2;
  return split;
}

// The tree over sources[kBegin, kBegin + kLength) at index i, in registers.
template <typename In, typename Op, int kBegin, int kLength>
inline typename Stored<In>::Accumulator Tree(const typename Stored<In>::Bits* const* sources, int64_t i) {
  if constexpr (kLength == 1) {
    return Stored<In>::Widen(sources[kBegin][i]);
  } else {
    constexpr int kSplit = SplitOf(kLength);
    return Op::Apply(Tree<In, Op, kBegin, kSplit>(sources, i),
                     Tree<In, Op, kBegin + kSplit, kLength - kSplit>(sources, i));
  }
}

// out[i] = tree over kLength sources, divided by `divisor` where kDivide says so.
template <typename In, typename Out, typename Op, int kLength, bool kDivide>
void Direct(const void* const* sources, int64_t begin, void* out, int64_t n, int divisor) {
  using A = typename Stored<In>::Accumulator;
  const typename Stored<In>::Bits* in[kLength];
  for (int r = 0; r < kLength; ++r) in[r] = static_cast<const typename Stored<In>::Bits*>(sources[r]) + begin;
  typename Stored<Out>::Bits* const to = static_cast<typename Stored<Out>::Bits*>(out);
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) {
    A value = Tree<In, Op, 0, kLength>(in, i);
    if constexpr (kDivide) value = value / static_cast<A>(divisor);
    to[i] = Stored<Out>::Narrow(value);
  }
}

template <typename In, typename Out, typename Op, bool kDivide>
void DirectAny(const void* const* sources, int length, int64_t begin, void* out, int64_t n, int divisor) {
  switch (length) {
    case 1:
      return Direct<In, Out, Op, 1, kDivide>(sources, begin, out, n, divisor);
    case 2:
      return Direct<In, Out, Op, 2, kDivide>(sources, begin, out, n, divisor);
    case 3:
      return Direct<In, Out, Op, 3, kDivide>(sources, begin, out, n, divisor);
    default:
      return Direct<In, Out, Op, 4, kDivide>(sources, begin, out, n, divisor);
  }
}

// The subtree over sources[0, length) into `out`, which holds accumulators; n <= kBlock.
template <typename T, typename Op>
void Subtree(const void* const* sources, int length, int64_t begin, typename Stored<T>::Accumulator* out, int64_t n) {
  using A = typename Stored<T>::Accumulator;
  if (length <= kMaxDirect) return DirectAny<T, A, Op, false>(sources, length, begin, out, n, 1);
  A right[kBlock];
  const int split = SplitOf(length);
  Subtree<T, Op>(sources, split, begin, out, n);
  Subtree<T, Op>(sources + split, length - split, begin, right, n);
  const void* const halves[] = {out, right};
  Direct<A, A, Op, 2, false>(halves, 0, out, n, 1);
}

// In is T, or the accumulator of T where the sources are partial results.
template <typename In, typename T, typename Op, bool kDivide>
void Reduce(absl::Span<const void* const> sources, int divisor, void* out, int64_t n) {
  using A = typename Stored<T>::Accumulator;
  const int length = static_cast<int>(sources.size());
  if (length <= kMaxDirect) return DirectAny<In, T, Op, kDivide>(sources.data(), length, 0, out, n, divisor);
  A left[kBlock], right[kBlock];
  const int split = SplitOf(length);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    Subtree<In, Op>(sources.data(), split, begin, left, count);
    Subtree<In, Op>(sources.data() + split, length - split, begin, right, count);
    const void* const halves[] = {left, right};
    Direct<A, T, Op, 2, kDivide>(halves, 0, static_cast<typename Stored<T>::Bits*>(out) + begin, count, divisor);
  }
}

template <typename In, typename T, bool kAverages>
void ReduceTyped(ReduceOp op, absl::Span<const void* const> sources, int divisor, void* out, int64_t n) {
  constexpr bool kFloating = std::is_floating_point_v<typename Stored<T>::Accumulator>;
  switch (op) {
    case ReduceOp::kSum:
      return Reduce<In, T, Sum, false>(sources, divisor, out, n);
    case ReduceOp::kMax:
      return Reduce<In, T, Max, false>(sources, divisor, out, n);
    case ReduceOp::kMin:
      return Reduce<In, T, Min, false>(sources, divisor, out, n);
    case ReduceOp::kAvg:
      if constexpr (kFloating) return Reduce<In, T, Sum, kAverages>(sources, divisor, out, n);
      break;
    case ReduceOp::kBitOr:
      if constexpr (!kFloating) return Reduce<In, T, BitOr, false>(sources, divisor, out, n);
      break;
  }
  EK_CHECK(false && "operator not offered for this dtype");
}

enum class Step { kWhole, kToPartial, kFromPartials };

template <typename T>
void ReduceStep(Step step, ReduceOp op, absl::Span<const void* const> sources, int num_ranks, void* out, int64_t n) {
  using A = typename Stored<T>::Accumulator;
  if (step == Step::kWhole) return ReduceTyped<T, T, true>(op, sources, num_ranks, out, n);
  if (step == Step::kToPartial) return ReduceTyped<T, A, false>(op, sources, num_ranks, out, n);
  return ReduceTyped<A, T, true>(op, sources, num_ranks, out, n);
}

void ReduceAny(Step step, DType dtype, ReduceOp op, absl::Span<const void* const> sources, int num_ranks, void* out,
               int64_t n) {
  EK_CHECK(!sources.empty());
  if (n == 0) return;
  switch (dtype) {
    case DType::kF32:
      return ReduceStep<float>(step, op, sources, num_ranks, out, n);
    case DType::kBF16:
      return ReduceStep<BF16>(step, op, sources, num_ranks, out, n);
    case DType::kF64:
      return ReduceStep<double>(step, op, sources, num_ranks, out, n);
    case DType::kI32:
      return ReduceStep<int32_t>(step, op, sources, num_ranks, out, n);
    case DType::kI64:
      return ReduceStep<int64_t>(step, op, sources, num_ranks, out, n);
    case DType::kU8:
      return ReduceStep<uint8_t>(step, op, sources, num_ranks, out, n);
    case DType::kF16:
      return ReduceStep<F16>(step, op, sources, num_ranks, out, n);
  }
}

}  // namespace

int CanonicalSplit(int length) {
  EK_CHECK(length >= 2);
  return SplitOf(length);
}

absl::Status CheckReduction(DType dtype, ReduceOp op) {
  if (static_cast<int>(op) > static_cast<int>(ReduceOp::kBitOr)) {
    return absl::InvalidArgumentError(absl::StrCat("unknown reduction operator ", static_cast<int>(op)));
  }
  if (op == ReduceOp::kBitOr && IsFloating(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("bitor is not offered for ", DTypeName(dtype)));
  }
  if (op == ReduceOp::kAvg && !IsFloating(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat("avg is not offered for ", DTypeName(dtype)));
  }
  return absl::OkStatus();
}

void ReduceCanonical(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* out, int64_t n) {
  if (sources.size() == 1 && n > 0) {
    if (out != sources[0]) std::memcpy(out, sources[0], static_cast<size_t>(n * SizeOf(dtype)));
    return;
  }
  ReduceAny(Step::kWhole, dtype, op, sources, static_cast<int>(sources.size()), out, n);
}

int64_t AccumulatorBytes(DType dtype) { return std::max<int64_t>(SizeOf(dtype), IsFloating(dtype) ? 4 : 1); }

void ReduceToPartial(DType dtype, ReduceOp op, absl::Span<const void* const> sources, void* partial, int64_t n) {
  ReduceAny(Step::kToPartial, dtype, op, sources, 1, partial, n);
}

void ReducePartials(DType dtype, ReduceOp op, absl::Span<const void* const> partials, int num_ranks, void* out,
                    int64_t n) {
  ReduceAny(Step::kFromPartials, dtype, op, partials, num_ranks, out, n);
}

}  // namespace evenkeel::comm
