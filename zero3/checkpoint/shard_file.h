// One rank's file of a checkpoint: pieces of tensors as safetensors, with a digest of every block.
//
//   ShardFile file = *ShardFile::Build("rank-00000.safetensors", pieces);   // copies: the model may go on
//   CheckpointFileProto record = *file.Write(fs, folder);                   // create, append, sync, close
#ifndef EVENKEEL_ZERO3_CHECKPOINT_SHARD_FILE_H_
#define EVENKEEL_ZERO3_CHECKPOINT_SHARD_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"
#include "evenkeel/zero3/checkpoint/piece.h"

namespace evenkeel::zero3 {

// A parameter of the whole model. Names and shapes do not depend on the layout.
struct CheckpointParameter {
  std::string name;
  std::vector<int64_t> global_shape;
  int expert_dim = -1;  // counts experts by global id
  int tp_dim = -1;      // cut over TP lanes
  friend bool operator==(const CheckpointParameter&, const CheckpointParameter&) = default;
};

// Elements of one tensor that this rank holds; `data` is on the host.
struct CheckpointPiece {
  CheckpointParameter parameter;
  std::string state;  // "weight" or the name of an optimizer state
  DType dtype = DType::kF32;
  Piece piece;
  void* data = nullptr;

  int64_t num_bytes() const { return piece.num_elements() * SizeOf(dtype); }
};

// The bytes of one shard file, ready to be written. Movable. Not thread-safe.
class ShardFile {
 public:
  // Copies the pieces into one buffer. InvalidArgument on a piece outside its tensor or doubled names.
  static absl::StatusOr<ShardFile> Build(std::string name, const std::vector<CheckpointPiece>& pieces);

  // Writes and syncs `folder`/name, and returns its record with digests. The record's pieces index its own parameters.
  absl::StatusOr<CheckpointFileProto> Write(FileSystem& fs, const std::string& folder) const;

  int64_t bytes() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  std::string name_;
  std::string bytes_;
  CheckpointFileProto record_;
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_SHARD_FILE_H_
