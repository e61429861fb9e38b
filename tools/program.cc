#include "evenkeel/tools/program.h"

#include <gflags/gflags.h>

#include <cstdio>
#include <cstdlib>

// The library's own hook for tests; exported, but declared in no public header.
namespace GFLAGS_NAMESPACE {
extern void (*gflags_exitfunc)(int);
}

DECLARE_bool(help);

namespace evenkeel::tools {

std::vector<std::string> ParseFlags(int* argc, char*** argv) {
  // gflags prints what is wrong with a flag and exits 1, which would read as a mismatch.
  GFLAGS_NAMESPACE::gflags_exitfunc = [](int) { std::exit(kExitBadInput); };
  gflags::ParseCommandLineNonHelpFlags(argc, argv, /*remove_flags=*/true);
  // Of help it prints every flag of every library, and exits 1.
  if (FLAGS_help) {
    gflags::SetCommandLineOption("help", "false");
    gflags::SetCommandLineOption("helpshort", "true");
  }
  GFLAGS_NAMESPACE::gflags_exitfunc = [](int) { std::exit(kExitHolds); };
  gflags::HandleCommandLineHelpFlags();
  GFLAGS_NAMESPACE::gflags_exitfunc = [](int code) { std::exit(code); };
  return std::vector<std::string>(*argv + 1, *argv + *argc);
}

std::string UserPath(const std::string& path) {
  if (path.empty() || path[0] == '/') return path;
  const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
  return folder == nullptr ? path : std::string(folder) + "/" + path;
}

int ExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitHolds;
    case absl::StatusCode::kDataLoss:
      return kExitMismatch;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kFailedPrecondition:
      return kExitBadInput;
    default:
      return kExitFault;
  }
}

int Report(const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  return ExitCode(status);
}

}  // namespace evenkeel::tools
