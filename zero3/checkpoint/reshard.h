// Rewrites a checkpoint as another layout would have saved it, without a model and without ranks.
//
//   EK_RETURN_IF_ERROR(ReshardCheckpoint(*reader, fs, "out", {.world = 8, .ep = 4, .tp = 2}));
//
// Loading needs no resharding (any layout loads into any other); this is for moving files: one file per rank, so that
// each host of the new layout reads its own, or world 1 for tools that want whole tensors.
#ifndef EVENKEEL_ZERO3_CHECKPOINT_RESHARD_H_
#define EVENKEEL_ZERO3_CHECKPOINT_RESHARD_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"
#include "evenkeel/zero3/checkpoint/piece.h"

namespace evenkeel::zero3 {

struct CheckpointLayout {
  int world = 1;  // tp * dp
  int ep = 1;     // divides dp
  int tp = 1;
};

// Every rank has a file, numbered by five digits.
inline constexpr int kMaxCheckpointWorld = 65536;

// InvalidArgument naming the numbers when tp does not divide world or ep does not divide dp, or world is above that.
absl::Status ValidateLayout(const CheckpointLayout& layout);

// What rank `rank` of the layout holds of a parameter: its TP slice of tp_dim, its experts of expert_dim, and of that
// box an equal range over the replicas. What all lanes share belongs to lane 0; other lanes get an empty piece.
// InvalidArgument when tp or ep does not divide the extent. Over all ranks the pieces cover the parameter exactly once.
absl::StatusOr<Piece> PlanPiece(const CheckpointParameterProto& parameter, const CheckpointLayout& layout, int rank);

// Reads `source` (verifying what it reads) and commits a checkpoint of the same step and metadata below `root`.
// Holds one rank's pieces in memory at a time. AlreadyExists, before anything is written, when `root` holds that step;
// other errors as CheckpointWriter.
absl::Status ReshardCheckpoint(const CheckpointReader& source, FileSystem* fs, const std::string& root,
                               const CheckpointLayout& layout);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_RESHARD_H_
