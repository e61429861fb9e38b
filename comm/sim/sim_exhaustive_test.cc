// All interleavings of small programs: whoever goes on first wherever two ranks can, the outcome is the same.
//
// A run is replayed with every sequence of scheduler choices, depth first. Messages take no time, so ranks meet in
// every order that the protocol allows.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

enum class Step { kBarrier, kAllReduce, kAllToAll, kReduceScatter, kSkippedByTheLast };

// What a rank got: digest of results, and the code of the first error.
struct Outcome {
  uint64_t digest = 0;
  absl::StatusCode code = absl::StatusCode::kOk;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

absl::Status RunStep(Step step, Communicator& group, Stream& stream, uint64_t* digest) {
  constexpr int64_t kN = 20;
  const int64_t all = kN * group.size();
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

// Runs `program` in all interleavings; the outcome of the first is the outcome of all. Returns how many there were.
int64_t RunAll(int world_size, const std::vector<Step>& program, int64_t eager_bytes, bool at_sends,
               const std::vector<absl::StatusCode>& expected_codes) {
  Choices choices;
  std::vector<Outcome> first;
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
    (void)(*world)->Run([&](Backend& rank) { return RunProgram(program, rank, &outcomes[rank.rank()]); });
    if (first.empty()) first = outcomes;
    EXPECT_EQ(outcomes, first) << "choices " << choices.ToString();
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_EQ(outcomes[rank].code, expected_codes[rank]) << "rank " << rank << ", choices " << choices.ToString();
    }
    ++count;
  } while (choices.Next() && count < kMost && !::testing::Test::HasFailure());
  std::fprintf(stderr, "%d ranks, %d calls: %d interleavings\n", world_size, static_cast<int>(program.size()),
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

// A minute: run by the manual target.
TEST(SimExhaustiveTest, ThreeRanksFourCallsLong) {
  const std::vector<absl::StatusCode> ok = {kOk, kOk, kOk};
  const std::vector<Step> program = {Step::kAllReduce, Step::kAllToAll, Step::kReduceScatter, Step::kBarrier};
  EXPECT_LT(RunAll(3, program, /*eager_bytes=*/2048, /*at_sends=*/false, ok), kMost);
  EXPECT_LT(RunAll(3, {Step::kAllReduce, Step::kAllToAll}, /*eager_bytes=*/0, /*at_sends=*/false, ok), kMost);
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
