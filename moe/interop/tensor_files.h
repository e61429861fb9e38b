// The tensors of a folder of safetensors files, found by name and read as f32.
#ifndef EVENKEEL_MOE_INTEROP_TENSOR_FILES_H_
#define EVENKEEL_MOE_INTEROP_TENSOR_FILES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/tensor/safetensors.h"

namespace evenkeel::moe {

// Immutable after Open. Thread-safe as far as the file system is.
class TensorFiles {
 public:
  // `path`: one file, or a folder. A folder with model.safetensors.index.json (a checkpoint in several files) has the
  // tensors that the index names, each in the file that it says; other files are not looked at. Without an index: every
  // *.safetensors. Reads headers only. NotFound when there is no file, or naming one that the index wants and a tensor
  // in it; InvalidArgument when a name occurs twice, a header or the index is bad, a file lacks a tensor that the index
  // puts there, or the index points out of the folder.
  static absl::StatusOr<TensorFiles> Open(FileSystem* fs, const std::string& path);

  // Null when there is no such tensor.
  const SafetensorsEntry* Find(const std::string& name) const;
  // All names, sorted.
  std::vector<std::string> Names() const;

  // The elements of `name`, which must be [rows, columns] (or [columns] with rows = 1), row-major or, when
  // `transposed`, as [columns, rows]. f32, bf16, f16 or f64 in the file. NotFound, or InvalidArgument naming both
  // shapes.
  absl::Status ReadMatrix(const std::string& name, int64_t rows, int64_t columns, bool transposed, float* out) const;

 private:
  struct Place {
    std::string path;
    int64_t data_offset = 0;
    SafetensorsEntry entry;
  };

  absl::Status AddFile(const std::string& path);
  // By the text of the index; `folder` is for messages and names.
  absl::Status AddIndexed(const std::string& folder, const std::string& index);

  FileSystem* fs_ = nullptr;
  std::map<std::string, Place> places_;
};

}  // namespace evenkeel::moe

#endif  // EVENKEEL_MOE_INTEROP_TENSOR_FILES_H_
