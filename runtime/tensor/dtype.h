// Element types and their scalar conversions.
#ifndef EVENKEEL_RUNTIME_TENSOR_DTYPE_H_
#define EVENKEEL_RUNTIME_TENSOR_DTYPE_H_

#include <bit>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

// The values travel in fingerprints and files: append only.
enum class DType : uint8_t { kF32 = 0, kBF16 = 1, kF64 = 2, kI32 = 3, kI64 = 4, kU8 = 5, kF16 = 6 };
inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kI32,
                                       DType::kI64, DType::kU8,   DType::kF16};

// Bytes per element.
constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr bool IsFloating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF64 || dtype == DType::kF16;
}

// bf16 and f16: storage only. Operations compute and sum in f32 and round once per result.
constexpr bool IsHalf(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }
// What values of `dtype` are computed and summed in: f32 for bf16 and f16, else the dtype itself.
constexpr DType WideDType(DType dtype) { return IsHalf(dtype) ? DType::kF32 : dtype; }

// "f32", "bf16", "f64", "i32", "i64", "u8", "f16".
absl::string_view DTypeName(DType dtype);
// Inverse of DTypeName; InvalidArgument listing the names otherwise.
absl::StatusOr<DType> ParseDType(absl::string_view name);

// bfloat16: the upper half of a float. Rounds to nearest even; NaN stays NaN
// (quiet).
struct BF16 {
  uint16_t bits = 0;

  BF16() = default;
  explicit BF16(float value) {
    const uint32_t wide = std::bit_cast<uint32_t>(value);
    if ((wide & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((wide >> 16) | 0x0040u);
    } else {
      bits = static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// IEEE half. Rounds to nearest even, overflows to infinity; NaN stays NaN
// (quiet).
struct F16 {
  uint16_t bits = 0;

  F16() = default;
  explicit F16(float value) {
    const uint32_t wide = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (wide >> 16) & 0x8000u;
    const uint32_t magnitude = wide & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {  // NaN
      bits = static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
      bits = static_cast<uint16_t>(sign | 0x7c00u);
    } else if (magnitude < 0x38800000u) {                           // subnormal half or zero: let a float
                                                                    // addition round
      const float scaled = std::bit_cast<float>(magnitude) + 0.5f;  // 0.5 has an ulp of 2^-24
      bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(scaled) - 0x3f000000u));
    } else {
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
      bits = static_cast<uint16_t>(sign | (rounded >> 13));
    }
  }
  explicit operator float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
};

template <typename T>
struct DTypeTraits;  // no definition: not an element type
template <>
struct DTypeTraits<float> {
  static constexpr DType kDType = DType::kF32;
};
template <>
struct DTypeTraits<BF16> {
  static constexpr DType kDType = DType::kBF16;
};
template <>
struct DTypeTraits<double> {
  static constexpr DType kDType = DType::kF64;
};
template <>
struct DTypeTraits<int32_t> {
  static constexpr DType kDType = DType::kI32;
};
template <>
struct DTypeTraits<int64_t> {
  static constexpr DType kDType = DType::kI64;
};
template <>
struct DTypeTraits<uint8_t> {
  static constexpr DType kDType = DType::kU8;
};
template <>
struct DTypeTraits<F16> {
  static constexpr DType kDType = DType::kF16;
};
// Maps a C++ scalar to its DType: DTypeOf<float> == DType::kF32.
template <typename T>
inline constexpr DType DTypeOf = DTypeTraits<T>::kDType;

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_TENSOR_DTYPE_H_
