#include "evenkeel/comm/testing/buffer_watch.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Two ranks enqueue `issue` on streams whose first operation waits; rank 0 then does `meanwhile` to its buffers.
std::vector<absl::Status> RunDelayed(
    const std::function<absl::Status(Communicator&, TensorView, TensorView, Stream&)>& issue,
    const std::function<void(std::vector<float>& send, std::vector<float>& recv)>& meanwhile,
    std::vector<float>* result) {
  auto world = InProcessWorld::Create({.world_size = 2, .deadline = absl::Seconds(60)});
  EK_CHECK_OK(world);
  BufferWatch watch;
  return RunRanks(**world, [&](Backend& backend) -> absl::Status {
    absl::Notification go;
    HostDevice::Options options;
    options.stream_mode = HostDevice::StreamMode::kWorker;
    options.delay = [&go](absl::string_view, int64_t) {
      go.WaitForNotification();
      return absl::ZeroDuration();
    };
    const auto device = HostDevice::Create(options);
    std::vector<float> send(8, 1.0f + static_cast<float>(backend.rank())), recv(8, 5.0f);
    const auto watched = ObserveBackend(&backend, &watch);
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, watched->CreateGroup(WorldGroup(2)));
    const absl::Status issued = issue(*group, TensorView(send.data(), DType::kF32, Shape({8})),
                                      TensorView(recv.data(), DType::kF32, Shape({8})), *stream);
    if (backend.rank() == 0) meanwhile(send, recv);
    go.Notify();
    const absl::Status late = stream->Synchronize();
    if (backend.rank() == 0) *result = recv;
    return issued.ok() ? late : issued;
  });
}

absl::Status Sum(Communicator& group, TensorView send, TensorView recv, Stream& stream) {
  return group.AllReduce(send, recv, ReduceOp::kSum, stream);
}

TEST(BufferWatchTest, C21_WhoReadsEarlySeesNaN) {
  std::vector<float> result, early;
  const auto statuses = RunDelayed(
      Sum, [&early](std::vector<float>&, std::vector<float>& recv) { early = recv; }, &result);
  EXPECT_OK(FirstFailure(statuses));
  for (const float value : early) EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(result, std::vector<float>(8, 3.0f));
}

TEST(BufferWatchTest, C21_BufferReusedWhileItsCallIsQueuedIsNamed) {
  const struct {
    std::function<void(std::vector<float>&, std::vector<float>&)> meanwhile;
    const char* what;
  } cases[] = {
      {[](std::vector<float>& send, std::vector<float>&) { send[3] = 7; }, "the send buffer was written"},
      {[](std::vector<float>&, std::vector<float>& recv) { recv[5] = 7; }, "the receive buffer was written"},
  };
  for (const auto& c : cases) {
    std::vector<float> result;
    const auto statuses = RunDelayed(Sum, c.meanwhile, &result);
    EXPECT_THAT(statuses[0], StatusIs(absl::StatusCode::kFailedPrecondition,
                                      AllOf(HasSubstr("comm all_reduce group=world"), HasSubstr(c.what))));
    // The call was skipped, and the peer learns why it came to nothing.
    EXPECT_THAT(statuses[1], StatusIs(absl::StatusCode::kAborted, HasSubstr("skipped the call")));
  }
}

// The root's buffer is read, the others' are written.
TEST(BufferWatchTest, C21_BroadcastsToo) {
  for (const int root : {0, 1}) {
    std::vector<float> result;
    const auto statuses = RunDelayed([root](Communicator& group, TensorView send, TensorView,
                                            Stream& stream) { return group.Broadcast(send, root, stream); },
                                     [](std::vector<float>& send, std::vector<float>&) { send[0] = 9; }, &result);
    EXPECT_THAT(statuses[0], StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("was written while")));
  }
}

// Right programs are left alone: every operation and placement, on worker streams.
TEST(BufferWatchTest, WatchedBackendConforms) {
  const ConformanceOptions options{.large = 300, .stream_mode = HostDevice::StreamMode::kWorker};
  for (const ConformanceCase& c : OperationCases(options)) {
    ASSERT_OK_AND_ASSIGN(const auto world, InProcessWorld::Create({.world_size = 3, .deadline = absl::Seconds(60)}));
    BufferWatch watch;
    const auto statuses = RunRanks(*world, [&](Backend& backend) { return c.run(*ObserveBackend(&backend, &watch)); });
    for (const absl::Status& status : statuses) EXPECT_OK(status) << c.name;
  }
}

}  // namespace
}  // namespace evenkeel::comm
