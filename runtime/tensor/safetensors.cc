#include "evenkeel/runtime/tensor/safetensors.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr int kLengthBytes = 8;
constexpr int kMaxRank = 16;
constexpr char kMetadataKey[] = "__metadata__";

std::optional<DType> DTypeFromName(absl::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (SafetensorsDTypeName(dtype) == name) return dtype;
  }
  return std::nullopt;
}

// Reads the header event by event, so that doubled names are seen and nesting cannot grow: a tree of values would
// silently keep the last of two equal keys.
class HeaderReader {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  bool null() { return Fail("null"); }
  bool boolean(bool) { return Fail("a boolean"); }
  bool number_integer(number_integer_t value) { return Fail(absl::StrCat("the negative number ", value)); }
  bool number_float(number_float_t, const string_t& text) { return Fail(absl::StrCat("the number ", text)); }
  bool binary(binary_t&) { return Fail("binary data"); }

  bool number_unsigned(number_unsigned_t value) {
    if (value > static_cast<number_unsigned_t>(INT64_MAX)) return Fail(absl::StrCat("the number ", value));
    if (place_ == Place::kShape) {
      if (static_cast<int>(shape_.size()) == kMaxRank) return Fail("more than 16 extents");
      shape_.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets) {
      if (offsets_.size() == 2) return Fail("more than 2 offsets");
      offsets_.push_back(static_cast<int64_t>(value));
      return true;
    }
    return Fail(absl::StrCat("the number ", value));
  }
  bool string(string_t& value) {
    if (place_ == Place::kMetadata) {
      header_.metadata[field_] = value;
      return true;
    }
    if (place_ != Place::kTensor || field_ != "dtype") return Fail(absl::StrCat("the text '", value, "'"));
    dtype_ = DTypeFromName(value);
    return dtype_.has_value() || Fail(absl::StrCat("the unknown dtype '", value, "'"));
  }
  bool start_object(size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ != Place::kTop) return Fail("a nested object");
    fields_.clear();
    place_ = name_ == kMetadataKey ? Place::kMetadata : Place::kTensor;
    dtype_.reset();
    shape_.clear();
    offsets_.clear();
    return true;
  }
  bool key(string_t& key) {
    if (place_ == Place::kTop) {
      name_ = key;
      if (key.empty()) return Fail("an empty name");
      return names_.insert(key).second || Fail("a doubled name");
    }
    field_ = key;
    if (!fields_.insert(key).second) return Fail(absl::StrCat("the doubled key '", key, "'"));
    if (place_ == Place::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      return Fail(absl::StrCat("the unknown key '", key, "'"));
    }
    return true;
  }
  bool end_object() {
    if (place_ == Place::kTop) {
      place_ = Place::kDone;
      return true;
    }
    if (place_ == Place::kTensor && !AddTensor()) return false;
    place_ = Place::kTop;
    return true;
  }
  bool start_array(size_t) {
    if (place_ == Place::kTensor && field_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      return Fail("an array");
    }
    return true;
  }
  bool end_array() {
    place_ = Place::kTensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) {
    if (error_.ok())
      error_ = absl::InvalidArgumentError(absl::StrCat("safetensors header: no JSON at byte ", position));
    return false;
  }

  absl::StatusOr<SafetensorsHeader> Finish(bool parsed) {
    EK_RETURN_IF_ERROR(error_);
    if (!parsed || place_ != Place::kDone) return absl::InvalidArgumentError("safetensors header: not one JSON object");
    return std::move(header_);
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kDone };

  bool Fail(absl::string_view found) {
    error_ = absl::InvalidArgumentError(absl::StrCat("safetensors header: ", found, " in tensor '", name_, "'"));
    return false;
  }

  bool AddTensor() {
    if (!dtype_.has_value()) return Fail("no dtype");
    if (fields_.count("shape") == 0) return Fail("no shape");
    if (offsets_.size() != 2) return Fail("no pair of data_offsets");
    const absl::StatusOr<Shape> shape = Shape::Create(shape_);
    if (!shape.ok()) return Fail("an overflowing shape");
    const absl::StatusOr<int64_t> bytes = CheckedMul(shape->num_elements(), SizeOf(*dtype_));
    if (!bytes.ok()) return Fail("an overflowing shape");
    if (offsets_[0] > offsets_[1] || offsets_[1] - offsets_[0] != *bytes) {
      return Fail(absl::StrCat("offsets [", offsets_[0], ", ", offsets_[1], "] for ", *bytes, " bytes"));
    }
    header_.tensors.push_back({name_, *dtype_, *shape, offsets_[0], offsets_[1]});
    return true;
  }

  Place place_ = Place::kStart;
  std::string name_, field_;
  std::set<std::string> names_, fields_;
  std::optional<DType> dtype_;
  std::vector<int64_t> shape_, offsets_;
  SafetensorsHeader header_;
  absl::Status error_;
};

// Every byte of the data section belongs to exactly one tensor.
absl::Status CheckCover(const SafetensorsHeader& header, int64_t data_bytes) {
  int64_t at = 0;
  for (const SafetensorsEntry& entry : header.tensors) {
    if (entry.begin != at) {
      return absl::InvalidArgumentError(absl::StrCat("safetensors: tensor '", entry.name, "' begins at byte ",
                                                     entry.begin, ", the one before ends at ", at,
                                                     entry.begin > at ? " (a hole)" : " (an overlap)"));
    }
    at = entry.end;
  }
  if (at == data_bytes) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("safetensors: the header describes ", at, " bytes of data, the file has ", data_bytes));
}

}  // namespace

const SafetensorsEntry* SafetensorsHeader::Find(absl::string_view name) const {
  for (const SafetensorsEntry& entry : tensors) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

absl::string_view SafetensorsDTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF64:
      return "F64";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
    case DType::kU8:
      return "U8";
    case DType::kF16:
      return "F16";
  }
  return "?";
}

absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes, int64_t file_bytes) {
  if (file_bytes < kLengthBytes || first_bytes.size() < kLengthBytes) {
    return absl::DataLossError(absl::StrCat("safetensors: a file of ", file_bytes, " bytes has no length field"));
  }
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(first_bytes[i]);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("safetensors: a header of ", length, " bytes is over the limit of ", kMaxSafetensorsHeaderBytes));
  }
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    return absl::DataLossError(absl::StrCat("safetensors: the header is ", length,
                                            " bytes, behind the length field are ", file_bytes - kLengthBytes));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json, int64_t file_bytes) {
  if (json.empty() || json.front() != '{') {
    return absl::InvalidArgumentError("safetensors header: does not begin with '{'");
  }
  HeaderReader reader;
  const bool parsed = Json::sax_parse(json.begin(), json.end(), &reader);
  EK_ASSIGN_OR_RETURN(SafetensorsHeader header, reader.Finish(parsed));
  header.data_offset = kLengthBytes + static_cast<int64_t>(json.size());
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const auto& a, const auto& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  EK_RETURN_IF_ERROR(CheckCover(header, file_bytes - header.data_offset));
  return header;
}

absl::StatusOr<std::string> BuildSafetensorsHeader(std::vector<SafetensorsEntry>& entries,
                                                   const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json[kMetadataKey] = metadata;
  std::set<std::string> names;
  int64_t at = 0;
  for (SafetensorsEntry& entry : entries) {
    if (entry.name.empty() || entry.name == kMetadataKey || !names.insert(entry.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("safetensors: the name '", entry.name, "' is empty, doubled or reserved"));
    }
    EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(entry.shape.num_elements(), SizeOf(entry.dtype)));
    entry.begin = at;
    EK_ASSIGN_OR_RETURN(at, CheckedAdd(at, bytes));
    entry.end = at;
    json[entry.name] = {{"dtype", std::string(SafetensorsDTypeName(entry.dtype))},
                        {"shape", std::vector<int64_t>(entry.shape.dims().begin(), entry.shape.dims().end())},
                        {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize(CeilDiv(static_cast<int64_t>(text.size()), 8) * 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("safetensors: a header of ", text.size(),
                                                   " bytes is over the limit of ", kMaxSafetensorsHeaderBytes));
  }
  std::string bytes;
  for (int i = 0; i < kLengthBytes; ++i) bytes.push_back(static_cast<char>(text.size() >> (8 * i) & 0xff));
  return bytes + text;
}

}  // namespace evenkeel
