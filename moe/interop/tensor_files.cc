#include "evenkeel/moe/interop/tensor_files.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"

namespace evenkeel::moe {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;

template <typename T>
float ElementAt(const char* bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return static_cast<float>(value);
}

float ElementAsFloat(DType dtype, const char* bytes, int64_t i) {
  switch (dtype) {
    case DType::kBF16:
      return ElementAt<BF16>(bytes, i);
    case DType::kF16:
      return ElementAt<F16>(bytes, i);
    case DType::kF64:
      return ElementAt<double>(bytes, i);
    default:
      return ElementAt<float>(bytes, i);
  }
}

}  // namespace

absl::StatusOr<TensorFiles> TensorFiles::Open(FileSystem* fs, const std::string& path) {
  TensorFiles files;
  files.fs_ = fs;
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs->List(path);
  if (!entries.ok()) {
    EK_RETURN_IF_ERROR(files.AddFile(path));
    return files;
  }
  for (const DirectoryEntry& entry : *entries) {
    if (entry.name != kIndexFile) continue;
    EK_ASSIGN_OR_RETURN(const std::string index, ReadFile(*fs, absl::StrCat(path, "/", kIndexFile), kMaxIndexBytes));
    EK_RETURN_IF_ERROR(files.AddIndexed(path, index));
    return files;
  }
  for (const DirectoryEntry& entry : *entries) {
    if (!absl::EndsWith(entry.name, ".safetensors")) continue;
    EK_RETURN_IF_ERROR(files.AddFile(absl::StrCat(path, "/", entry.name)));
  }
  if (files.places_.empty()) return absl::NotFoundError(absl::StrCat("no safetensors file in ", path));
  return files;
}

absl::Status TensorFiles::AddIndexed(const std::string& folder, const std::string& index) {
  const Json json = Json::parse(index.begin(), index.end(), nullptr, /*allow_exceptions=*/false);
  const auto bad = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(kIndexFile, ": ", what));
  };
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return bad("has no object weight_map");
  }
  std::map<std::string, std::vector<std::string>> tensors_of_file;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) return bad(absl::StrCat("the file of ", tensor, " is not a text"));
    const std::string name = file.get<std::string>();
    if (name.find('/') != std::string::npos || !absl::EndsWith(name, ".safetensors")) {
      return bad(absl::StrCat("'", name, "' of ", tensor, " is no safetensors file of the folder"));
    }
    tensors_of_file[name].push_back(tensor);
  }
  if (tensors_of_file.empty()) return bad("weight_map is empty");
  for (const auto& [name, tensors] : tensors_of_file) {
    const std::string path = absl::StrCat(folder, "/", name);
    const absl::Status added = AddFile(path);
    if (absl::IsNotFound(added)) {
      return absl::NotFoundError(
          absl::StrCat(path, " is missing; ", kIndexFile, " puts ", tensors[0],
                       tensors.size() > 1 ? absl::StrCat(" and ", tensors.size() - 1, " more") : "", " there"));
    }
    EK_RETURN_IF_ERROR(added);
    for (const std::string& tensor : tensors) {
      const auto found = places_.find(tensor);
      if (found == places_.end() || found->second.path != path) return bad(absl::StrCat(tensor, " is not in ", name));
    }
  }
  return absl::OkStatus();
}

absl::Status TensorFiles::AddFile(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const int64_t size, fs_->FileSize(path));
  EK_ASSIGN_OR_RETURN(const std::string first, fs_->Read(path, 0, std::min(size, kLengthBytes)));
  const absl::StatusOr<int64_t> length = ParseSafetensorsLength(first, size);
  if (!length.ok()) return Annotate(length.status(), path);
  EK_ASSIGN_OR_RETURN(const std::string json, fs_->Read(path, kLengthBytes, *length));
  absl::StatusOr<SafetensorsHeader> header = ParseSafetensorsHeader(json, size);
  if (!header.ok()) return Annotate(header.status(), path);
  for (SafetensorsEntry& entry : header->tensors) {
    const std::string name = entry.name;
    if (!places_.emplace(name, Place{path, header->data_offset, std::move(entry)}).second) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", name, " is in another file too"));
    }
  }
  return absl::OkStatus();
}

const SafetensorsEntry* TensorFiles::Find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->second.entry;
}

std::vector<std::string> TensorFiles::Names() const {
  std::vector<std::string> names;
  for (const auto& [name, place] : places_) names.push_back(name);
  return names;
}

absl::Status TensorFiles::ReadMatrix(const std::string& name, int64_t rows, int64_t columns, bool transposed,
                                     float* out) const {
  const auto found = places_.find(name);
  if (found == places_.end()) return absl::NotFoundError(absl::StrCat("the checkpoint has no tensor ", name));
  const Place& place = found->second;
  const Shape& shape = place.entry.shape;
  const bool fits = (shape.rank() == 2 && shape.dim(0) == rows && shape.dim(1) == columns) ||
                    (shape.rank() == 1 && rows == 1 && shape.dim(0) == columns);
  if (!fits || !IsFloating(place.entry.dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", DTypeName(place.entry.dtype), " ", shape.ToString(),
                                                   ", wanted floats [", rows, ", ", columns, "]"));
  }
  EK_ASSIGN_OR_RETURN(const std::string bytes, fs_->Read(place.path, place.data_offset + place.entry.begin,
                                                         place.entry.end - place.entry.begin));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      out[transposed ? c * rows + r : r * columns + c] =
          ElementAsFloat(place.entry.dtype, bytes.data(), r * columns + c);
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::moe
