#include "evenkeel/runtime/base/user_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

struct Closer {
  ~Closer() { close(fd); }
  const int fd;
};

absl::Status ErrnoStatus(const std::string& path, int error) {
  const std::string what = absl::StrCat("cannot read ", path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(what);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(what);
  if (error == EINVAL || error == ENAMETOOLONG || error == ELOOP) return absl::InvalidArgumentError(what);
  return absl::UnavailableError(what);
}

}  // namespace

absl::StatusOr<std::string> ReadUserFile(const std::string& path, int64_t max_bytes) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ErrnoStatus(path, errno);
  const Closer closer{fd};
  struct stat info = {};
  if (fstat(fd, &info) != 0) return ErrnoStatus(path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot read ", path, ": ", S_ISDIR(info.st_mode) ? "it is a folder" : "it is no regular file"));
  }
  std::string bytes;
  for (;;) {
    const size_t size = bytes.size();
    const int64_t want = std::min<int64_t>(1 << 20, max_bytes + 1 - static_cast<int64_t>(size));
    if (want <= 0) return absl::InvalidArgumentError(absl::StrCat(path, " has more than ", max_bytes, " bytes"));
    bytes.resize(size + static_cast<size_t>(want));
    const ssize_t got = read(fd, &bytes[size], static_cast<size_t>(want));
    bytes.resize(size + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got < 0 && errno != EINTR) return ErrnoStatus(path, errno);
    if (got == 0) return bytes;
  }
}

}  // namespace evenkeel
