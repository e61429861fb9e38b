#include "evenkeel/zero3/checkpoint/reshard.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/checked_math.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/zero3/checkpoint/commit.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"

namespace evenkeel::zero3 {
namespace {

// Part `index` of `parts` of dimension `dim`.
absl::Status CutDimension(const std::string& name, int dim, int64_t parts, int64_t index, Piece* piece) {
  if (dim < 0 || parts == 1) return absl::OkStatus();
  if (dim >= static_cast<int>(piece->shape.size()) || piece->shape[dim] % parts != 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": dimension ", dim, " of ", PieceName(*piece),
                                                   " cannot be cut into ", parts, " equal parts"));
  }
  piece->shape[dim] /= parts;
  piece->offset[dim] += index * piece->shape[dim];
  return absl::OkStatus();
}

CheckpointParameter ToParameter(const CheckpointParameterProto& proto) {
  CheckpointParameter parameter;
  parameter.name = proto.name();
  parameter.global_shape.assign(proto.global_shape().begin(), proto.global_shape().end());
  parameter.expert_dim = proto.expert_dim();
  parameter.tp_dim = proto.tp_dim();
  return parameter;
}

// Writes the shard file of one rank into the attempt folder.
absl::StatusOr<CheckpointFileProto> WriteRank(const CheckpointReader& source, FileSystem* fs,
                                              const std::string& attempt, const CheckpointLayout& layout, int rank) {
  std::vector<CheckpointPiece> pieces;
  std::deque<std::vector<std::byte>> memory;
  for (const CheckpointReader::StoredTensor& tensor : source.Tensors()) {
    CheckpointPiece piece;
    piece.parameter = ToParameter(*tensor.parameter);
    piece.state = tensor.state;
    piece.dtype = tensor.dtype;
    EK_ASSIGN_OR_RETURN(piece.piece, PlanPiece(*tensor.parameter, layout, rank));
    if (piece.piece.num_elements() == 0 && rank != 0) continue;
    memory.emplace_back(static_cast<size_t>(piece.num_bytes()));
    piece.data = memory.back().data();
    EK_RETURN_IF_ERROR(source.Read(piece));
    pieces.push_back(std::move(piece));
  }
  EK_ASSIGN_OR_RETURN(const ShardFile file, ShardFile::Build(ShardFileName(rank, layout.world), pieces));
  return file.Write(*fs, attempt);
}

// The commit would find out too, but only after everything is written.
absl::Status CheckStepIsNew(FileSystem& fs, const std::string& root, int64_t step) {
  EK_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(root));
  const std::string name = CheckpointFolderName(step);
  for (const DirectoryEntry& entry : entries) {
    if (entry.name == name) return absl::AlreadyExistsError(absl::StrCat(root, " holds ", name, " already"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateLayout(const CheckpointLayout& layout) {
  if (layout.world < 1 || layout.tp < 1 || layout.ep < 1 || layout.world % layout.tp != 0 ||
      layout.world / layout.tp % layout.ep != 0) {
    return absl::InvalidArgumentError(absl::StrCat("no layout: world ", layout.world, ", tp ", layout.tp, ", ep ",
                                                   layout.ep, "; tp must divide world, and ep must divide world / tp"));
  }
  if (layout.world > kMaxCheckpointWorld) {
    return absl::InvalidArgumentError(
        absl::StrCat("no layout: world ", layout.world, ", wanted at most ", kMaxCheckpointWorld));
  }
  return absl::OkStatus();
}

absl::StatusOr<Piece> PlanPiece(const CheckpointParameterProto& parameter, const CheckpointLayout& layout, int rank) {
  EK_RETURN_IF_ERROR(ValidateLayout(layout));
  Piece piece = WholePiece(parameter.global_shape());
  const int lane = rank % layout.tp, replica = rank / layout.tp, dp = layout.world / layout.tp;
  const bool expert = parameter.expert_dim() >= 0;
  EK_RETURN_IF_ERROR(CutDimension(parameter.name(), parameter.tp_dim(), layout.tp, lane, &piece));
  if (expert) {
    EK_RETURN_IF_ERROR(CutDimension(parameter.name(), parameter.expert_dim(), layout.ep, replica % layout.ep, &piece));
  }
  const int64_t shard = expert ? replica / layout.ep : replica;
  const int64_t shards = expert ? dp / layout.ep : dp;
  int64_t elements = 1;
  for (int64_t extent : piece.shape) elements *= extent;
  const int64_t each = CeilDiv(elements, shards);
  piece.begin = std::min(elements, shard * each);
  piece.end = std::min(elements, piece.begin + each);
  if (parameter.tp_dim() < 0 && lane != 0) piece.end = piece.begin;
  return piece;
}

absl::Status ReshardCheckpoint(const CheckpointReader& source, FileSystem* fs, const std::string& root,
                               const CheckpointLayout& layout) {
  EK_RETURN_IF_ERROR(ValidateLayout(layout));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<FileLock> lock, PrepareCheckpointRoot(*fs, root));
  EK_RETURN_IF_ERROR(CheckStepIsNew(*fs, root, source.step()));
  EK_ASSIGN_OR_RETURN(const std::string attempt, BeginAttempt(*fs, root, source.step()));
  std::vector<CheckpointFileProto> files;
  for (int rank = 0; rank < layout.world; ++rank) {
    absl::StatusOr<CheckpointFileProto> file = WriteRank(source, fs, attempt, layout, rank);
    if (!file.ok()) {
      RemoveTree(*fs, attempt).IgnoreError();
      return Annotate(file.status(), absl::StrCat("rank ", rank));
    }
    files.push_back(*std::move(file));
  }
  const absl::Status committed = CommitAttempt(*fs, root, attempt, source.step(), source.metadata(), files);
  if (!committed.ok()) RemoveTree(*fs, attempt).IgnoreError();
  return committed;
}

}  // namespace evenkeel::zero3
