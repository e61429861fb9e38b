// The decorators of this folder: what they record, trace and break, and what they leave alone.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/chrome_trace.h"
#include "evenkeel/comm/testing/conformance.h"
#include "evenkeel/comm/testing/fault_injector.h"
#include "evenkeel/comm/testing/observer.h"
#include "evenkeel/comm/testing/operation_log.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

std::unique_ptr<InProcessWorld> MakeWorld(int size, absl::Duration deadline = absl::Seconds(20)) {
  auto world = InProcessWorld::Create({.world_size = size, .deadline = deadline});
  EK_CHECK_OK(world);
  return *std::move(world);
}

// Three sums and a broadcast on the group of all ranks.
absl::Status ThreeSums(Backend& backend, HostDevice::StreamMode mode, std::vector<float>* result) {
  HostDevice::Options options;
  options.stream_mode = mode;
  const auto device = HostDevice::Create(options);
  EK_ASSIGN_OR_RETURN(const auto group, backend.CreateGroup(WorldGroup(backend.size())));
  EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
  result->assign(4, 1.0f);
  const TensorView view(result->data(), DType::kF32, Shape({4}));
  absl::Status issued;
  for (int i = 0; i < 3 && issued.ok(); ++i) issued = group->AllReduce(view, view, ReduceOp::kSum, *stream);
  if (issued.ok()) issued = group->Broadcast(view, 1, *stream);
  const absl::Status late = stream->Synchronize();
  return issued.ok() ? late : issued;
}

// The decorated backend is a backend: it passes the suite.
TEST(ObserverTest, ObservedBackendConforms) {
  ConformanceOptions options;
  options.large = 300;
  for (const ConformanceCase& c : ConformanceCases(options)) {
    auto world = MakeWorld(3);
    std::vector<OperationLog> logs(3);
    const auto statuses =
        RunRanks(*world, [&](Backend& backend) { return c.run(*ObserveBackend(&backend, &logs[backend.rank()])); });
    for (const absl::Status& status : statuses) EXPECT_OK(status) << c.name;
  }
}

TEST(OperationLogTest, RanksThatDoTheSameHaveEqualLogs) {
  auto world = MakeWorld(3);
  std::vector<OperationLog> logs(3);
  const auto statuses = RunRanks(*world, [&logs](Backend& backend) {
    std::vector<float> result;
    return ThreeSums(*ObserveBackend(&backend, &logs[backend.rank()]), HostDevice::StreamMode::kInline, &result);
  });
  EXPECT_OK(FirstFailure(statuses));
  EXPECT_EQ(FindLogDifference(logs), "");
  EXPECT_EQ(logs[0].size(), 4);
  const std::string text = logs[2].ToJson();
  EXPECT_EQ(
      text.substr(0, text.find('\n')),
      R"({"op":"all_reduce","axis":"world","group":"world","size":3,"seq":0,"dtype":"f32","reduce":"sum","send":4,"recv":4})");
  const auto detailed = nlohmann::json::parse(logs[1].ToDetailedJson().substr(0, logs[1].ToDetailedJson().find('\n')));
  EXPECT_EQ(detailed["own"]["rank"], 1);
  EXPECT_EQ(detailed["own"]["status"], "OK");
}

TEST(OperationLogTest, TheFirstDifferenceIsNamed) {
  auto world = MakeWorld(2, absl::Seconds(5));
  std::vector<OperationLog> logs(2);
  FaultInjector lost_step;
  lost_step.At(1, {.kind = Fault::Kind::kFail});
  (void)RunRanks(*world, [&](Backend& backend) {
    std::vector<float> result;
    const auto watched = ObserveBackend(&backend, &logs[backend.rank()]);
    if (backend.rank() == 0) return ThreeSums(*watched, HostDevice::StreamMode::kInline, &result);
    return ThreeSums(*ObserveBackend(watched.get(), &lost_step), HostDevice::StreamMode::kInline, &result);
  });
  EXPECT_THAT(FindLogDifference(logs), HasSubstr("call 1: rank 0 has {\"op\":\"all_reduce\""));
  EXPECT_THAT(FindLogDifference(logs), HasSubstr("rank 1 has nothing more"));
}

// Point to point calls are some ranks' own matter, and do not shift the numbers of the collectives.
TEST(OperationLogTest, SendsAndReceivesAreNoDifference) {
  auto world = MakeWorld(3);
  std::vector<OperationLog> logs(3);
  const auto statuses = RunRanks(*world, [&logs](Backend& backend) -> absl::Status {
    const auto watched = ObserveBackend(&backend, &logs[backend.rank()]);
    const auto device = HostDevice::Create();
    EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
    EK_ASSIGN_OR_RETURN(const auto group, watched->CreateGroup(WorldGroup(3)));
    float value = 1;
    const TensorView view(&value, DType::kF32, Shape({1}));
    for (int i = 0; i < 2; ++i) {
      if (backend.rank() == 0) EK_RETURN_IF_ERROR(group->Send(view, 2, *stream));
      if (backend.rank() == 2) EK_RETURN_IF_ERROR(group->Recv(view, 0, *stream));
    }
    return group->Barrier(*stream);
  });
  EXPECT_OK(FirstFailure(statuses));
  EXPECT_EQ(FindLogDifference(logs), "");
  EXPECT_EQ(logs[0].size(), 3);
  const std::vector<std::string> lines = absl::StrSplit(logs[0].ToDetailedJson(), '\n');
  const auto second_send = nlohmann::json::parse(lines[1]);
  EXPECT_EQ(second_send["call"]["op"], "send");
  EXPECT_EQ(second_send["call"]["seq"], 1);
  EXPECT_EQ(second_send["own"]["peer"], 2);
  EXPECT_EQ(nlohmann::json::parse(lines[2])["call"]["seq"], 0);
}

// Logs of processes come as texts.
TEST(OperationLogTest, TextsAreComparedLikewise) {
  EXPECT_EQ(FindLogDifference(std::vector<std::string>{"a\nb\n", "a\nb\n", "a\nc\n"}),
            "call 1: rank 0 has b, rank 2 has c");
  EXPECT_EQ(FindLogDifference(std::vector<std::string>{"a\n", "a\nb\n"}),
            "call 1: rank 0 has nothing more, rank 1 has b");
  EXPECT_EQ(FindLogDifference(std::vector<std::string>()), "");
}

TEST(FaultInjectorTest, DelayChangesNoBit) {
  for (const auto mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
    auto world = MakeWorld(3);
    FaultInjector faults;
    faults.At(1, {.kind = Fault::Kind::kDelay, .delay = absl::Milliseconds(30)});
    std::vector<std::vector<float>> results(3);
    const auto statuses = RunRanks(*world, [&](Backend& backend) {
      std::vector<float>* const result = &results[backend.rank()];
      if (backend.rank() != 1) return ThreeSums(backend, mode, result);
      return ThreeSums(*ObserveBackend(&backend, &faults), mode, result);
    });
    EXPECT_OK(FirstFailure(statuses));
    EXPECT_EQ(faults.num_injected(), 1);
    for (const auto& result : results) EXPECT_EQ(result, std::vector<float>(4, 27.0f));
  }
}

// A lost step: the odd rank's next call meets another one, by number if by nothing else.
TEST(FaultInjectorTest, C08_SkippedCallIsFound) {
  auto world = MakeWorld(3);
  FaultInjector faults;
  faults.At(0, {.kind = Fault::Kind::kSkip});
  const auto statuses = RunRanks(*world, [&faults](Backend& backend) {
    std::vector<float> result;
    if (backend.rank() != 2) return ThreeSums(backend, HostDevice::StreamMode::kInline, &result);
    return ThreeSums(*ObserveBackend(&backend, &faults), HostDevice::StreamMode::kInline, &result);
  });
  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 2 calls broadcast")));
  }
}

TEST(FaultInjectorTest, FlippedBitStaysWithItsRank) {
  auto world = MakeWorld(2);
  FaultInjector faults;
  faults.At(3, {.kind = Fault::Kind::kFlipBit, .bit = 31});  // the sign of element 0, after the broadcast
  std::vector<std::vector<float>> results(2);
  const auto statuses = RunRanks(*world, [&](Backend& backend) {
    std::vector<float>* const result = &results[backend.rank()];
    if (backend.rank() == 0) return ThreeSums(backend, HostDevice::StreamMode::kInline, result);
    return ThreeSums(*ObserveBackend(&backend, &faults), HostDevice::StreamMode::kInline, result);
  });
  EXPECT_OK(FirstFailure(statuses));
  EXPECT_EQ(results[0], (std::vector<float>{8, 8, 8, 8}));
  EXPECT_EQ(results[1], (std::vector<float>{-8, 8, 8, 8}));
}

TEST(ChromeTraceTest, OneProcessARankOneTrackAStream) {
  for (const auto mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
    auto world = MakeWorld(2);
    ChromeTrace trace;
    const auto statuses = RunRanks(*world, [&trace, mode](Backend& backend) {
      std::vector<float> result;
      return ThreeSums(*ObserveBackend(&backend, trace.ForRank(backend.rank())), mode, &result);
    });
    EXPECT_OK(FirstFailure(statuses));
    trace.AddSpan(0, "compute", "gemm \"quoted\"", trace.Now(), trace.Now() + absl::Milliseconds(1));
    const auto json = nlohmann::json::parse(trace.ToJson());
    int spans = 0, names = 0;
    for (const auto& event : json["traceEvents"]) {
      if (event["ph"] == "M") ++names;
      if (event["ph"] != "X") continue;
      ++spans;
      EXPECT_GE(event["ts"].get<double>(), 0);
      EXPECT_GE(event["dur"].get<double>(), 0);
    }
    EXPECT_EQ(spans, 2 * 4 + 1);
    EXPECT_EQ(names, 2 * 3);
    EXPECT_TRUE(absl::StrContains(trace.ToJson(), "all_reduce world"));
  }
}

// The call that broke the run is what one looks for in its trace.
TEST(ChromeTraceTest, AFailedCallHasASpanThatSaysSo) {
  for (const auto mode : {HostDevice::StreamMode::kInline, HostDevice::StreamMode::kWorker}) {
    auto world = MakeWorld(2);
    ChromeTrace trace;
    const auto statuses = RunRanks(*world, [&trace, mode](Backend& backend) -> absl::Status {
      HostDevice::Options options;
      options.stream_mode = mode;
      const auto device = HostDevice::Create(options);
      const auto watched = ObserveBackend(&backend, trace.ForRank(backend.rank()));
      EK_ASSIGN_OR_RETURN(const auto stream, device->CreateStream("comm"));
      EK_ASSIGN_OR_RETURN(const auto group, watched->CreateGroup(WorldGroup(2)));
      std::vector<float> values(8, 1.0f);
      const TensorView view(values.data(), DType::kF32, Shape({4 + backend.rank()}));
      const absl::Status issued = group->AllReduce(view, view, ReduceOp::kSum, *stream);
      const absl::Status late = stream->Synchronize();
      return issued.ok() ? late : issued;
    });
    for (const absl::Status& status : statuses) EXPECT_FALSE(status.ok());
    const auto json = nlohmann::json::parse(trace.ToJson());
    int failed = 0;
    for (const auto& event : json["traceEvents"]) {
      if (event["ph"] == "X" && event["name"] == "all_reduce world" && event["args"].contains("status")) ++failed;
    }
    EXPECT_EQ(failed, 2) << trace.ToJson();
  }
}

}  // namespace
}  // namespace evenkeel::comm
