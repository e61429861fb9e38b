// Looks into checkpoints, verifies them, and rewrites them for another layout.
//
//   checkpoint inspect DIR
//   checkpoint verify DIR                                   exit 1 naming file, tensor and block
//   checkpoint reshard SRC DST --world=8 --ep=4 --tp=2
//
// DIR is one checkpoint, or a folder of checkpoints: then its newest valid one is taken (verify: all are verified).
// Exit codes: 0 good, 1 damaged, 2 bad usage, 3 a disk that fails.
#include <gflags/gflags.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/tensor/dtype.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/zero3/checkpoint/checkpoint_reader.h"
#include "evenkeel/zero3/checkpoint/reshard.h"

DEFINE_int32(world, 1, "reshard: number of ranks of the new layout (tp * dp)");
DEFINE_int32(ep, 1, "reshard: expert-parallel size; divides world / tp");
DEFINE_int32(tp, 1, "reshard: tensor-parallel size; divides world");

namespace evenkeel::tools {
namespace {

using zero3::CheckpointReader;

constexpr char kUsage[] = "checkpoint inspect DIR | verify DIR | reshard SRC DST [--world=N] [--ep=N] [--tp=N]";

// One checkpoint, or the newest valid one of a folder of checkpoints.
absl::StatusOr<std::unique_ptr<CheckpointReader>> OpenAny(const std::string& folder) {
  absl::StatusOr<std::unique_ptr<CheckpointReader>> one = CheckpointReader::Open(FileSystem::Real(), folder);
  if (one.ok() || !absl::IsNotFound(one.status())) return one;
  EK_ASSIGN_OR_RETURN(zero3::FoundCheckpoint found, zero3::FindLatestCheckpoint(FileSystem::Real(), folder));
  for (const std::string& skipped : found.skipped) std::fprintf(stderr, "skipped %s\n", skipped.c_str());
  return std::move(found.reader);
}

absl::Status Inspect(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader, OpenAny(folder));
  std::printf("%s: step %lld, %d files of world size %d\n", reader->folder().c_str(),
              static_cast<long long>(reader->step()), reader->manifest().file_size(), reader->manifest().world_size());
  for (const auto& [key, value] : reader->metadata()) {
    std::printf("  %s = %s\n", key.c_str(), value.c_str());
  }
  std::printf("%-48s %-14s %-5s %-22s %14s %7s\n", "parameter", "state", "dtype", "global shape", "bytes", "pieces");
  int64_t total = 0;
  for (const CheckpointReader::StoredTensor& tensor : reader->Tensors()) {
    const std::string shape = absl::StrCat("[", absl::StrJoin(tensor.parameter->global_shape(), ", "), "]");
    std::printf("%-48s %-14s %-5s %-22s %14lld %7d\n", tensor.parameter->name().c_str(), tensor.state.c_str(),
                std::string(DTypeName(tensor.dtype)).c_str(), shape.c_str(), static_cast<long long>(tensor.bytes),
                tensor.pieces);
    total += tensor.bytes;
  }
  std::printf("total %lld bytes\n", static_cast<long long>(total));
  return absl::OkStatus();
}

absl::Status VerifyOne(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                      CheckpointReader::Open(FileSystem::Real(), folder));
  EK_RETURN_IF_ERROR(reader->Verify());
  EK_ASSIGN_OR_RETURN(const uint64_t digest, reader->StateDigest());
  std::printf("%s: step %lld, every byte verifies, state digest %016llx\n", folder.c_str(),
              static_cast<long long>(reader->step()), static_cast<unsigned long long>(digest));
  return absl::OkStatus();
}

absl::Status Verify(const std::string& folder) {
  const absl::Status one = VerifyOne(folder);
  if (!absl::IsNotFound(one)) return one;
  EK_ASSIGN_OR_RETURN(const std::vector<DirectoryEntry> entries, FileSystem::Real()->List(folder));
  std::vector<absl::Status> failures;
  int count = 0;
  for (const DirectoryEntry& entry : entries) {
    if (!entry.is_directory || zero3::StepOfFolderName(entry.name) < 0) continue;
    ++count;
    const absl::Status status = VerifyOne(absl::StrCat(folder, "/", entry.name));
    if (!status.ok()) failures.push_back(status);
  }
  if (count == 0) return absl::NotFoundError(absl::StrCat("no checkpoint in ", folder));
  if (failures.empty()) return absl::OkStatus();
  if (failures.size() == 1) return failures[0];
  for (const absl::Status& failure : failures) std::fprintf(stderr, "%s\n", std::string(failure.message()).c_str());
  return absl::Status(failures[0].code(), absl::StrCat(failures.size(), " of ", count, " checkpoints in ", folder,
                                                       " are not whole, see above"));
}

absl::Status Reshard(const std::string& source, const std::string& target) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader, OpenAny(source));
  EK_RETURN_IF_ERROR(zero3::ReshardCheckpoint(*reader, FileSystem::Real(), target,
                                              {.world = FLAGS_world, .ep = FLAGS_ep, .tp = FLAGS_tp}));
  std::printf("%s/%s: step %lld for world %d, ep %d, tp %d\n", target.c_str(),
              zero3::CheckpointFolderName(reader->step()).c_str(), static_cast<long long>(reader->step()), FLAGS_world,
              FLAGS_ep, FLAGS_tp);
  return absl::OkStatus();
}

absl::Status Run(const std::vector<std::string>& words) {
  if (words.size() == 2 && words[0] == "inspect") return Inspect(UserPath(words[1]));
  if (words.size() == 2 && words[0] == "verify") return Verify(UserPath(words[1]));
  if (words.size() == 3 && words[0] == "reshard") return Reshard(UserPath(words[1]), UserPath(words[2]));
  return absl::InvalidArgumentError(absl::StrCat("usage: ", kUsage));
}

}  // namespace
}  // namespace evenkeel::tools

int main(int argc, char** argv) {
  gflags::SetUsageMessage(evenkeel::tools::kUsage);
  const std::vector<std::string> words = evenkeel::tools::ParseFlags(&argc, &argv);
  return evenkeel::tools::Report(evenkeel::tools::Run(words));
}
