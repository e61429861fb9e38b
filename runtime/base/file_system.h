// The seam for files: what a checkpoint may do to a disk, so that a test can make every step fail or crash.
//
// The order that makes a write safe is the caller's: append, Sync the file, Close, SyncDirectory, Rename,
// SyncDirectory of the parent. Nothing is durable before its sync.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, fs->Create("run/attempt-7/rank-0.safetensors"));
//   EK_RETURN_IF_ERROR(file->Append(bytes));
//   EK_RETURN_IF_ERROR(file->Sync());
//   EK_RETURN_IF_ERROR(file->Close());
//
// Errors name the path: NotFound, AlreadyExists, ResourceExhausted (no space, quota, file size limit),
// InvalidArgument (not a regular file, a link), FailedPrecondition (lock held), Unavailable (everything else).
#ifndef EVENKEEL_RUNTIME_BASE_FILE_SYSTEM_H_
#define EVENKEEL_RUNTIME_BASE_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

// A new file being written from front to back. Not thread-safe. The destructor closes without syncing.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // Writes all of `bytes` or fails; after a failure only Close is useful.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  // Returns when what was appended survives a power cut (its name may not: see SyncDirectory).
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

// Held until destroyed. A process that dies releases it.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

struct DirectoryEntry {
  std::string name;  // without the folder
  bool is_directory = false;
  bool is_regular_file = false;  // neither: a link, a device, a pipe
};

// Thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // A new empty regular file; AlreadyExists when the name is taken. Never follows a link at the last component.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // Size of a regular file; InvalidArgument when the path is a link or anything but a regular file.
  virtual absl::StatusOr<int64_t> FileSize(const std::string& path) = 0;
  // Bytes [offset, offset + length) of a regular file. Checks the size before it allocates: DataLoss naming both sizes
  // when the file is shorter. Never follows a link at the last component.
  virtual absl::StatusOr<std::string> Read(const std::string& path, int64_t offset, int64_t length) = 0;
  // As Read, into `destination` of `length` bytes.
  virtual absl::Status ReadInto(const std::string& path, int64_t offset, int64_t length, void* destination) = 0;
  // One level; AlreadyExists when there is something of that name.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // Names created in, renamed into or removed from `path` so far survive a power cut.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Atomic. `to` must not exist.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // An empty folder.
  virtual absl::Status RemoveDirectory(const std::string& path) = 0;
  // Sorted by name.
  virtual absl::StatusOr<std::vector<DirectoryEntry>> List(const std::string& path) = 0;
  // An exclusive lock on a file that is made when absent. FailedPrecondition when another holder has it.
  virtual absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;

  // The machine's file system. Never destroyed.
  static FileSystem* Real();
};

// Removes a folder and all it holds; a link inside is removed, not followed. OK when it does not exist.
absl::Status RemoveTree(FileSystem& fs, const std::string& path);

// Reads a whole regular file of at most `max_bytes`; InvalidArgument naming size and limit when it is larger.
absl::StatusOr<std::string> ReadFile(FileSystem& fs, const std::string& path, int64_t max_bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_FILE_SYSTEM_H_
