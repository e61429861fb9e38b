// The safetensors file layout: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes.
// Format: https://github.com/huggingface/safetensors#format. Readable by every framework, and inert: nothing in it
// runs.
//
//   [u64 n][n bytes of JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}][data]
//
// Everything is checked before anything is allocated: the length against a cap and the file, offsets against an exact
// cover (no hole, no overlap, nothing behind the last tensor), shape x dtype against the extent, unique names.
// Pure: works on bytes that the caller read. Thread-safe.
#ifndef EVENKEEL_RUNTIME_TENSOR_SAFETENSORS_H_
#define EVENKEEL_RUNTIME_TENSOR_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"

namespace evenkeel {

// One tensor. `begin` and `end` are byte offsets into the data section.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t begin = 0;
  int64_t end = 0;

  friend bool operator==(const SafetensorsEntry&, const SafetensorsEntry&) = default;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;        // ascending by begin
  std::map<std::string, std::string> metadata;  // "__metadata__"
  int64_t data_offset = 0;                      // where the data section begins in the file: 8 + header length

  // The entry called `name`, or null.
  const SafetensorsEntry* Find(absl::string_view name) const;
};

// The longest header that is read or written.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100 * 1000 * 1000;

// The length field: `first_bytes` are the first 8 bytes of a file of `file_bytes` bytes. Returns the length n of the
// JSON header. DataLoss naming found and possible lengths when the file is too short; InvalidArgument beyond the cap.
absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes, int64_t file_bytes);

// Parses the n bytes of JSON of a file of `file_bytes` bytes. InvalidArgument naming the tensor and the numbers on any
// violation; DataLoss when the file is shorter or longer than the header says.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, int64_t file_bytes);

// Lays out tensors back to back in the given order (offsets of the input are ignored) and returns the bytes that stand
// in front of the data: length field and JSON, padded with spaces so that the data begins at a multiple of 8.
// InvalidArgument on an empty, doubled or reserved name or on overflow. `entries` receive their offsets.
absl::StatusOr<std::string> BuildSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                                   const std::map<std::string, std::string>& metadata);

// "F32", "BF16", ...: the format's own names.
absl::string_view SafetensorsDTypeName(DType dtype);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_TENSOR_SAFETENSORS_H_
