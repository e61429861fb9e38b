#include "evenkeel/zero3/checkpoint/manifest.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>

#include <cinttypes>
#include <cstdio>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/runtime/tensor/shape.h"

namespace evenkeel::zero3 {
namespace {

constexpr size_t kMaxNameBytes = 4096;

class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int, const std::string& message) override {
    if (text_.empty()) text_ = absl::StrCat("line ", line + 2, ": ", message);  // the first line is the version line
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// The digest covers the versions too.
std::string VersionLine(int version, int min_reader, absl::string_view body) {
  const std::string versions = absl::StrFormat("evenkeel-checkpoint version=%d min_reader=%d", version, min_reader);
  return absl::StrFormat("%s xxh3=%016x\n", versions, Digest64(absl::StrCat(versions, "\n", body)));
}

bool IsPlainFileName(const std::string& name) {
  if (name.empty() || name.size() > 255 || name.front() == '.') return false;
  for (char c : name) {
    if (c == '/' || c == '\\' || static_cast<unsigned char>(c) < 0x20) return false;
  }
  return true;
}

absl::Status ValidateParameters(const CheckpointManifestProto& manifest) {
  std::set<std::string> names;
  for (const CheckpointParameterProto& parameter : manifest.parameter()) {
    if (parameter.name().empty() || parameter.name().size() > kMaxNameBytes || !names.insert(parameter.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("manifest: the parameter name '", parameter.name(), "' is empty, too long or doubled"));
    }
    const std::vector<int64_t> shape(parameter.global_shape().begin(), parameter.global_shape().end());
    if (!Shape::Create(shape).ok()) {
      return absl::InvalidArgumentError(absl::StrCat("manifest: bad shape of ", parameter.name()));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateBlocks(const CheckpointPieceProto& piece, const std::string& what) {
  const absl::StatusOr<DType> dtype = ParseDType(piece.dtype());
  EK_RETURN_IF_ERROR(dtype.status());
  EK_ASSIGN_OR_RETURN(const int64_t bytes, CheckedMul(piece.end() - piece.begin(), SizeOf(*dtype)));
  if (piece.block_xxh3_size() != CeilDiv(bytes, kCheckpointBlockBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("manifest: ", what, " has ", piece.block_xxh3_size(), " digests for ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

Piece ToPiece(const CheckpointPieceProto& proto) {
  Piece piece;
  piece.offset.assign(proto.offset().begin(), proto.offset().end());
  piece.shape.assign(proto.shape().begin(), proto.shape().end());
  piece.begin = proto.begin();
  piece.end = proto.end();
  return piece;
}

void FromPiece(const Piece& piece, CheckpointPieceProto* proto) {
  proto->mutable_offset()->Assign(piece.offset.begin(), piece.offset.end());
  proto->mutable_shape()->Assign(piece.shape.begin(), piece.shape.end());
  proto->set_begin(piece.begin);
  proto->set_end(piece.end);
}

std::string TensorName(const std::string& parameter, const std::string& state, const Piece& piece,
                       absl::Span<const int64_t> global_shape) {
  std::string name = state == "weight" ? parameter : absl::StrCat(state, ".", parameter);
  if (piece == WholePiece(global_shape)) return name;
  return name + PieceName(piece);
}

std::string RenderManifest(const CheckpointManifestProto& manifest) {
  std::string body;
  EK_CHECK(google::protobuf::TextFormat::PrintToString(manifest, &body));
  return VersionLine(kCheckpointVersion, /*min_reader=*/1, body) + body;
}

absl::StatusOr<CheckpointManifestProto> ParseManifest(absl::string_view text) {
  const size_t line_end = text.find('\n');
  int version = 0, min_reader = 0;
  uint64_t digest = 0;
  const std::string first_line(text.substr(0, line_end));
  if (line_end == absl::string_view::npos ||
      std::sscanf(first_line.c_str(), "evenkeel-checkpoint version=%d min_reader=%d xxh3=%" SCNx64, &version,
                  &min_reader, &digest) != 3) {
    return absl::DataLossError("manifest: the first line is damaged or this is no manifest");
  }
  if (min_reader > kCheckpointVersion) {
    return absl::FailedPreconditionError(absl::StrCat("manifest: written as version ", version,
                                                      ", needs a reader of version ", min_reader, "; this one reads ",
                                                      kCheckpointVersion));
  }
  const std::string body(text.substr(line_end + 1));
  if (first_line + "\n" != VersionLine(version, min_reader, body)) {
    return absl::DataLossError("manifest: the digest differs, the text is damaged");
  }
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  CheckpointManifestProto manifest;
  if (!parser.ParseFromString(body, &manifest)) {
    return absl::InvalidArgumentError(absl::StrCat("manifest: ", error.text()));
  }
  EK_RETURN_IF_ERROR(ValidateManifest(manifest));
  return manifest;
}

absl::Status ValidateManifest(const CheckpointManifestProto& manifest) {
  EK_RETURN_IF_ERROR(ValidateParameters(manifest));
  std::set<std::string> keys;
  for (const CheckpointMetadataProto& entry : manifest.metadata()) {
    if (!keys.insert(entry.key()).second) {
      return absl::InvalidArgumentError(absl::StrCat("manifest: the metadata key '", entry.key(), "' is doubled"));
    }
  }
  std::set<std::string> files;
  std::map<std::pair<int, std::string>, std::vector<Piece>> pieces;
  for (const CheckpointFileProto& file : manifest.file()) {
    if (!IsPlainFileName(file.name()) || !files.insert(file.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("manifest: the file name '", file.name(), "' is not plain or doubled"));
    }
    for (const CheckpointPieceProto& proto : file.piece()) {
      if (proto.parameter() < 0 || proto.parameter() >= manifest.parameter_size()) {
        return absl::InvalidArgumentError(absl::StrCat("manifest: parameter number ", proto.parameter(), " of ",
                                                       manifest.parameter_size(), " in ", file.name()));
      }
      const CheckpointParameterProto& parameter = manifest.parameter(proto.parameter());
      const std::string what = absl::StrCat(proto.state(), " of ", parameter.name());
      const Piece piece = ToPiece(proto);
      EK_RETURN_IF_ERROR(ValidatePiece(piece, parameter.global_shape(), what));
      EK_RETURN_IF_ERROR(ValidateBlocks(proto, what));
      pieces[{proto.parameter(), proto.state()}].push_back(piece);
    }
  }
  for (const auto& [key, list] : pieces) {
    const CheckpointParameterProto& parameter = manifest.parameter(key.first);
    EK_RETURN_IF_ERROR(CheckCover(parameter.global_shape(), list, absl::StrCat(key.second, " of ", parameter.name())));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3
