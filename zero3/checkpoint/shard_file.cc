#include "evenkeel/zero3/checkpoint/shard_file.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/safetensors.h"
#include "evenkeel/zero3/checkpoint/manifest.h"

namespace evenkeel::zero3 {
namespace {

// A piece that is its whole box keeps the box's shape, so that other readers see a matrix; a range is flat.
absl::StatusOr<Shape> StoredShape(const Piece& piece) {
  EK_ASSIGN_OR_RETURN(Shape box, Shape::Create(piece.shape));
  if (piece.begin == 0 && piece.end == box.num_elements()) return box;
  return Shape({piece.num_elements()});
}

void AddParameter(const CheckpointParameter& parameter, CheckpointFileProto* record) {
  CheckpointParameterProto* proto = record->add_parameter();
  proto->set_name(parameter.name);
  proto->mutable_global_shape()->Assign(parameter.global_shape.begin(), parameter.global_shape.end());
  proto->set_expert_dim(parameter.expert_dim);
  proto->set_tp_dim(parameter.tp_dim);
}

}  // namespace

absl::StatusOr<ShardFile> ShardFile::Build(std::string name, const std::vector<CheckpointPiece>& pieces) {
  ShardFile file;
  file.name_ = std::move(name);
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, int> parameters;
  int64_t data_bytes = 0;
  for (const CheckpointPiece& piece : pieces) {
    EK_RETURN_IF_ERROR(ValidatePiece(piece.piece, piece.parameter.global_shape, piece.parameter.name));
    EK_ASSIGN_OR_RETURN(Shape shape, StoredShape(piece.piece));
    entries.push_back({TensorName(piece.parameter.name, piece.state, piece.piece, piece.parameter.global_shape),
                       piece.dtype, std::move(shape), 0, 0});
    const auto [found, inserted] = parameters.emplace(piece.parameter.name, file.record_.parameter_size());
    if (inserted) AddParameter(piece.parameter, &file.record_);
    CheckpointPieceProto* proto = file.record_.add_piece();
    proto->set_parameter(found->second);
    proto->set_state(piece.state);
    proto->set_dtype(std::string(DTypeName(piece.dtype)));
    FromPiece(piece.piece, proto);
    data_bytes += piece.num_bytes();
  }
  EK_ASSIGN_OR_RETURN(file.bytes_, BuildSafetensorsHeader(entries, {{"format", "evenkeel"}}));
  file.record_.set_header_xxh3(Digest64(file.bytes_));
  file.bytes_.reserve(file.bytes_.size() + static_cast<size_t>(data_bytes));
  for (const CheckpointPiece& piece : pieces) {
    if (piece.num_bytes() > 0) {
      file.bytes_.append(static_cast<const char*>(piece.data), static_cast<size_t>(piece.num_bytes()));
    }
  }
  file.record_.set_name(file.name_);
  file.record_.set_bytes(file.bytes());
  return file;
}

absl::StatusOr<CheckpointFileProto> ShardFile::Write(FileSystem& fs, const std::string& folder) const {
  CheckpointFileProto record = record_;
  int64_t at = bytes();
  for (const CheckpointPieceProto& piece : record.piece()) {
    at -= (piece.end() - piece.begin()) * SizeOf(*ParseDType(piece.dtype()));
  }
  for (CheckpointPieceProto& piece : *record.mutable_piece()) {
    int64_t left = (piece.end() - piece.begin()) * SizeOf(*ParseDType(piece.dtype()));
    while (left > 0) {
      const int64_t block = std::min(left, kCheckpointBlockBytes);
      piece.add_block_xxh3(Digest64(bytes_.data() + at, static_cast<size_t>(block)));
      at += block;
      left -= block;
    }
  }
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, fs.Create(folder + "/" + name_));
  constexpr size_t kChunkBytes = 8 << 20;
  for (size_t begin = 0; begin < bytes_.size(); begin += kChunkBytes) {
    EK_RETURN_IF_ERROR(file->Append(absl::string_view(bytes_).substr(begin, kChunkBytes)));
  }
  EK_RETURN_IF_ERROR(file->Sync());
  EK_RETURN_IF_ERROR(file->Close());
  return record;
}

}  // namespace evenkeel::zero3
