#include "evenkeel/zero3/checkpoint/commit.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/manifest.h"

namespace evenkeel::zero3 {
namespace {

constexpr char kAttemptPrefix[] = "attempt-";
constexpr char kLockName[] = "writer.lock";

std::string ParentFolder(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Parameters are merged by name; two ranks that describe one differently do not fit together.
absl::StatusOr<int> MergeParameter(const CheckpointParameterProto& parameter, CheckpointManifestProto* manifest,
                                   std::map<std::string, int>* index) {
  const auto [found, inserted] = index->emplace(parameter.name(), manifest->parameter_size());
  if (inserted) {
    *manifest->add_parameter() = parameter;
    return found->second;
  }
  const CheckpointParameterProto& known = manifest->parameter(found->second);
  const bool equal = std::equal(known.global_shape().begin(), known.global_shape().end(),
                                parameter.global_shape().begin(), parameter.global_shape().end()) &&
                     known.expert_dim() == parameter.expert_dim();
  if (!equal) {
    return absl::FailedPreconditionError(absl::StrCat("ranks describe ", parameter.name(), " differently"));
  }
  return found->second;
}

// One manifest of all ranks' records, parameters merged by name.
absl::StatusOr<CheckpointManifestProto> MergeRecords(const std::vector<CheckpointFileProto>& files) {
  CheckpointManifestProto manifest;
  std::map<std::string, int> index;
  for (const CheckpointFileProto& record : files) {
    std::vector<int> renumbered;
    for (const CheckpointParameterProto& parameter : record.parameter()) {
      EK_ASSIGN_OR_RETURN(const int number, MergeParameter(parameter, &manifest, &index));
      renumbered.push_back(number);
    }
    CheckpointFileProto* file = manifest.add_file();
    *file = record;
    file->clear_parameter();
    for (CheckpointPieceProto& piece : *file->mutable_piece()) piece.set_parameter(renumbered[piece.parameter()]);
  }
  return manifest;
}

}  // namespace

std::string ShardFileName(int rank, int world_size) {
  return absl::StrFormat("rank-%05d-of-%05d.safetensors", rank, world_size);
}

absl::StatusOr<std::unique_ptr<FileLock>> PrepareCheckpointRoot(FileSystem& fs, const std::string& root) {
  const absl::Status made = fs.MakeDirectory(root);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  // A folder whose own name is lost in a power cut takes every checkpoint with it.
  EK_RETURN_IF_ERROR(fs.SyncDirectory(ParentFolder(root)));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<FileLock> lock, fs.Lock(absl::StrCat(root, "/", kLockName)));
  EK_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs.List(root));
  for (const DirectoryEntry& entry : entries) {
    if (!absl::StartsWith(entry.name, kAttemptPrefix)) continue;
    EK_RETURN_IF_ERROR(RemoveTree(fs, absl::StrCat(root, "/", entry.name)));
  }
  return lock;
}

std::string AttemptFolder(const std::string& root, int64_t step) {
  return absl::StrFormat("%s/%s%012d", root, kAttemptPrefix, step);
}

absl::StatusOr<std::string> BeginAttempt(FileSystem& fs, const std::string& root, int64_t step) {
  std::string attempt = AttemptFolder(root, step);
  EK_RETURN_IF_ERROR(RemoveTree(fs, attempt));
  EK_RETURN_IF_ERROR(fs.MakeDirectory(attempt));
  return attempt;
}

absl::Status CommitAttempt(FileSystem& fs, const std::string& root, const std::string& attempt, int64_t step,
                           const std::map<std::string, std::string>& metadata,
                           const std::vector<CheckpointFileProto>& files) {
  EK_ASSIGN_OR_RETURN(CheckpointManifestProto manifest, MergeRecords(files));
  manifest.set_step(step);
  manifest.set_world_size(static_cast<int>(files.size()));
  for (const auto& [key, value] : metadata) {
    CheckpointMetadataProto* entry = manifest.add_metadata();
    entry->set_key(key);
    entry->set_value(value);
  }
  EK_RETURN_IF_ERROR(ValidateManifest(manifest));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, fs.Create(absl::StrCat(attempt, "/", kManifestName)));
  EK_RETURN_IF_ERROR(file->Append(RenderManifest(manifest)));
  EK_RETURN_IF_ERROR(file->Sync());
  EK_RETURN_IF_ERROR(file->Close());
  EK_RETURN_IF_ERROR(fs.SyncDirectory(attempt));
  EK_RETURN_IF_ERROR(fs.Rename(attempt, absl::StrCat(root, "/", CheckpointFolderName(step))));
  return fs.SyncDirectory(root);
}

absl::Status RemoveOldCheckpoints(FileSystem& fs, const std::string& root, int64_t step, int keep) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> committed,
                      CheckpointReader::Open(&fs, absl::StrCat(root, "/", CheckpointFolderName(step))));
  EK_RETURN_IF_ERROR(committed->Verify());
  EK_ASSIGN_OR_RETURN(std::vector<DirectoryEntry> entries, fs.List(root));
  int valid = 0;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (!entry->is_directory || StepOfFolderName(entry->name) < 0) continue;
    const std::string path = absl::StrCat(root, "/", entry->name);
    if (valid < keep) {
      const absl::StatusOr<std::unique_ptr<CheckpointReader>> reader = CheckpointReader::Open(&fs, path);
      if (reader.ok() && (*reader)->Verify().ok()) ++valid;
      continue;  // a damaged one is not ours to delete while fewer than `keep` good ones are newer
    }
    EK_RETURN_IF_ERROR(RemoveTree(fs, path));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3
