#include "evenkeel/runtime/tensor/dtype.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF64:
      return "f64";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
    case DType::kF16:
      return "f16";
  }
  return "unknown";
}

absl::StatusOr<DType> ParseDType(absl::string_view name) {
  std::string known;
  for (DType dtype : kAllDTypes) {
    if (DTypeName(dtype) == name) return dtype;
    absl::StrAppend(&known, known.empty() ? "" : ", ", DTypeName(dtype));
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown dtype '", name, "'; known: ", known));
}

}  // namespace evenkeel
