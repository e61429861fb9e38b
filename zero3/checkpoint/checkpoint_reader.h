// Opens, verifies and reads checkpoints, at whatever layout they were written.
//
//   EK_ASSIGN_OR_RETURN(FoundCheckpoint found, FindLatestCheckpoint(fs, "run/checkpoints"));
//   for (const std::string& skipped : found.skipped) ...            // what was passed over, and why
//   EK_RETURN_IF_ERROR(found.reader->Read(wanted_piece));            // any box, any range
//
// Nothing in a checkpoint runs or leaves its folder: names are plain, only regular files are opened, links are not
// followed, lengths are checked before they are allocated, and bytes are believed only when their digest agrees.
#ifndef EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_READER_H_
#define EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_READER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/zero3/checkpoint/manifest.pb.h"
#include "evenkeel/zero3/checkpoint/shard_file.h"

namespace evenkeel::zero3 {

// One committed checkpoint. Thread-safe after Open.
class CheckpointReader {
 public:
  // Reads the manifest of `folder` and the headers of all its files. NotFound without a manifest; DataLoss naming file
  // and lengths when a file is cut, extended, missing or damaged in its header; codes of ParseManifest.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(FileSystem* fs, const std::string& folder);

  const std::string& folder() const { return folder_; }
  const CheckpointManifestProto& manifest() const { return manifest_; }
  int64_t step() const { return manifest_.step(); }
  // What was stored beside the tensors.
  std::map<std::string, std::string> metadata() const;

  // Reads and digests every block. DataLoss naming file, tensor and block of the first that differs.
  absl::Status Verify() const;

  // Fills `wanted.data`, verifying every block that is read. NotFound when the checkpoint has no such parameter or
  // state; FailedPrecondition naming both when global shape or dtype differ; DataLoss as Verify.
  absl::Status Read(const CheckpointPiece& wanted) const;

  struct StoredTensor {
    const CheckpointParameterProto* parameter = nullptr;
    std::string state;
    DType dtype = DType::kF32;
    int64_t bytes = 0;  // of the whole tensor
    int pieces = 0;
  };
  // Everything stored, by parameter name and state.
  std::vector<StoredTensor> Tensors() const;

  // A digest of all states as whole tensors: equal for checkpoints of the same state at any layout. Reads everything.
  absl::StatusOr<uint64_t> StateDigest() const;

 private:
  // Where a piece lies: file, and offset of its first byte.
  struct Source {
    const CheckpointFileProto* file = nullptr;
    const CheckpointPieceProto* proto = nullptr;
    Piece piece;
    int64_t offset = 0;
  };

  CheckpointReader(FileSystem* fs, std::string folder) : fs_(fs), folder_(std::move(folder)) {}
  absl::Status Index();
  absl::Status CheckFile(const CheckpointFileProto& file, std::vector<Source>* sources) const;
  // All bytes of the piece, verified.
  absl::StatusOr<std::string> ReadSource(const Source& source) const;

  FileSystem* const fs_;
  const std::string folder_;
  CheckpointManifestProto manifest_;
  std::map<std::pair<std::string, std::string>, std::vector<Source>> sources_;
  std::map<std::string, const CheckpointParameterProto*> parameters_;
};

// The folder name of a committed checkpoint: "step-000000000050". Names sort by step.
std::string CheckpointFolderName(int64_t step);
// The step of such a name, or -1.
int64_t StepOfFolderName(const std::string& name);

struct FoundCheckpoint {
  std::unique_ptr<CheckpointReader> reader;
  std::vector<std::string> skipped;  // "step-000000000051: DATA_LOSS: ..."
};

// The newest checkpoint below `root` whose every byte verifies. NotFound listing what was skipped when there is none.
absl::StatusOr<FoundCheckpoint> FindLatestCheckpoint(FileSystem* fs, const std::string& root);

}  // namespace evenkeel::zero3

#endif  // EVENKEEL_ZERO3_CHECKPOINT_CHECKPOINT_READER_H_
