#include "evenkeel/zero3/checkpoint/checkpoint_writer.h"

#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/tensor_view.h"
#include "evenkeel/zero3/checkpoint/commit.h"

namespace evenkeel::zero3 {
namespace {

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
  EK_ASSIGN_OR_RETURN(lock_, PrepareCheckpointRoot(*fs_, options_.root));
  return absl::OkStatus();
}

absl::Status CheckpointWriter::Start(int64_t step, const std::map<std::string, std::string>& metadata,
                                     const std::vector<CheckpointPiece>& pieces) {
  if (in_progress_) {
    return absl::FailedPreconditionError(absl::StrCat("the checkpoint of step ", step_, " is not finished"));
  }
  step_ = step;
  metadata_ = metadata;
  attempt_ = AttemptFolder(options_.root, step);
  absl::Status made = absl::OkStatus();
  if (rank() == 0) made = BeginAttempt(*fs_, options_.root, step).status();
  EK_RETURN_IF_ERROR(ShareOutcome(made));
  in_progress_ = true;
  absl::StatusOr<ShardFile> file = ShardFile::Build(ShardFileName(rank(), size()), pieces);
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
  std::vector<CheckpointFileProto> files;
  for (int r = 0; r < size(); ++r) {
    if (votes[r].code() != 0) {
      return absl::Status(static_cast<absl::StatusCode>(votes[r].code()),
                          absl::StrCat("rank ", r, ": ", votes[r].message()));
    }
    files.push_back(votes[r].file());
  }
  EK_RETURN_IF_ERROR(CommitAttempt(*fs_, options_.root, attempt_, step_, metadata_, files));
  // From here on the checkpoint is there: trouble with old ones must not be reported as its failure.
  RemoveOldCheckpoints(*fs_, options_.root, step_, options_.keep).IgnoreError();
  return absl::OkStatus();
}

}  // namespace evenkeel::zero3
