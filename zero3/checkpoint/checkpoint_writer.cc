#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/manifest.h"

namespace evenkeel::zero3 {
namespace {

constexpr char kAttemptPrefix[] = "attempt-";
constexpr char kLockName[] = "writer.lock";
constexpr int64_t kMaxVoteBytes = 64 << 20;

absl::Status CheckpointError(const absl::Status& status, int rank, int size, int64_t step) {
  if (status.ok()) return status;
  ErrorContext context{.module = "zero3", .operation = "checkpoint"};
  context.sequence = step;
  context.rank = rank;
  context.size = size;
  context.next_step = "nothing was published; earlier checkpoints are untouched";
  return MakeError(status.code(), context, status.message());
}

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

}  // namespace

CheckpointWriter::CheckpointWriter(FileSystem* fs, comm::Communicator* world, Stream* stream,
                                   const CheckpointWriterOptions& options)
    : fs_(fs), world_(world), stream_(stream), options_(options) {}

CheckpointWriter::~CheckpointWriter() {
  if (background_.joinable()) background_.join();
}

absl::StatusOr<std::unique_ptr<CheckpointWriter>> CheckpointWriter::Create(FileSystem* fs, comm::Communicator* world,
                                                                           Stream* stream,
                                                                           const CheckpointWriterOptions& options) {
  std::unique_ptr<CheckpointWriter> writer(new CheckpointWriter(fs, world, stream, options));
  const absl::Status prepared = writer->rank() == 0 ? writer->Prepare() : absl::OkStatus();
  EK_RETURN_IF_ERROR(writer->ShareOutcome(prepared));
  return writer;
}

absl::Status CheckpointWriter::Prepare() {
  if (options_.keep < 2) {
    return absl::InvalidArgumentError(absl::StrCat("keep is ", options_.keep, ": at least 2 checkpoints must stay"));
  }
  const absl::Status made = fs_->MakeDirectory(options_.root);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  // A folder whose own name is lost in a power cut takes every checkpoint with it.
  EK_RETURN_IF_ERROR(fs_->SyncDirectory(ParentFolder(options_.root)));
  EK_ASSIGN_OR_RETURN(lock_, fs_->Lock(absl::StrCat(options_.root, "/", kLockName)));
  EK_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, fs_->List(options_.root));
  for (const DirectoryEntry& entry : entries) {
    if (!absl::StartsWith(entry.name, kAttemptPrefix)) continue;
    EK_RETURN_IF_ERROR(RemoveTree(*fs_, absl::StrCat(options_.root, "/", entry.name)));
  }
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Start(int64_t step, const std::map<std::string, std::string>& metadata,
                                     const std::vector<CheckpointPiece>& pieces) {
  if (in_progress_) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint of step ", step_, " is not finished"));
  }
  step_ = step;
  metadata_ = metadata;
  attempt_ = absl::StrFormat("%s/%s%012d", options_.root, kAttemptPrefix, step);
  absl::Status made = absl::OkStatus();
  if (rank() == 0) {
    made = RemoveTree(*fs_, attempt_);
    if (made.ok()) made = fs_->MakeDirectory(attempt_);
  }
  EK_RETURN_IF_ERROR(ShareOutcome(made));
  in_progress_ = true;
  absl::StatusOr<ShardFile> file =
      ShardFile::Build(absl::StrFormat("rank-%05d-of-%05d.safetensors", rank(), size()), pieces);
  if (!file.ok()) {
    written_ = file.status();
    return absl::OkStatus();  // the vote carries it to everybody
  }
  background_ = std::thread([this, file = *std::move(file)] { WriteInBackground(file); });
  return absl::OkStatus();
}

void CheckpointWriter::WriteInBackground(const ShardFile& file) { written_ = file.Write(*fs_, attempt_); }

absl::Status CheckpointWriter::Finish() {
  if (!in_progress_) return absl::FailedPreconditionError("no checkpoint was started");
  if (background_.joinable()) background_.join();
  in_progress_ = false;
  CheckpointVoteProto mine;
  mine.set_code(static_cast<int>(written_.status().code()));
  mine.set_message(std::string(written_.status().message()));
  if (written_.ok()) *mine.mutable_file() = *std::move(written_);
  written_ = absl::UnknownError("not written");
  EK_ASSIGN_OR_RETURN(const std::vector<CheckpointVoteProto> votes, GatherVotes(mine));
  absl::Status outcome;
  if (rank() == 0) {
    outcome = Commit(votes);
    if (!outcome.ok()) RemoveTree(*fs_, attempt_).IgnoreError();
  }
  return ShareOutcome(outcome);
}

absl::StatusOr<std::vector<CheckpointVoteProto>> CheckpointWriter::GatherVotes(const CheckpointVoteProto& mine) {
  if (world_ == nullptr) return std::vector<CheckpointVoteProto>{mine};
  std::string bytes;
  mine.SerializeToString(&bytes);
  int64_t length = static_cast<int64_t>(bytes.size());
  std::vector<int64_t> lengths(size());
  EK_RETURN_IF_ERROR(world_->AllGather(ConstTensorView(&length, DType::kI64, {1}),
                                       TensorView(lengths.data(), DType::kI64, {size()}), *stream_));
  EK_RETURN_IF_ERROR(stream_->Synchronize());
  int64_t total = 0;
  for (int64_t n : lengths) {
    if (n < 0 || n > kMaxVoteBytes) return absl::InternalError(absl::StrCat("a vote of ", n, " bytes"));
    total += n;
  }
  std::string all(static_cast<size_t>(total), '\0');
  EK_RETURN_IF_ERROR(world_->AllGatherV(ConstTensorView(bytes.data(), DType::kU8, {length}),
                                        TensorView(all.data(), DType::kU8, {total}), lengths, *stream_));
  EK_RETURN_IF_ERROR(stream_->Synchronize());
  std::vector<CheckpointVoteProto> votes(size());
  size_t at = 0;
  for (int r = 0; r < size(); ++r) {
    if (!votes[r].ParseFromString(all.substr(at, static_cast<size_t>(lengths[r])))) {
      return absl::InternalError(absl::StrCat("the vote of rank ", r, " does not parse"));
    }
    at += static_cast<size_t>(lengths[r]);
  }
  return votes;
}

absl::Status CheckpointWriter::ShareOutcome(const absl::Status& outcome) {
  if (world_ == nullptr) return CheckpointError(outcome, rank(), size(), step_);
  CheckpointVoteProto mine;
  mine.set_code(static_cast<int>(outcome.code()));
  mine.set_message(std::string(outcome.message()));
  EK_ASSIGN_OR_RETURN(const std::vector<CheckpointVoteProto> votes, GatherVotes(mine));
  return CheckpointError(absl::Status(static_cast<absl::StatusCode>(votes[0].code()), votes[0].message()), rank(),
                         size(), step_);
}

absl::Status CheckpointWriter::Commit(const std::vector<CheckpointVoteProto>& votes) {
  CheckpointManifestProto manifest;
  manifest.set_step(step_);
  manifest.set_world_size(size());
  for (const auto& [key, value] : metadata_) (*manifest.mutable_metadata())[key] = value;
  std::map<std::string, int> index;
  for (int r = 0; r < size(); ++r) {
    if (votes[r].code() != 0) {
      return absl::Status(static_cast<absl::StatusCode>(votes[r].code()),
                          absl::StrCat("rank ", r, ": ", votes[r].message()));
    }
    std::vector<int> renumbered;
    for (const CheckpointParameterProto& parameter : votes[r].file().parameter()) {
      EK_ASSIGN_OR_RETURN(const int number, MergeParameter(parameter, &manifest, &index));
      renumbered.push_back(number);
    }
    CheckpointFileProto* file = manifest.add_file();
    *file = votes[r].file();
    file->clear_parameter();
    for (CheckpointPieceProto& piece : *file->mutable_piece()) piece.set_parameter(renumbered[piece.parameter()]);
  }
  EK_RETURN_IF_ERROR(ValidateManifest(manifest));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file,
                      fs_->Create(absl::StrCat(attempt_, "/", kManifestName)));
  EK_RETURN_IF_ERROR(file->Append(RenderManifest(manifest)));
  EK_RETURN_IF_ERROR(file->Sync());
  EK_RETURN_IF_ERROR(file->Close());
  EK_RETURN_IF_ERROR(fs_->SyncDirectory(attempt_));
  EK_RETURN_IF_ERROR(fs_->Rename(attempt_, absl::StrCat(options_.root, "/", CheckpointFolderName(step_))));
  EK_RETURN_IF_ERROR(fs_->SyncDirectory(options_.root));
  // From here on the checkpoint is there: trouble with old ones must not be reported as its failure.
  RemoveOld(step_).IgnoreError();
  return absl::OkStatus();
}

absl::Status CheckpointWriter::RemoveOld(int64_t committed_step) {
  EK_ASSIGN_OR_RETURN(
      const std::unique_ptr<CheckpointReader> committed,
      CheckpointReader::Open(fs_, absl::StrCat(options_.root, "/", CheckpointFolderName(committed_step))));
  EK_RETURN_IF_ERROR(committed->Verify());
  EK_ASSIGN_OR_RETURN(std::vector<DirectoryEntry> entries, fs_->List(options_.root));
  int valid = 0;
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (!entry->is_directory || StepOfFolderName(entry->name) < 0) continue;
    const std::string path = absl::StrCat(options_.root, "/", entry->name);
    if (valid < options_.keep) {
      const absl::StatusOr<std::unique_ptr<CheckpointReader>> reader = CheckpointReader::Open(fs_, path);
      if (reader.ok() && (*reader)->Verify().ok()) ++valid;
      continue;  // a damaged one is not ours to delete while fewer than `keep` good ones are newer
    }
    EK_RETURN_IF_ERROR(RemoveTree(*fs_, path));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3
