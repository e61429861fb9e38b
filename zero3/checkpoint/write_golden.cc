// Writes the checkpoint of golden_test.cc in the current format below a folder: once for every new format version.
//
//   bazel run //zero3/checkpoint:write_golden -- $PWD/zero3/checkpoint/testdata/v2
#include <cstdio>

#include "absl/status/status.h"
#include "evenkeel/runtime/base/file_system.h"
#include "evenkeel/zero3/testing/small_checkpoint.h"

int main(int argc, char** argv) {
  const absl::Status status =
      argc == 2 ? evenkeel::zero3::SaveAtLayout(*evenkeel::FileSystem::Real(), {.dp = 2, .tp = 2, .ep = 2}, 42, argv[1])
                : absl::InvalidArgumentError("one folder");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
