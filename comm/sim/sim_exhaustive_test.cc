// All interleavings of small programs: whoever goes on first wherever two ranks can, the outcome is the same.
//
// A run is replayed with every sequence of scheduler choices, depth first. Messages take no time, so ranks meet in
// every order that the protocol allows.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

// Enumerates choice sequences: Next() moves on to the next one, depth first.
class Choices {
 public:
  int Choose(int n) {
    if (depth_ == taken_.size()) taken_.push_back({0, n});
    EXPECT_EQ(taken_[depth_].second, n) << "the program is not deterministic";
    return taken_[depth_++].first;
  }
  bool Next() {
    depth_ = 0;
    while (!taken_.empty() && taken_.back().first + 1 == taken_.back().second) taken_.pop_back();
    if (taken_.empty()) return false;
    ++taken_.back().first;
    return true;
  }
  std::string ToString() const {
    return absl::StrJoin(taken_, ",", [](std::string* out, const auto& c) { absl::StrAppend(out, c.first); });
  }

 private:
  std::vector<std::pair<int, int>> taken_;  // choice, of how many
  size_t depth_ = 0;
};

enum class Step {
  kBarrier,
  kAllReduce,
  kAllToAll,
  kReduceScatter,
  kAllGather,
  kAllGatherV,
  kReduceScatterV,
  kAllToAllV,
  kBroadcast,
  kGrouped,
  kFirstSendsToLast,
  kSkippedByTheLast,
};

// What a rank got: digest of results, and the code of the first error.
struct Outcome {
  uint64_t digest = 0;
  absl::StatusCode code = absl::StatusCode::kOk;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

absl::Status RunStep(Step step, Communicator& group, Stream& stream, uint64_t* digest) {
  constexpr int64_t kN = 20;
  const int64_t all = kN * group.size();
  std::vector<int64_t> counts(group.size(), kN);  // the last rank has nothing
  counts.back() = 0;
  const int64_t total = all - kN;
  const std::vector<char> data = PositionUnique(DType::kF32, all, static_cast<int64_t>(step), group.rank());
  std::vector<float> result(static_cast<size_t>(all), -1.0f);
  const auto in = [&data](int64_t n) { return ConstTensorView(data.data(), DType::kF32, Shape({n})); };
  const auto out = [&result](int64_t n) { return TensorView(result.data(), DType::kF32, Shape({n})); };
  absl::Status status;
  switch (step) {
    case Step::kSkippedByTheLast:
      if (group.rank() == group.size() - 1) break;
      [[fallthrough]];
    case Step::kAllReduce:
      status = group.AllReduce(in(kN), out(kN), ReduceOp::kSum, stream);
      break;
    case Step::kAllToAll:
      status = group.AllToAll(in(all), out(all), stream);
      break;
    case Step::kReduceScatter:
      status = group.ReduceScatter(in(all), out(kN), ReduceOp::kSum, stream);
      break;
    case Step::kAllGather:
      status = group.AllGather(in(kN), out(all), stream);
      break;
    case Step::kAllGatherV:
      status = group.AllGatherV(in(counts[group.rank()]), out(total), counts, stream);
      break;
    case Step::kReduceScatterV:
      status = group.ReduceScatterV(in(total), out(counts[group.rank()]), counts, ReduceOp::kMax, stream);
      break;
    case Step::kAllToAllV:
      // The last row and the last column of the matrix are short: everybody sends counts[j] to rank j.
      status = group.AllToAllV(in(total), counts, out(counts[group.rank()] * group.size()),
                               std::vector<int64_t>(group.size(), counts[group.rank()]), stream);
      break;
    case Step::kBroadcast:
      if (group.rank() == 1) std::memcpy(result.data(), data.data(), data.size());
      status = group.Broadcast(out(kN), 1, stream);
      break;
    case Step::kGrouped: {
      CallGroup calls;
      calls.AllToAllV(in(total), counts, out(counts[group.rank()] * group.size()),
                      std::vector<int64_t>(group.size(), counts[group.rank()]));
      std::vector<float> sum(static_cast<size_t>(kN), -1.0f);
      calls.AllReduce(in(kN), TensorView(sum.data(), DType::kF32, Shape({kN})), ReduceOp::kSum);
      status = calls.Run(group, stream);
      *digest = CombineDigests(*digest, Digest64(sum.data(), sum.size() * sizeof(float)));
      break;
    }
    case Step::kFirstSendsToLast:
      if (group.rank() == 0) status = group.Send(in(kN), group.size() - 1, stream);
      if (group.rank() == group.size() - 1) status = group.Recv(out(kN), 0, stream);
      break;
    case Step::kBarrier:
      status = group.Barrier(stream);
  }
  *digest = CombineDigests(*digest, Digest64(result.data(), result.size() * sizeof(float)));
  return status;
}

absl::Status RunProgram(const std::vector<Step>& program, Backend& rank, Outcome* outcome) {
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(auto stream, device->CreateStream("steps"));
  EK_ASSIGN_OR_RETURN(auto group, rank.CreateGroup(WorldGroup(rank.size())));
  absl::Status status;
  for (const Step step : program) {
    if (status.ok()) status = RunStep(step, *group, *stream, &outcome->digest);
  }
  outcome->code = status.code();
  return status;
}

constexpr int64_t kMost = 400'000;
constexpr absl::StatusCode kOk = absl::StatusCode::kOk;

// What threads make of it, in whatever order they happen to run.
std::vector<Outcome> OnThreads(int world_size, const std::vector<Step>& program) {
  std::vector<Outcome> outcomes(world_size);
  auto world = InProcessWorld::Create({.world_size = world_size});
  EK_CHECK_OK(world);
  (void)RunRanks(**world, [&](Backend& rank) { return RunProgram(program, rank, &outcomes[rank.rank()]); });
  return outcomes;
}

// Runs `program` in all interleavings: in each the outcome of threads, and these codes. Returns how many there were.
int64_t RunAll(int world_size, const std::vector<Step>& program, int64_t eager_bytes, bool at_sends,
               const std::vector<absl::StatusCode>& expected_codes,
               const std::vector<std::vector<Step>>& programs = {}) {
  const auto program_of = [&](int rank) { return programs.empty() ? program : programs[rank]; };
  Choices choices;
  std::vector<Outcome> first = OnThreads(world_size, program);
  int64_t count = 0;
  do {
    SimOptions options{
        .world_size = world_size, .eager_bytes = eager_bytes, .piece_bytes = 128, .payload_digest = false};
    for (SimLink& link : options.links) link = {.latency = absl::ZeroDuration(), .bytes_per_second = 1e18};
    options.choose_at_sends = at_sends;
    options.choose = [&choices](int n) { return choices.Choose(n); };
    auto world = SimWorld::Create(options);
    if (!world.ok()) return 0;
    std::vector<Outcome> outcomes(world_size);
    (void)(*world)->Run(
        [&](Backend& rank) { return RunProgram(program_of(rank.rank()), rank, &outcomes[rank.rank()]); });
    // Who gets an error has digests of what came before it only.
    if (expected_codes[0] != kOk && count == 0) first = outcomes;
    EXPECT_EQ(outcomes, first) << "choices " << choices.ToString();
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(outcomes[rank].code, expected_codes[rank]) << "rank " << rank << ", choices " << choices.ToString();
    }
    ++count;
  } while (choices.Next() && count < kMost && !::testing::Test::HasFailure());
  std::fprintf(stderr, "%d ranks, %d calls: %d interleavings\n", world_size, static_cast<int>(program_of(0).size()),
               static_cast<int>(count));
  return count;
}

TEST(SimExhaustiveTest, TwoRanksFourCalls) {
  const std::vector<Step> program = {Step::kAllReduce, Step::kAllToAll, Step::kReduceScatter, Step::kBarrier};
  EXPECT_LT(RunAll(2, program, /*eager_bytes=*/2048, /*at_sends=*/true, {kOk, kOk}), kMost);
  EXPECT_LT(RunAll(2, program, /*eager_bytes=*/0, /*at_sends=*/false, {kOk, kOk}), kMost);
  EXPECT_LT(RunAll(2, {Step::kAllReduce}, /*eager_bytes=*/0, /*at_sends=*/true, {kOk, kOk}), kMost);
}

TEST(SimExhaustiveTest, ThreeRanksThreeCalls) {
  const std::vector<absl::StatusCode> ok = {kOk, kOk, kOk};
  const std::vector<Step> program = {Step::kAllToAll, Step::kReduceScatter, Step::kBarrier};
  EXPECT_LT(RunAll(3, program, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
  EXPECT_LT(RunAll(3, {Step::kAllToAll}, /*eager_bytes=*/0, /*at_sends=*/false, ok), kMost);
}

// Every other kind of call, four at a time.
TEST(SimExhaustiveTest, TwoRanksFourOtherCalls) {
  const std::vector<Step> gathers = {Step::kAllGatherV, Step::kBroadcast, Step::kAllToAllV, Step::kReduceScatterV};
  const std::vector<Step> pairs = {Step::kFirstSendsToLast, Step::kAllGather, Step::kFirstSendsToLast,
                                   Step::kReduceScatterV};
  for (const std::vector<Step>& program : {gathers, pairs}) {
    EXPECT_LT(RunAll(2, program, /*eager_bytes=*/2048, /*at_sends=*/true, {kOk, kOk}), kMost);
    EXPECT_LT(RunAll(2, program, /*eager_bytes=*/0, /*at_sends=*/false, {kOk, kOk}), kMost);
  }
}

TEST(SimExhaustiveTest, GroupedCalls) {
  const std::vector<Step> program = {Step::kGrouped, Step::kAllReduce, Step::kGrouped};
  EXPECT_LT(RunAll(2, program, /*eager_bytes=*/2048, /*at_sends=*/true, {kOk, kOk}), kMost);
  EXPECT_LT(RunAll(2, program, /*eager_bytes=*/0, /*at_sends=*/false, {kOk, kOk}), kMost);
}

TEST(SimExhaustiveTest, ThreeRanksOtherCalls) {
  const std::vector<absl::StatusCode> ok = {kOk, kOk, kOk};
  const std::vector<Step> gathers = {Step::kAllGatherV, Step::kBroadcast, Step::kAllToAllV};
  const std::vector<Step> pairs = {Step::kFirstSendsToLast, Step::kReduceScatterV, Step::kFirstSendsToLast};
  for (const std::vector<Step>& program : {gathers, pairs}) {
    EXPECT_LT(RunAll(3, program, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
  }
}

// Two kinds of call at once, all pairs of them: the same refusal in every interleaving.
TEST(SimExhaustiveTest, C04_EveryPairOfDifferentCallsIsFoundInEveryInterleaving) {
  constexpr absl::StatusCode kOdd = absl::StatusCode::kFailedPrecondition;
  const Step kinds[] = {Step::kBarrier,   Step::kAllReduce,  Step::kAllToAll,  Step::kReduceScatter,
                        Step::kAllGather, Step::kAllGatherV, Step::kAllToAllV, Step::kReduceScatterV,
                        Step::kBroadcast, Step::kGrouped};
  for (const Step usual : kinds) {
    for (const Step odd : kinds) {
      if (usual == odd) continue;
      const std::vector<std::vector<Step>> programs = {{usual}, {odd}, {usual}};
      EXPECT_LT(RunAll(2, {}, /*eager_bytes=*/2048, /*at_sends=*/true, {kOdd, kOdd}, programs), kMost);
      EXPECT_LT(RunAll(3, {}, /*eager_bytes=*/0, /*at_sends=*/false, {kOdd, kOdd, kOdd}, programs), kMost);
    }
  }
}

// A minute: run by the manual target.
TEST(SimExhaustiveTest, ThreeRanksFourCallsLong) {
  const std::vector<absl::StatusCode> ok = {kOk, kOk, kOk};
  const std::vector<Step> program = {Step::kAllReduce, Step::kAllToAll, Step::kReduceScatter, Step::kBarrier};
  EXPECT_LT(RunAll(3, program, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
  EXPECT_LT(RunAll(3, {Step::kAllReduce, Step::kAllToAll}, /*eager_bytes=*/0, /*at_sends=*/false, ok), kMost);
  const std::vector<Step> others = {Step::kAllGatherV, Step::kBroadcast, Step::kAllToAllV, Step::kReduceScatterV};
  EXPECT_LT(RunAll(3, others, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
  EXPECT_LT(RunAll(3, {Step::kGrouped}, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
}

// C08: a rank skips a call; the next one is another call, so all learn it at once, in every interleaving.
TEST(SimExhaustiveTest, C08_SkippedCallIsFoundInEveryInterleaving) {
  constexpr absl::StatusCode kOdd = absl::StatusCode::kFailedPrecondition;
  const std::vector<Step> program = {Step::kBarrier, Step::kSkippedByTheLast, Step::kAllToAll};
  EXPECT_LT(RunAll(2, program, /*eager_bytes=*/2048, /*at_sends=*/true, {kOdd, kOdd}), kMost);
  EXPECT_LT(RunAll(3, program, /*eager_bytes=*/2048, /*at_sends=*/false, {kOdd, kOdd, kOdd}), kMost);
}

}  // namespace
}  // namespace evenkeel::comm
