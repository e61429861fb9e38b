#include "evenkeel/runtime/base/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/status_macros.h"

namespace evenkeel {
namespace {

absl::Status ErrnoStatus(int error, absl::string_view what, const std::string& path) {
  const std::string text = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
    case ENOTEMPTY:
      return absl::AlreadyExistsError(text);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(text);
    case ELOOP:
    case EISDIR:
    case ENOTDIR:
      return absl::InvalidArgumentError(text);
    default:
      return absl::UnavailableError(text);
  }
}

// Owns a descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

class RealWritableFile final : public WritableFile {
 public:
  RealWritableFile(Descriptor descriptor, std::string path)
      : descriptor_(std::move(descriptor)), path_(std::move(path)) {}

  absl::Status Append(absl::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = write(descriptor_.get(), bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return ErrnoStatus(errno, "cannot write", path_);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    return fsync(descriptor_.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot sync", path_);
  }
  absl::Status Close() override {
    const int fd = descriptor_.Release();
    if (fd < 0) return absl::OkStatus();
    return close(fd) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot close", path_);
  }

 private:
  Descriptor descriptor_;
  const std::string path_;
};

class RealFileLock final : public FileLock {
 public:
  explicit RealFileLock(Descriptor descriptor) : descriptor_(std::move(descriptor)) {}

 private:
  Descriptor descriptor_;
};

class RealFileSystem final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    Descriptor descriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (descriptor.get() < 0) return ErrnoStatus(errno, "cannot create", path);
    return std::make_unique<RealWritableFile>(std::move(descriptor), path);
  }

  absl::StatusOr<int64_t> FileSize(const std::string& path) override {
    EK_ASSIGN_OR_RETURN(const auto opened, Open(path));
    return opened.second;
  }

  absl::StatusOr<std::string> Read(const std::string& path, int64_t offset, int64_t length) override {
    EK_ASSIGN_OR_RETURN(const auto opened, Open(path));
    EK_RETURN_IF_ERROR(CheckRange(path, offset, length, opened.second));
    std::string bytes(static_cast<size_t>(length), '\0');
    EK_RETURN_IF_ERROR(ReadAt(opened.first.get(), path, offset, length, bytes.data()));
    return bytes;
  }

  absl::Status ReadInto(const std::string& path, int64_t offset, int64_t length, void* destination) override {
    EK_ASSIGN_OR_RETURN(const auto opened, Open(path));
    EK_RETURN_IF_ERROR(CheckRange(path, offset, length, opened.second));
    return ReadAt(opened.first.get(), path, offset, length, static_cast<char*>(destination));
  }

  absl::Status MakeDirectory(const std::string& path) override {
    return mkdir(path.c_str(), 0755) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot make folder", path);
  }

  absl::Status SyncDirectory(const std::string& path) override {
    Descriptor descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (descriptor.get() < 0) return ErrnoStatus(errno, "cannot open folder", path);
    return fsync(descriptor.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot sync folder", path);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return absl::OkStatus();
    return ErrnoStatus(errno, absl::StrCat("cannot rename ", from, " to"), to);
  }

  absl::Status RemoveFile(const std::string& path) override {
    return unlink(path.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot remove", path);
  }

  absl::Status RemoveDirectory(const std::string& path) override {
    return rmdir(path.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, "cannot remove folder", path);
  }

  absl::StatusOr<std::vector<DirectoryEntry>> List(const std::string& path) override {
    DIR* const directory = opendir(path.c_str());
    if (directory == nullptr) return ErrnoStatus(errno, "cannot list", path);
    std::vector<DirectoryEntry> entries;
    while (const dirent* entry = readdir(directory)) {
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat info;
      if (fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;  // gone meanwhile
      entries.push_back({name, S_ISDIR(info.st_mode), S_ISREG(info.st_mode)});
    }
    closedir(directory);
    std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return entries;
  }

  absl::StatusOr<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    Descriptor descriptor(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (descriptor.get() < 0) return ErrnoStatus(errno, "cannot open lock file", path);
    if (flock(descriptor.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK)
        return absl::FailedPreconditionError(absl::StrCat("another holder has the lock ", path));
      return ErrnoStatus(errno, "cannot lock", path);
    }
    return std::make_unique<RealFileLock>(std::move(descriptor));
  }

 private:
  // A regular file and its size. O_NONBLOCK: a pipe of that name must not block the reader.
  static absl::StatusOr<std::pair<Descriptor, int64_t>> Open(const std::string& path) {
    Descriptor descriptor(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    if (descriptor.get() < 0) return ErrnoStatus(errno, "cannot open", path);
    struct stat info;
    if (fstat(descriptor.get(), &info) != 0) return ErrnoStatus(errno, "cannot stat", path);
    if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
    return std::pair<Descriptor, int64_t>(std::move(descriptor), info.st_size);
  }

  static absl::Status CheckRange(const std::string& path, int64_t offset, int64_t length, int64_t size) {
    if (offset < 0 || length < 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": cannot read ", length, " bytes at ", offset));
    }
    if (offset > size || length > size - offset) {
      return absl::DataLossError(
          absl::StrCat(path, ": ", length, " bytes wanted at ", offset, ", the file has ", size, " bytes"));
    }
    return absl::OkStatus();
  }

  static absl::Status ReadAt(int fd, const std::string& path, int64_t offset, int64_t length, char* destination) {
    while (length > 0) {
      const ssize_t count = pread(fd, destination, static_cast<size_t>(length), offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return ErrnoStatus(errno, "cannot read", path);
      if (count == 0) return absl::DataLossError(absl::StrCat(path, ": ends ", length, " bytes early"));
      destination += count;
      offset += count;
      length -= count;
    }
    return absl::OkStatus();
  }
};

}  // namespace

FileSystem* FileSystem::Real() {
  static FileSystem* const fs = new RealFileSystem;
  return fs;
}

absl::Status RemoveTree(FileSystem& fs, const std::string& path) {
  const absl::StatusOr<std::vector<DirectoryEntry>> entries = fs.List(path);
  if (absl::IsNotFound(entries.status())) return absl::OkStatus();
  EK_RETURN_IF_ERROR(entries.status());
  for (const DirectoryEntry& entry : *entries) {
    const std::string child = absl::StrCat(path, "/", entry.name);
    EK_RETURN_IF_ERROR(entry.is_directory ? RemoveTree(fs, child) : fs.RemoveFile(child));
  }
  return fs.RemoveDirectory(path);
}

absl::StatusOr<std::string> ReadFile(FileSystem& fs, const std::string& path, int64_t max_bytes) {
  EK_ASSIGN_OR_RETURN(const int64_t size, fs.FileSize(path));
  if (size > max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", size, " bytes, over the limit of ", max_bytes));
  }
  return fs.Read(path, 0, size);
}

}  // namespace evenkeel
