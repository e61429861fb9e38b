// What the programs share: words after the flags, paths as the user typed them, and exit codes.
#ifndef EVENKEEL_TOOLS_PROGRAM_H_
#define EVENKEEL_TOOLS_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel::tools {

// Exit codes of every program.
inline constexpr int kExitHolds = 0;
inline constexpr int kExitMismatch = 1;  // a comparison or a check failed: Aborted from a verdict, DataLoss
inline constexpr int kExitBadInput = 2;  // usage or configuration: InvalidArgument, NotFound, ...
inline constexpr int kExitFault = 3;     // dead peer, deadline, disk

// Parses gflags and returns the words that are no flags, without the program's name. An unknown or malformed flag is
// one line on stderr and exit 2 (gflags itself would exit 1). --help prints the usage and the program's own flags, and
// exits 0.
std::vector<std::string> ParseFlags(int* argc, char*** argv);

// A path relative to where the user stood when typing `bazel run` (BUILD_WORKING_DIRECTORY); others unchanged.
std::string UserPath(const std::string& path);

int ExitCode(const absl::Status& status);

// Prints one line "error: ..." to stderr when the status is not OK, and returns its exit code.
int Report(const absl::Status& status);

}  // namespace evenkeel::tools

#endif  // EVENKEEL_TOOLS_PROGRAM_H_
