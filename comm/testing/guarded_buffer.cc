#include "evenkeel/comm/testing/guarded_buffer.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/reduce_op.h"

namespace evenkeel::comm {
namespace {

constexpr int64_t kGuardBytes = 64;
constexpr std::byte kPattern{0xc7};

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A random fraction at a random power of two around 1.
float FloatOf(uint64_t bits) {
  const uint32_t exponent = 121 + static_cast<uint32_t>(bits >> 60) % 12;
  return std::bit_cast<float>((static_cast<uint32_t>(bits) & 0x807fffffu) | (exponent << 23));
}

template <typename T>
T ElementOf(uint64_t bits) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>(FloatOf(bits)) * (1.0 + std::ldexp(static_cast<double>(bits >> 40), -30));
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    return T(FloatOf(bits));
  }
}

template <typename T>
std::vector<std::byte> UniqueTyped(int rank, uint64_t salt, int64_t n) {
  std::vector<std::byte> bytes(n * sizeof(T));
  const uint64_t key = Mix(salt * 1000003 + static_cast<uint64_t>(rank));
  for (int64_t i = 0; i < n; ++i) {
    const T value = ElementOf<T>(Mix(key + static_cast<uint64_t>(i)));
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

template <typename T>
auto Wide(T value) {
  if constexpr (std::is_same_v<T, BF16> || std::is_same_v<T, F16>) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}

template <typename A>
A Combine(ReduceOp op, A a, A b) {
  if constexpr (std::is_floating_point_v<A>) {
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
    if (a == b) return std::signbit(a) == (op == ReduceOp::kMax) ? b : a;
    return (a > b) == (op == ReduceOp::kMax) ? a : b;
  } else {
    using U = std::make_unsigned_t<A>;
    if (op == ReduceOp::kSum) return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    if (op == ReduceOp::kBitOr) return static_cast<A>(a | b);
    return (a > b) == (op == ReduceOp::kMax) ? a : b;
  }
}

template <typename A>
A Tree(ReduceOp op, const A* values, int length) {
  if (length == 1) return values[0];
  int split = 1;
  while (2 * split < length) split *= 2;
  return Combine(op, Tree(op, values, split), Tree(op, values + split, length - split));
}

// The error bound of a sum along a tree of `ranks` leaves: one rounding a level, and the last one into the type.
template <typename T, typename A>
double SumBound(int ranks, double magnitude, double result) {
  const double levels = std::ceil(std::log2(std::max(2, ranks)));
  const double output_epsilon = std::is_same_v<T, BF16> ? 0x1p-8 : std::is_same_v<T, F16> ? 0x1p-11 : 0.0;
  const double smallest = std::is_same_v<T, F16> ? 0x1p-24 : 0.0;
  return (levels + 1) * std::numeric_limits<A>::epsilon() * magnitude + output_epsilon * std::abs(result) + smallest;
}

template <typename T>
std::vector<std::byte> OracleTyped(ReduceOp op, const std::vector<std::vector<std::byte>>& inputs,
                                   std::string* complaint) {
  using A = decltype(Wide(T()));
  const int ranks = static_cast<int>(inputs.size());
  std::vector<std::byte> result(inputs[0].size());
  std::vector<A> values(ranks);
  for (size_t at = 0; at + sizeof(T) <= result.size(); at += sizeof(T)) {
    double exact = 0;
    double magnitude = 0;
    for (int r = 0; r < ranks; ++r) {
      T element;
      std::memcpy(&element, inputs[r].data() + at, sizeof(T));
      values[r] = Wide(element);
      exact += static_cast<double>(values[r]);
      magnitude += std::abs(static_cast<double>(values[r]));
    }
    A value = Tree(op, values.data(), ranks);
    if constexpr (std::is_floating_point_v<A>) {
      if (op == ReduceOp::kAvg && ranks > 1) value /= static_cast<A>(ranks);
      const double scale = op == ReduceOp::kAvg ? ranks : 1;
      const bool sums = op == ReduceOp::kSum || op == ReduceOp::kAvg;
      const double stored = static_cast<double>(Wide(T(value)));
      if (sums && std::isfinite(stored) &&
          std::abs(stored - exact / scale) > SumBound<T, A>(ranks, magnitude / scale, exact / scale)) {
        *complaint = absl::StrCat("element ", at / sizeof(T), ": ", stored, " is too far from ", exact / scale);
      }
    }
    const T stored = T(value);
    std::memcpy(result.data() + at, &stored, sizeof(T));
  }
  return result;
}

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t bytes, int skew)
    : bytes_(bytes), begin_(kGuardBytes + skew), storage_(bytes + 2 * kGuardBytes + skew, kPattern) {}

void GuardedBuffer::Write(absl::Span<const std::byte> bytes, int64_t at) {
  if (!bytes.empty()) std::memcpy(data() + at, bytes.data(), bytes.size());
}

TensorView GuardedBuffer::View(DType dtype, int64_t begin, int64_t elements) {
  return TensorView(elements == 0 ? nullptr : data() + begin * SizeOf(dtype), dtype, Shape({elements}));
}

TensorView GuardedBuffer::View(DType dtype) { return View(dtype, 0, bytes_ / SizeOf(dtype)); }

absl::Status GuardedBuffer::CheckGuards(absl::string_view what) const {
  for (int64_t i = 0; i < static_cast<int64_t>(storage_.size()); ++i) {
    if (i >= begin_ && i < begin_ + bytes_) continue;
    if (storage_[i] != kPattern) {
      return absl::DataLossError(absl::StrCat(what, ": byte ", i - begin_, " outside [0, ", bytes_, ") was written"));
    }
  }
  return absl::OkStatus();
}

absl::Status GuardedBuffer::CheckUntouched(absl::string_view what) const {
  for (size_t i = 0; i < storage_.size(); ++i) {
    if (storage_[i] != remembered_[i]) {
      return absl::DataLossError(absl::StrCat(what, ": byte ", static_cast<int64_t>(i) - begin_, " was changed"));
    }
  }
  return absl::OkStatus();
}

absl::Status GuardedBuffer::CheckData(absl::string_view what, DType dtype, absl::Span<const std::byte> expected) const {
  if (static_cast<int64_t>(expected.size()) != bytes_) {
    return absl::InternalError(absl::StrCat(what, ": compared with ", expected.size(), " bytes, has ", bytes_));
  }
  if (bytes_ == 0 || std::memcmp(storage_.data() + begin_, expected.data(), expected.size()) == 0) {
    return absl::OkStatus();
  }
  int64_t at = 0;
  while (storage_[begin_ + at] == expected[at]) ++at;
  return absl::DataLossError(absl::StrCat(what, ": element ", at / SizeOf(dtype), " of ", bytes_ / SizeOf(dtype), " ",
                                          DTypeName(dtype), " is wrong"));
}

std::vector<std::byte> UniqueData(DType dtype, int rank, uint64_t salt, int64_t n) {
  switch (dtype) {
    case DType::kF32:
      return UniqueTyped<float>(rank, salt, n);
    case DType::kBF16:
      return UniqueTyped<BF16>(rank, salt, n);
    case DType::kF64:
      return UniqueTyped<double>(rank, salt, n);
    case DType::kI32:
      return UniqueTyped<int32_t>(rank, salt, n);
    case DType::kI64:
      return UniqueTyped<int64_t>(rank, salt, n);
    case DType::kU8:
      return UniqueTyped<uint8_t>(rank, salt, n);
    case DType::kF16:
      return UniqueTyped<F16>(rank, salt, n);
  }
  return {};
}

std::vector<std::byte> ReductionOracle(DType dtype, ReduceOp op, const std::vector<std::vector<std::byte>>& inputs,
                                       std::string* complaint) {
  switch (dtype) {
    case DType::kF32:
      return OracleTyped<float>(op, inputs, complaint);
    case DType::kBF16:
      return OracleTyped<BF16>(op, inputs, complaint);
    case DType::kF64:
      return OracleTyped<double>(op, inputs, complaint);
    case DType::kI32:
      return OracleTyped<int32_t>(op, inputs, complaint);
    case DType::kI64:
      return OracleTyped<int64_t>(op, inputs, complaint);
    case DType::kU8:
      return OracleTyped<uint8_t>(op, inputs, complaint);
    case DType::kF16:
      return OracleTyped<F16>(op, inputs, complaint);
  }
  return {};
}

}  // namespace evenkeel::comm
