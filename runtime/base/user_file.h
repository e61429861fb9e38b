// Reads a file that a user named: a text to train on, an order, whatever the path turns out to be.
//
//   EK_ASSIGN_OR_RETURN(const std::string text, ReadUserFile(path, /*max_bytes=*/1 << 20));
//
// FileSystem is for files of our own making and follows no links; this follows them.
#ifndef EVENKEEL_RUNTIME_BASE_USER_FILE_H_
#define EVENKEEL_RUNTIME_BASE_USER_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

// All bytes of a regular file. Reads and allocates at most max_bytes + 1 bytes, whatever the file says of its size.
// NotFound when there is nothing at `path`, InvalidArgument for a folder, a device, a pipe or more than `max_bytes`,
// PermissionDenied when it may not be read, Unavailable when reading fails; each names the path. Thread-safe.
absl::StatusOr<std::string> ReadUserFile(const std::string& path, int64_t max_bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_RUNTIME_BASE_USER_FILE_H_
