#include "evenkeel/runtime/device/host_device.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Mode = HostDevice::StreamMode;

absl::Status Failure(const std::string& text) { return absl::DataLossError(text); }

class HostDeviceTest : public ::testing::TestWithParam<Mode> {
 protected:
  static HostDevice::Options Base() {
    HostDevice::Options options;
    options.stream_mode = GetParam();
    return options;
  }
  static std::unique_ptr<Stream> NewStream(HostDevice& device, const char* name) {
    auto stream = device.CreateStream(name);
    EXPECT_OK(stream);
    return *std::move(stream);
  }
};

TEST_P(HostDeviceTest, RunsInOrderAndReportsWhatItIs) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  std::vector<int> order;
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(stream->Launch([&order, i] {
      order.push_back(i);
      return absl::OkStatus();
    }));
  }
  ASSERT_OK(stream->Synchronize());
  ASSERT_EQ(order.size(), 200u);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(order[i], i);
  EXPECT_EQ(stream->name(), "compute");
  EXPECT_EQ(stream->device(), device.get());
  EXPECT_EQ(stream->is_inline(), GetParam() == Mode::kInline);
}

TEST_P(HostDeviceTest, FirstErrorSticksAndLaterWorkIsSkipped) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  std::atomic<int> ran{0};
  auto count = [&ran] {
    ++ran;
    return absl::OkStatus();
  };
  absl::Notification go;
  ASSERT_OK(stream->Launch(count));
  if (GetParam() == Mode::kWorker) {
    ASSERT_OK(stream->Launch([&go] {
      go.WaitForNotification();
      return absl::OkStatus();
    }));
  }
  const absl::Status launched = stream->Launch([] { return Failure("first"); });
  if (GetParam() == Mode::kInline) {
    EXPECT_THAT(launched, StatusIs(absl::StatusCode::kDataLoss, "first"));
  } else {
    EXPECT_OK(launched);  // enqueued; the error is still to come
  }
  (void)stream->Launch([] { return Failure("second"); });
  (void)stream->Launch(count);
  char bytes[4] = {1, 2, 3, 4};
  (void)stream->Fill(bytes, 9, 4);
  go.Notify();
  EXPECT_THAT(stream->Synchronize(), StatusIs(absl::StatusCode::kDataLoss, "first"));
  EXPECT_THAT(stream->status(), StatusIs(absl::StatusCode::kDataLoss, "first"));
  EXPECT_THAT(stream->Launch(count), StatusIs(absl::StatusCode::kDataLoss, "first"));
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(bytes[0], 1);
}

TEST_P(HostDeviceTest, EventsFireOnFailedStreams) {
  const auto device = HostDevice::Create(Base());
  const auto broken = NewStream(*device, "broken"), other = NewStream(*device, "other");
  const auto event = device->CreateEvent();
  (void)broken->Launch([] { return Failure("x"); });
  EXPECT_THAT(broken->Synchronize(), StatusIs(absl::StatusCode::kDataLoss, "x"));
  EXPECT_THAT(broken->Record(event.get()), StatusIs(absl::StatusCode::kDataLoss, "x"));
  ASSERT_OK(other->Wait(event.get()));
  EXPECT_OK(other->Synchronize());  // does not hang, and has not failed itself
  EXPECT_TRUE(event->IsDone());
}

TEST_P(HostDeviceTest, CopiesAndFills) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  std::vector<int> from = {1, 2, 3}, to(3);
  ASSERT_OK(stream->Copy(to.data(), from.data(), 12));
  ASSERT_OK(stream->Copy(nullptr, nullptr, 0));
  ASSERT_OK(stream->Fill(from.data(), 0, 8));
  ASSERT_OK(stream->Fill(nullptr, 0, 0));
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(to, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(from, (std::vector<int>{0, 0, 3}));
}

TEST_P(HostDeviceTest, CountsEveryKindOfWork) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  const auto event = device->CreateEvent();
  char bytes[16] = {};
  const WorkCounts before = device->counters().Snapshot();
  {
    ASSERT_OK_AND_ASSIGN(const Buffer buffer, device->Allocate(100));
    ASSERT_OK_AND_ASSIGN(const Buffer empty, device->Allocate(0));
    EXPECT_EQ(empty.data(), nullptr);
    ASSERT_OK(stream->Launch([] { return absl::OkStatus(); }));
    ASSERT_OK(stream->LaunchCollective([] { return absl::OkStatus(); }));
    ASSERT_OK(stream->Copy(bytes, bytes + 8, 8));
    ASSERT_OK(stream->Fill(bytes, 0, 4));
    ASSERT_OK(stream->Record(event.get()));
    ASSERT_OK(stream->Wait(event.get()));
    device->counters().AddHostOperations(3);
  }
  ASSERT_OK(stream->Synchronize());
  const WorkCounts work = device->counters().Snapshot() - before;
  EXPECT_EQ(work.launches, 1);
  EXPECT_EQ(work.collectives, 1);
  EXPECT_EQ(work.copies, 1);
  EXPECT_EQ(work.copied_bytes, 8);
  EXPECT_EQ(work.fills, 1);
  EXPECT_EQ(work.allocations, 1);
  EXPECT_EQ(work.allocated_bytes, 100);
  EXPECT_EQ(work.frees, 1);
  EXPECT_EQ(work.event_records, 1);
  EXPECT_EQ(work.event_waits, 1);
  EXPECT_EQ(work.host_operations, 1 + 1 + 1 + 1 + 1 + 1 + 2 + 3);
  EXPECT_EQ(work.live_bytes, 0);
  EXPECT_EQ(work.peak_live_bytes, 100);
}

// The ping-pong of two streams: without the event edges, or with an edge that waits for the wrong record, delays
// make the sequence come out wrong.
TEST_P(HostDeviceTest, EventsOrderStreamsUnderInjectedDelays) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    HostDevice::Options options = Base();
    const PhiloxStream random(PhiloxKey(seed).Add("delays"));
    const std::string slow = seed % 2 == 0 ? "a" : "b";  // the other one runs ahead if it can
    options.delay = [random, slow](absl::string_view stream, int64_t n) {
      return absl::Microseconds(stream == slow ? random.Below(n, 400) : 0);
    };
    const auto device = HostDevice::Create(options);
    const auto a = NewStream(*device, "a"), b = NewStream(*device, "b");
    const auto a_done = device->CreateEvent(), b_done = device->CreateEvent();
    uint64_t value = 0;  // the two maps do not commute
    for (int i = 0; i < 8; ++i) {
      ASSERT_OK(a->Launch([&value] {
        value = value * 3 + 1;
        return absl::OkStatus();
      }));
      ASSERT_OK(a->Record(a_done.get()));
      ASSERT_OK(b->Wait(a_done.get()));
      ASSERT_OK(b->Launch([&value] {
        value = value * 5 + 3;
        return absl::OkStatus();
      }));
      ASSERT_OK(b->Record(b_done.get()));
      ASSERT_OK(a->Wait(b_done.get()));  // the events are used again: the latest record counts
    }
    ASSERT_OK(a->Synchronize());
    ASSERT_OK(b->Synchronize());
    uint64_t wanted = 0;
    for (int i = 0; i < 8; ++i) wanted = (wanted * 3 + 1) * 5 + 3;
    ASSERT_EQ(value, wanted) << "seed " << seed;
  }
}

TEST_P(HostDeviceTest, UnrecordedEventsAreDone) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  const auto event = device->CreateEvent();
  EXPECT_TRUE(event->IsDone());
  event->Synchronize();
  ASSERT_OK(stream->Wait(event.get()));
  EXPECT_OK(stream->Synchronize());
}

TEST_P(HostDeviceTest, DestructionRunsWhatIsQueued) {
  const auto device = HostDevice::Create(Base());
  std::atomic<int> ran{0};
  absl::Notification go;
  {
    const auto stream = NewStream(*device, "compute");
    if (GetParam() == Mode::kWorker) {
      ASSERT_OK(stream->Launch([&go] {
        go.WaitForNotification();
        return absl::OkStatus();
      }));
    }
    for (int i = 0; i < 50; ++i) {
      ASSERT_OK(stream->Launch([&ran] {
        ++ran;
        return absl::OkStatus();
      }));
    }
    go.Notify();
  }
  EXPECT_EQ(ran, 50);
}

TEST_P(HostDeviceTest, WorkIsDestroyedAfterItRan) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  auto owned = std::make_shared<int>(5);
  ASSERT_OK(stream->Launch([owned] { return *owned == 5 ? absl::OkStatus() : Failure("gone"); }));
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(owned.use_count(), 1);
}

TEST_P(HostDeviceTest, ManyThreadsMayEnqueue) {
  const auto device = HostDevice::Create(Base());
  const auto stream = NewStream(*device, "compute");
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        (void)stream->Launch([&ran] {
          ++ran;
          return absl::OkStatus();
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(ran, 400);
}

INSTANTIATE_TEST_SUITE_P(Modes, HostDeviceTest, ::testing::Values(Mode::kInline, Mode::kWorker),
                         [](const auto& info) { return info.param == Mode::kInline ? "Inline" : "Worker"; });

TEST(WorkerStreamTest, IsReallyAsynchronous) {
  const auto device = HostDevice::Create({.stream_mode = Mode::kWorker});
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("s"));
  absl::Notification go;
  const auto event = device->CreateEvent();
  std::thread::id worker;
  ASSERT_OK(stream->Launch([&] {
    go.WaitForNotification();
    worker = std::this_thread::get_id();
    return absl::OkStatus();
  }));
  ASSERT_OK(stream->Record(event.get()));
  EXPECT_FALSE(event->IsDone());
  go.Notify();
  event->Synchronize();
  EXPECT_TRUE(event->IsDone());
  ASSERT_OK(stream->Synchronize());
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(WorkerStreamTest, DelaysGoThroughTheClock) {
  VirtualClock clock;
  HostDevice::Options options{.stream_mode = Mode::kWorker};
  options.clock = &clock;
  options.delay = [](absl::string_view, int64_t n) { return absl::Hours(n); };
  const auto device = HostDevice::Create(options);
  ASSERT_OK_AND_ASSIGN(const auto stream, device->CreateStream("s"));
  for (int i = 0; i < 4; ++i) ASSERT_OK(stream->Launch([] { return absl::OkStatus(); }));
  ASSERT_OK(stream->Synchronize());
  EXPECT_EQ(clock.Now(), absl::Hours(0 + 1 + 2 + 3));
}

TEST(HostMemoryTest, IsAlignedLimitedAndPoisoned) {
  const auto device = HostDevice::Create({.name = "small", .max_live_bytes = 1000, .poison = true});
  ASSERT_OK_AND_ASSIGN(Buffer first, device->Allocate(600));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data()) % 64, 0u);
  EXPECT_EQ(first.bytes(), 600);
  EXPECT_EQ(first.device(), device.get());
  float value = 0;
  std::memcpy(&value, first.data() + 596, 4);
  EXPECT_TRUE(std::isnan(value));
  EXPECT_THAT(device->Allocate(401),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("small"), HasSubstr("401"), HasSubstr("600"), HasSubstr("1000"))));
  EXPECT_OK(device->Allocate(400));
  EXPECT_THAT(device->Allocate(-1), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  EXPECT_THAT(device->Allocate(std::numeric_limits<int64_t>::max()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overflow")));
  Buffer second = std::move(first);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): the state after a move is part of the contract
  EXPECT_EQ(second.bytes(), 600);
  second.Reset();
  second.Reset();
  EXPECT_EQ(device->counters().Snapshot().live_bytes, 0);
  EXPECT_EQ(device->counters().Snapshot().frees, 2);
}

// Two threads must not both take the last bytes.
TEST(HostMemoryTest, TheLimitHoldsAcrossThreads) {
  const auto device = HostDevice::Create({.max_live_bytes = 1000});
  std::atomic<int64_t> worst{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        auto buffer = device->Allocate(400);
        const int64_t live = device->counters().Snapshot().live_bytes;
        if (live > worst) worst = live;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(worst, 1000);
  EXPECT_LE(device->counters().Snapshot().peak_live_bytes, 1000);
  EXPECT_EQ(device->counters().Snapshot().live_bytes, 0);
}

TEST(HostMemoryTest, PeakIsSinceTheLastReset) {
  const auto device = HostDevice::Create();
  ASSERT_OK_AND_ASSIGN(const Buffer kept, device->Allocate(10));
  EXPECT_OK(device->Allocate(1000));
  EXPECT_EQ(device->counters().Snapshot().peak_live_bytes, 1010);
  device->counters().ResetPeak();
  EXPECT_EQ(device->counters().Snapshot().peak_live_bytes, 10);
  EXPECT_OK(device->Allocate(20));
  EXPECT_EQ(device->counters().Snapshot().peak_live_bytes, 30);
}

}  // namespace
}  // namespace evenkeel
