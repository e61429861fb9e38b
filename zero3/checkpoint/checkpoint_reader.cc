#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/safetensors.h"
#include "evenkeel/zero3/checkpoint/manifest.h"

namespace evenkeel::zero3 {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr char kFolderPrefix[] = "step-";

int64_t PieceBytes(const CheckpointPieceProto& piece) {
  const absl::StatusOr<DType> dtype = ParseDType(piece.dtype());
  return dtype.ok() ? (piece.end() - piece.begin()) * SizeOf(*dtype) : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(FileSystem* fs, const std::string& folder) {
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader(fs, folder));
  EK_ASSIGN_OR_RETURN(const std::string text,
                      ReadFile(*fs, absl::StrCat(folder, "/", kManifestName), kMaxManifestBytes));
  absl::StatusOr<CheckpointManifestProto> manifest = ParseManifest(text);
  if (!manifest.ok()) return Annotate(manifest.status(), folder);
  reader->manifest_ = *std::move(manifest);
  EK_RETURN_IF_ERROR(reader->Index());
  return reader;
}

absl::Status CheckpointReader::Index() {
  for (const CheckpointParameterProto& parameter : manifest_.parameter()) parameters_[parameter.name()] = &parameter;
  for (const CheckpointFileProto& file : manifest_.file()) {
    std::vector<Source> sources;
    const absl::Status checked = CheckFile(file, &sources);
    if (!checked.ok()) return Annotate(checked, absl::StrCat(folder_, "/", file.name()));
    for (Source& source : sources) {
      const std::string& name = manifest_.parameter(source.proto->parameter()).name();
      sources_[{name, source.proto->state()}].push_back(std::move(source));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::CheckFile(const CheckpointFileProto& file, std::vector<Source>* sources) const {
  const std::string path = absl::StrCat(folder_, "/", file.name());
  absl::StatusOr<int64_t> size = fs_->FileSize(path);
  if (absl::IsNotFound(size.status())) return absl::DataLossError("the file is missing");
  EK_RETURN_IF_ERROR(size.status());
  if (*size != file.bytes()) {
    return absl::DataLossError(absl::StrCat("expected ", file.bytes(), " bytes, found ", *size));
  }
  EK_ASSIGN_OR_RETURN(const std::string first, fs_->Read(path, 0, std::min(*size, kLengthBytes)));
  EK_ASSIGN_OR_RETURN(const int64_t length, ParseSafetensorsLength(first, *size));
  EK_ASSIGN_OR_RETURN(const std::string front, fs_->Read(path, 0, kLengthBytes + length));
  if (Digest64(front) != file.header_xxh3()) return absl::DataLossError("the header's digest differs");
  EK_ASSIGN_OR_RETURN(const SafetensorsHeader header, ParseSafetensorsHeader(front.substr(kLengthBytes), *size));
  int64_t at = header.data_offset;
  for (const CheckpointPieceProto& proto : file.piece()) {
    const CheckpointParameterProto& parameter = manifest_.parameter(proto.parameter());
    const Piece piece = ToPiece(proto);
    const std::string name = TensorName(parameter.name(), proto.state(), piece, parameter.global_shape());
    const SafetensorsEntry* entry = header.Find(name);
    if (entry == nullptr || entry->end - entry->begin != PieceBytes(proto) ||
        DTypeName(entry->dtype) != absl::string_view(proto.dtype()) || header.data_offset + entry->begin != at) {
      return absl::DataLossError(absl::StrCat("tensor ", name, " is not where the manifest says"));
    }
    sources->push_back({&file, &proto, piece, at});
    at += PieceBytes(proto);
  }
  if (at != *size) return absl::DataLossError(absl::StrCat("the manifest describes ", at, " of ", *size, " bytes"));
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointReader::ReadSource(const Source& source) const {
  const std::string path = absl::StrCat(folder_, "/", source.file->name());
  const int64_t bytes = PieceBytes(*source.proto);
  EK_ASSIGN_OR_RETURN(const std::string data, fs_->Read(path, source.offset, bytes));
  for (int block = 0; block < source.proto->block_xxh3_size(); ++block) {
    const int64_t begin = block * kCheckpointBlockBytes;
    const int64_t length = std::min(kCheckpointBlockBytes, bytes - begin);
    if (Digest64(data.data() + begin, static_cast<size_t>(length)) != source.proto->block_xxh3(block)) {
      return absl::DataLossError(absl::StrCat(path, ": ", source.proto->state(), " of ",
                                              manifest_.parameter(source.proto->parameter()).name(), " ",
                                              PieceName(source.piece), ", block ", block, " is damaged"));
    }
  }
  return data;
}

absl::Status CheckpointReader::Verify() const {
  for (const auto& [key, sources] : sources_) {
    for (const Source& source : sources) EK_RETURN_IF_ERROR(ReadSource(source).status());
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::Read(const CheckpointPiece& wanted) const {
  const std::string what = absl::StrCat(wanted.state, " of ", wanted.parameter.name);
  const auto found = sources_.find({wanted.parameter.name, wanted.state});
  if (found == sources_.end()) return absl::NotFoundError(absl::StrCat(folder_, " has no ", what));
  const CheckpointParameterProto& parameter = *parameters_.at(wanted.parameter.name);
  const std::vector<int64_t> stored(parameter.global_shape().begin(), parameter.global_shape().end());
  if (stored != wanted.parameter.global_shape) {
    return absl::FailedPreconditionError(absl::StrCat(what, ": the checkpoint's shape is [",
                                                      absl::StrJoin(stored, ", "), "], the model's is [",
                                                      absl::StrJoin(wanted.parameter.global_shape, ", "), "]"));
  }
  EK_RETURN_IF_ERROR(ValidatePiece(wanted.piece, stored, what));
  const int64_t element = SizeOf(wanted.dtype);
  for (const Source& source : found->second) {
    bool overlaps = false;
    ForEachCommonRun(source.piece, wanted.piece, [&overlaps](int64_t, int64_t, int64_t) { overlaps = true; });
    if (!overlaps) continue;
    if (absl::string_view(source.proto->dtype()) != DTypeName(wanted.dtype)) {
      return absl::FailedPreconditionError(absl::StrCat(what, ": the checkpoint has ", source.proto->dtype(),
                                                        ", the model wants ", DTypeName(wanted.dtype)));
    }
    EK_ASSIGN_OR_RETURN(const std::string data, ReadSource(source));
    ForEachCommonRun(source.piece, wanted.piece, [&](int64_t from, int64_t to, int64_t count) {
      std::memcpy(static_cast<std::byte*>(wanted.data) + to * element, data.data() + from * element,
                  static_cast<size_t>(count * element));
    });
  }
  return absl::OkStatus();
}

std::map<std::string, std::string> CheckpointReader::metadata() const {
  std::map<std::string, std::string> metadata;
  for (const CheckpointMetadataProto& entry : manifest_.metadata()) metadata[entry.key()] = entry.value();
  return metadata;
}

std::vector<CheckpointReader::StoredTensor> CheckpointReader::Tensors() const {
  std::vector<StoredTensor> tensors;
  for (const auto& [key, sources] : sources_) {
    StoredTensor tensor;
    tensor.parameter = parameters_.at(key.first);
    tensor.state = key.second;
    const absl::StatusOr<DType> dtype = ParseDType(sources.front().proto->dtype());
    EK_CHECK_OK(dtype);  // checked by ValidateManifest
    tensor.dtype = *dtype;
    for (const Source& source : sources) tensor.bytes += PieceBytes(*source.proto);
    tensor.pieces = static_cast<int>(sources.size());
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

absl::StatusOr<uint64_t> CheckpointReader::StateDigest() const {
  uint64_t digest = Digest64(absl::StrCat(step()));
  for (const StoredTensor& tensor : Tensors()) {
    CheckpointPiece whole;
    whole.parameter.name = tensor.parameter->name();
    whole.parameter.global_shape.assign(tensor.parameter->global_shape().begin(),
                                        tensor.parameter->global_shape().end());
    whole.state = tensor.state;
    whole.dtype = tensor.dtype;
    whole.piece = WholePiece(whole.parameter.global_shape);
    std::string bytes(static_cast<size_t>(whole.num_bytes()), '\0');
    whole.data = bytes.data();
    EK_RETURN_IF_ERROR(Read(whole));
    const uint64_t name = Digest64(absl::StrCat(tensor.parameter->name(), "/", tensor.state));
    digest = CombineDigests(digest, CombineDigests(name, Digest64(bytes)));
  }
  return digest;
}

std::string CheckpointFolderName(int64_t step) { return absl::StrFormat("%s%012d", kFolderPrefix, step); }

int64_t StepOfFolderName(const std::string& name) {
  int64_t step = -1;
  if (!absl::StartsWith(name, kFolderPrefix)) return -1;
  const std::string digits = name.substr(sizeof(kFolderPrefix) - 1);
  if (!absl::SimpleAtoi(digits, &step) || step < 0 || CheckpointFolderName(step) != name) return -1;
  return step;
}

absl::StatusOr<FoundCheckpoint> FindLatestCheckpoint(FileSystem* fs, const std::string& root) {
  EK_ASSIGN_OR_RETURN(std::vector<DirectoryEntry> entries, fs->List(root));
  std::reverse(entries.begin(), entries.end());  // names sort by step
  FoundCheckpoint found;
  for (const DirectoryEntry& entry : entries) {
    if (!entry.is_directory || StepOfFolderName(entry.name) < 0) continue;
    absl::StatusOr<std::unique_ptr<CheckpointReader>> reader =
        CheckpointReader::Open(fs, absl::StrCat(root, "/", entry.name));
    const absl::Status verified = reader.ok() ? (*reader)->Verify() : reader.status();
    if (verified.ok()) {
      found.reader = *std::move(reader);
      return found;
    }
    found.skipped.push_back(absl::StrCat(entry.name, ": ", verified.ToString()));
  }
  return absl::NotFoundError(absl::StrCat("no valid checkpoint in ", root, found.skipped.empty() ? "" : "; skipped ",
                                          absl::StrJoin(found.skipped, "; ")));
}

}  // namespace evenkeel::zero3
