// Small checkpoints with known values, for tests that crash, damage, move and reload them.
//
//   DiskModel disk;
//   EK_RETURN_IF_ERROR(SaveAtLayout(disk, {.dp = 4, .tp = 2, .ep = 2}, 7, "ckpt"));
//   EK_ASSIGN_OR_RETURN(FoundCheckpoint found, FindLatestCheckpoint(&disk, "ckpt"));
//   EK_RETURN_IF_ERROR(CheckLoad(*found.reader, {.dp = 3}, 1));   // rank 1 of three
#ifndef EVENKEEL_ZERO3_TESTING_SMALL_CHECKPOINT_H_
#define EVENKEEL_ZERO3_TESTING_SMALL_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"

namespace evenkeel::zero3 {

// Experts are cut over EP and sharded over the dp / ep ranks of a group, everything else over dp.
struct SmallLayout {
  int dp = 1, tp = 1, ep = 1;
  int world() const { return dp * tp; }
};

// One rank's pieces and their memory: "matrix" [6, 8] cut over TP, "norm" [5] on every lane, "experts" [4, 5, 8]; each
// a weight and a momentum, f32, unique by name, state, step and global index.
struct SmallState {
  std::vector<CheckpointPiece> pieces;
  std::vector<std::unique_ptr<std::vector<float>>> memory;
};

// `fill`: the values of `step`, and only what this rank saves (lane 0 the norm); otherwise -1 in all that it loads.
SmallState MakeSmallState(const SmallLayout& layout, int rank, int64_t step, bool fill);

// Saves at one rank; at all ranks of a layout, as threads. metadata: data_position = 100 * step.
absl::Status SaveOne(FileSystem& fs, int64_t step, const std::string& root = "ckpt");
absl::Status SaveAtLayout(FileSystem& fs, const SmallLayout& layout, int64_t step, const std::string& root);

// Loads what `rank` of `layout` needs and compares every value with that of the reader's step.
absl::Status CheckLoad(const CheckpointReader& reader, const SmallLayout& layout, int rank);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_TESTING_SMALL_CHECKPOINT_H_
