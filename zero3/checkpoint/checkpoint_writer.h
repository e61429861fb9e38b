// Writes checkpoints so that one is whole or absent, whatever stops when.
//
// Every rank: build the shard file (a copy: the model may go on), write and sync it in a background thread. Then, all
// ranks together: vote; rank 0 writes the manifest, syncs it and the folder, renames the attempt folder to its final
// name (the only commit point), syncs the parent, re-reads what it committed, and only then removes older checkpoints,
// never below `keep`. A "no" from any rank, or its absence, publishes nothing.
//
//   EK_RETURN_IF_ERROR(writer->Start(step, metadata, pieces));   // stalls for the copy only
//   ... train on ...
//   EK_RETURN_IF_ERROR(writer->Finish());                        // collective; OK: durable
#ifndef EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_WRITER_H_
#define EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/device/device.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"

namespace evenkeel::zero3 {

struct CheckpointWriterOptions {
  std::string root;  // made when absent (one level)
  int keep = 2;      // valid checkpoints that stay; at least 2
};

// One rank's writer. Not thread-safe; all ranks of `world` make the same calls in the same order.
class CheckpointWriter {
 public:
  // `world` may be null: one rank. fs, world and stream outlive the writer; the stream is used by Start and Finish
  // only. Takes the folder's lock on rank 0 and removes attempts that earlier runs left. Collective. FailedPrecondition
  // on all ranks when another writer has the folder.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(FileSystem* fs, comm::Communicator* world,
                                                                  Stream* stream,
                                                                  const CheckpointWriterOptions& options);
  // Waits for the background thread; what was not finished is an attempt, not a checkpoint.
  ~CheckpointWriter();

  // Begins a checkpoint of `step` with this rank's pieces; over all ranks they cover each tensor exactly once (checked
  // before the commit). `metadata` of rank 0 is stored. Collective. FailedPrecondition while another is unfinished.
  absl::Status Start(int64_t step, const std::map<std::string, std::string>& metadata,
                     const std::vector<CheckpointPiece>& pieces);

  // Votes and commits. Collective. The same code on all ranks, naming the rank and file that failed: ResourceExhausted,
  // Unavailable, DataLoss (pieces do not cover), AlreadyExists (this step is there). Nothing was published then, and
  // the writer can start again.
  absl::Status Finish();

  // True between Start and Finish.
  bool in_progress() const { return in_progress_; }

 private:
  CheckpointWriter(FileSystem* fs, comm::Communicator* world, Stream* stream, const CheckpointWriterOptions& options);

  int rank() const { return world_ == nullptr ? 0 : world_->rank(); }
  int size() const { return world_ == nullptr ? 1 : world_->size(); }
  absl::Status Prepare();
  void WriteInBackground(const ShardFile& file);
  absl::StatusOr<std::vector<CheckpointVoteProto>> GatherVotes(const CheckpointVoteProto& mine);
  // Rank 0's outcome, on every rank.
  absl::Status ShareOutcome(const absl::Status& outcome);
  absl::Status Commit(const std::vector<CheckpointVoteProto>& votes);

  FileSystem* const fs_;
  comm::Communicator* const world_;
  Stream* const stream_;
  const CheckpointWriterOptions options_;
  std::unique_ptr<FileLock> lock_;  // rank 0
  bool in_progress_ = false;
  int64_t step_ = 0;
  std::map<std::string, std::string> metadata_;
  std::string attempt_;
  std::thread background_;
  absl::StatusOr<CheckpointFileProto> written_ = absl::UnknownError("not written");
};

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_WRITER_H_
