// The main of GoogleTest programs whose ranks are processes: joins the job, runs the tests, leaves the job.
//
// Arguments beside GoogleTest's: --piece_bytes=N, --eager_bytes=N, --payload_digest, --ranks_per_node=N, --two_level.
// Only rank 0 reports success; every rank reports its failures.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/mpi/mpi_backend.h"
#include "evenkeel/comm/mpi/testing/mpi_test_world.h"
#include "evenkeel/comm/topology.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

MpiBackend* g_world = nullptr;

struct Arguments {
  MpiOptions mpi;
  int ranks_per_node = 0;
};

bool ParseArgument(absl::string_view argument, Arguments* arguments) {
  if (absl::ConsumePrefix(&argument, "--piece_bytes=")) return absl::SimpleAtoi(argument, &arguments->mpi.piece_bytes);
  if (absl::ConsumePrefix(&argument, "--eager_bytes=")) return absl::SimpleAtoi(argument, &arguments->mpi.eager_bytes);
  if (absl::ConsumePrefix(&argument, "--ranks_per_node="))
    return absl::SimpleAtoi(argument, &arguments->ranks_per_node);
  if (argument == "--payload_digest") return arguments->mpi.payload_digest = true;
  if (argument == "--two_level") return arguments->mpi.two_level = true;
  return false;
}

int Main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  Arguments arguments;
  arguments.mpi.deadline = absl::Seconds(10);
  arguments.mpi.scratch = MpiTestScratch();
  for (int i = 1; i < argc; ++i) {
    if (ParseArgument(argv[i], &arguments)) continue;
    std::fprintf(stderr, "unknown argument %s\n", argv[i]);
    return 2;
  }
  if (arguments.ranks_per_node > 0) {
    absl::StatusOr<Topology> topology = Topology::Blocks(LaunchedWorldSize(), arguments.ranks_per_node);
    EK_CHECK_OK(topology);
    arguments.mpi.topology = *topology;
  }
  absl::StatusOr<std::unique_ptr<MpiBackend>> world = MpiBackend::Create(arguments.mpi);
  if (!world.ok()) {
    std::fprintf(stderr, "%s\n", world.status().ToString().c_str());
    return 3;
  }
  g_world = world->get();
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  std::unique_ptr<::testing::TestEventListener> printer;
  if (g_world->rank() != 0) printer.reset(listeners.Release(listeners.default_result_printer()));
  struct FailurePrinter : ::testing::EmptyTestEventListener {
    void OnTestPartResult(const ::testing::TestPartResult& result) override {
      if (!result.failed()) return;
      std::fprintf(stderr, "rank %d: %s:%d\n%s\n", MpiTestWorld().rank(), result.file_name(), result.line_number(),
                   result.message());
    }
  };
  if (g_world->rank() != 0) listeners.Append(new FailurePrinter);
  const int result = RUN_ALL_TESTS();
  // The launcher drops what has been written last when a process ends with an error: give it time to read.
  std::fflush(nullptr);
  if (result != 0) absl::SleepFor(absl::Milliseconds(300));
  world->reset();
  return result;
}

}  // namespace

MpiBackend& MpiTestWorld() {
  EK_CHECK(g_world != nullptr);
  return *g_world;
}

FailingScratch* MpiTestScratch() {
  static auto* scratch = new FailingScratch;  // outlives a world that cannot end
  return scratch;
}

int LaunchedWorldSize() {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size == nullptr ? 1 : std::atoi(size);
}

}  // namespace evenkeel::comm

int main(int argc, char** argv) { return evenkeel::comm::Main(argc, argv); }
