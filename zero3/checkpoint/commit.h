// The steps of a commit that one rank does alone, in the order that makes a checkpoint whole or absent.
#ifndef EVENKEEL_ZERO3_CHECKPOINT_COMMIT_H_
#define EVENKEEL_ZERO3_CHECKPOINT_COMMIT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"

namespace evenkeel::zero3 {

// "rank-00002-of-00008.safetensors".
std::string ShardFileName(int rank, int world_size);

// Makes `root` durable, takes its writer lock and removes attempts that earlier writers left.
// FailedPrecondition when another writer has the lock.
absl::StatusOr<std::unique_ptr<FileLock>> PrepareCheckpointRoot(FileSystem& fs, const std::string& root);

// "ROOT/attempt-000000000050". Also on the ranks that did not make it.
std::string AttemptFolder(const std::string& root, int64_t step);

// An empty attempt folder for `step`; returns its path.
absl::StatusOr<std::string> BeginAttempt(FileSystem& fs, const std::string& root, int64_t step);

// Merges the ranks' records (each indexes its own parameters) into a manifest, validates it, writes and syncs it and
// the folder, renames the attempt to its final name and syncs `root`: the rename is the only commit point.
absl::Status CommitAttempt(FileSystem& fs, const std::string& root, const std::string& attempt, int64_t step,
                           const std::map<std::string, std::string>& metadata,
                           const std::vector<CheckpointFileProto>& files);

// Re-reads the checkpoint of `step` and, when it verifies, removes older ones beyond `keep` valid ones.
absl::Status RemoveOldCheckpoints(FileSystem& fs, const std::string& root, int64_t step, int keep);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_COMMIT_H_
