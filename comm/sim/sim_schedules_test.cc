// Many simulated schedules with faults: no hang, no wrong bit, the first cause kept.
//
// EVENKEEL_SIM_SCHEDULES sets how many (default 2,000), EVENKEEL_SIM_SEED the first seed. A failure prints its faults
// and the command that replays it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/call_group.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/digest.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

int64_t FirstSeed() { return FromEnvironment("EVENKEEL_SIM_SEED", 1); }
int64_t NumSchedules() { return FromEnvironment("EVENKEEL_SIM_SCHEDULES", 2000); }

std::string DescribeRun(const SimOptions& options) {
  std::vector<std::string> faults;
  for (const SimFault& fault : options.faults) faults.push_back(DescribeFault(fault));
  const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
  return absl::StrCat(options.world_size, " ranks, ", absl::StrJoin(faults, "; "),
                      "; replay: bazel test //comm/sim:sim_schedules_test --test_filter=", test.test_suite_name(), ".",
                      test.name(), " --test_env=EVENKEEL_SIM_SCHEDULES=1 --test_env=EVENKEEL_SIM_SEED=", options.seed);
}

constexpr int kNumCalls = 7;
const absl::Duration kDeadline = absl::Seconds(1);

// What one rank saw.
struct Record {
  std::vector<uint64_t> digests;  // of the results of the calls that succeeded, in order
  absl::Status first;             // the first error
  absl::Status after;             // of one more call after it
  absl::Status kept;              // what the group says broke it
  absl::Duration took;            // the failing call, in virtual time
};

// Call number `index` of a fixed mix, n elements a rank.
absl::Status MakeCall(Communicator& group, Stream& stream, int index, uint64_t* digest) {
  const int64_t n = index < 3 ? 10 : 700, all = n * group.size();
  const std::vector<char> data = PositionUnique(DType::kF32, all, index, group.rank());
  std::vector<float> result(static_cast<size_t>(all), -1.0f);
  const auto in = [&data](int64_t count) { return ConstTensorView(data.data(), DType::kF32, Shape({count})); };
  const auto out = [&result](int64_t count) { return TensorView(result.data(), DType::kF32, Shape({count})); };
  absl::Status status;
  switch (index % 7) {
    case 0:
      status = group.AllReduce(in(n), out(n), ReduceOp::kSum, stream);
      break;
    case 1:
      status = group.AllToAll(in(all), out(all), stream);
      break;
    case 2:
      status = group.Barrier(stream);
      break;
    case 3:
      status = group.ReduceScatter(in(all), out(n), ReduceOp::kSum, stream);
      break;
    case 4:
      status = group.AllGather(in(n), out(all), stream);
      break;
    case 5: {
      CallGroup calls;
      const std::vector<int64_t> counts(group.size(), n / group.size());
      const int64_t blocks = counts[0] * group.size();
      calls.AllToAllV(in(blocks), counts, out(blocks), counts);
      calls.AllReduce(in(10), TensorView(result.data() + blocks, DType::kF32, Shape({10})), ReduceOp::kSum);
      status = calls.Run(group, stream);
      break;
    }
    default:
      status = group.AllReduce(in(n), out(n), ReduceOp::kMax, stream);
  }
  *digest = Digest64(result.data(), result.size() * sizeof(float));
  return status;
}

absl::Status Body(Backend& rank, const std::function<absl::Duration()>& now, Record* record) {
  const auto device = HostDevice::Create();
  EK_ASSIGN_OR_RETURN(auto stream, device->CreateStream("work"));
  const absl::Duration start = now();
  auto group = rank.CreateGroup(WorldGroup(rank.size()));
  if (!group.ok()) {
    record->took = now() - start;
    record->first = group.status();
    return record->first;
  }
  for (int call = 0; call < kNumCalls && record->first.ok(); ++call) {
    const absl::Duration begin = now();
    uint64_t digest = 0;
    record->first = MakeCall(**group, *stream, call, &digest);
    record->took = now() - begin;
    if (record->first.ok()) record->digests.push_back(digest);
  }
  if (!record->first.ok()) {
    EK_ASSIGN_OR_RETURN(auto fresh, device->CreateStream("after"));
    record->after = (*group)->Barrier(*fresh);
    record->kept = (*group)->status();
  }
  return record->first;
}

std::vector<SimFault> RandomFaults(const PhiloxStream& random, int world_size) {
  std::vector<SimFault> faults;
  const auto num_faults = static_cast<int>(random.Below(100, 3)) + 1;
  for (int i = 0; i < num_faults; ++i) {
    const uint64_t at = 200 + 10 * static_cast<uint64_t>(i);
    SimFault fault;
    fault.kind = static_cast<SimFault::Kind>(random.Below(at, 7));
    fault.rank = static_cast<int>(random.Below(at + 1, static_cast<uint64_t>(world_size)));
    const bool process = fault.kind >= SimFault::Kind::kStop;
    fault.index = static_cast<int64_t>(random.Below(at + 2, process ? 400 : 120));
    // From far below the latency to past the deadline.
    fault.by = absl::Microseconds(int64_t{1} << random.Below(at + 3, 21));
    if (fault.kind == SimFault::Kind::kStop && random.Below(at + 4, 2) == 0) fault.by = absl::ZeroDuration();
    faults.push_back(fault);
  }
  return faults;
}

class Schedule {
 public:
  explicit Schedule(uint64_t seed) : random_(PhiloxKey(seed).Add("schedule test")) {
    options_.world_size = static_cast<int>(random_.Below(0, 3)) + 2;
    options_.deadline = kDeadline;
    options_.seed = seed;
    options_.faults = RandomFaults(random_, options_.world_size);
    options_.eager_bytes = random_.Below(1, 2) == 0 ? 0 : 256;
    if (random_.Below(2, 4) == 0) options_.death_seen_after = std::nullopt;
  }

  std::string text() const { return DescribeRun(options_); }

  void Run(const std::vector<std::vector<uint64_t>>& expected) {
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options_));
    records_.resize(options_.world_size);
    const auto now = [&world] { return world->now(); };
    (void)world->Run([&](Backend& rank) { return Body(rank, now, &records_[rank.rank()]); });
    any_fault_ = world->num_faults() > 0;
    log_ = world->log_digest();
    for (int rank = 0; rank < options_.world_size; ++rank) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ": ", records_[rank].first.ToString()));
      CheckBits(rank, expected[rank]);
      if (!records_[rank].first.ok() && !IsOut(rank)) CheckError(records_[rank]);
    }
    if (!any_fault_) {
      for (const Record& record : records_) EXPECT_OK(record.first);
    }
  }

  uint64_t log() const { return log_; }
  bool any_error() const {
    return std::any_of(records_.begin(), records_.end(), [](const Record& r) { return !r.first.ok(); });
  }

 private:
  // A rank that died or stopped for ever: what it says is nobody's business.
  bool IsOut(int rank) const {
    return std::any_of(options_.faults.begin(), options_.faults.end(), [rank](const SimFault& f) {
      return f.rank == rank && (f.kind == SimFault::Kind::kDie || f.kind == SimFault::Kind::kStop);
    });
  }

  // Every call that said OK gave the right bits.
  void CheckBits(int rank, const std::vector<uint64_t>& expected) {
    ASSERT_LE(records_[rank].digests.size(), expected.size());
    for (size_t i = 0; i < records_[rank].digests.size(); ++i) {
      EXPECT_EQ(records_[rank].digests[i], expected[i]) << "wrong bits in call " << i;
    }
  }

  void CheckError(const Record& record) {
    EXPECT_LE(record.took, kDeadline + absl::Milliseconds(500));
    const std::set<absl::StatusCode> known = {absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable,
                                              absl::StatusCode::kDataLoss, absl::StatusCode::kAborted,
                                              absl::StatusCode::kFailedPrecondition};
    EXPECT_EQ(known.count(record.first.code()), 1u);
    const auto context = GetErrorContext(record.first);
    ASSERT_TRUE(context.has_value());
    EXPECT_EQ(context->module, "comm");
    EXPECT_FALSE(context->findings.empty()) << "no rank is named";
    if (record.after.ok() && record.kept.ok()) return;  // there was no group yet
    EXPECT_EQ(record.after.code(), absl::StatusCode::kAborted);
    EXPECT_EQ(record.kept, record.first) << "the first cause was not kept";
    EXPECT_TRUE(absl::StrContains(record.after.message(), record.first.message())) << record.after.message();
  }

  const PhiloxStream random_;
  SimOptions options_;
  std::vector<Record> records_;
  bool any_fault_ = false;
  uint64_t log_ = 0;
};

// Results without any fault, by world size and rank.
std::vector<std::vector<uint64_t>> Expected(int world_size) {
  std::vector<Record> records(world_size);
  auto world = SimWorld::Create({.world_size = world_size, .deadline = kDeadline});
  if (!world.ok()) return {};
  const auto now = [&world] { return (*world)->now(); };
  (void)(*world)->Run([&](Backend& rank) { return Body(rank, now, &records[rank.rank()]); });
  std::vector<std::vector<uint64_t>> digests;
  for (const Record& record : records) digests.push_back(record.digests);
  return digests;
}

TEST(SimSchedulesTest, NoHangNoWrongBitFirstCauseKept) {
  const int64_t first_seed = FirstSeed();
  const int64_t schedules = NumSchedules();
  const std::vector<std::vector<uint64_t>> expected[] = {{}, {}, Expected(2), Expected(3), Expected(4)};
  for (int size = 2; size <= 4; ++size) {
    ASSERT_EQ(expected[size].size(), static_cast<size_t>(size));
    for (const auto& digests : expected[size]) ASSERT_EQ(digests.size(), static_cast<size_t>(kNumCalls));
  }
  int64_t with_errors = 0;
  for (int64_t seed = first_seed; seed < first_seed + schedules; ++seed) {
    Schedule schedule(static_cast<uint64_t>(seed));
    SCOPED_TRACE(schedule.text());
    const int size =
        2 + static_cast<int>(PhiloxStream(PhiloxKey(static_cast<uint64_t>(seed)).Add("schedule test")).Below(0, 3));
    schedule.Run(expected[size]);
    with_errors += schedule.any_error() ? 1 : 0;
    if (seed % 100 == 0) {  // the replay is exact, errors and all
      Schedule again(static_cast<uint64_t>(seed));
      again.Run(expected[size]);
      EXPECT_EQ(again.log(), schedule.log());
    }
    if (::testing::Test::HasFailure()) break;
  }
  // The faults do bite: a third of the schedules at least.
  if (schedules >= 100) {
    EXPECT_GT(with_errors * 3, schedules);
  }
  std::fprintf(stderr, "%d schedules, %d of them with errors\n", static_cast<int>(schedules),
               static_cast<int>(with_errors));
}

// One rank goes wrong for good: all others name it, and nobody else.
void CheckOneLost(SimFault::Kind kind, bool death_seen, absl::StatusCode expected_code) {
  const int64_t first_seed = FirstSeed();
  const int64_t schedules = std::max<int64_t>(1, NumSchedules() / 5);
  int64_t with_errors = 0;
  for (int64_t seed = first_seed; seed < first_seed + schedules && !::testing::Test::HasFailure(); ++seed) {
    const PhiloxStream random(PhiloxKey(static_cast<uint64_t>(seed)).Add("one lost"));
    SimOptions options{.world_size = static_cast<int>(random.Below(0, 4)) + 2,
                       .deadline = kDeadline,
                       .seed = static_cast<uint64_t>(seed)};
    const auto victim = static_cast<int>(random.Below(1, static_cast<uint64_t>(options.world_size)));
    options.faults = {{.kind = kind, .rank = victim, .index = static_cast<int64_t>(random.Below(2, 300))}};
    options.piece_bytes = 256;
    if (!death_seen) options.death_seen_after = std::nullopt;
    SCOPED_TRACE(DescribeRun(options));
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    std::vector<Record> records(options.world_size);
    const auto now = [&world] { return world->now(); };
    (void)world->Run([&](Backend& rank) { return Body(rank, now, &records[rank.rank()]); });
    for (int rank = 0; rank < options.world_size; ++rank) {
      if (rank == victim || records[rank].first.ok()) continue;  // it went wrong after its last call
      ++with_errors;
      EXPECT_EQ(records[rank].first.code(), expected_code) << rank << ": " << records[rank].first;
      const auto context = GetErrorContext(records[rank].first);
      ASSERT_TRUE(context.has_value());
      ASSERT_EQ(context->findings.size(), 1u) << rank << ": " << records[rank].first;
      EXPECT_EQ(context->findings[0].rank, victim) << rank << ": " << records[rank].first;
      EXPECT_LE(records[rank].took, kDeadline + absl::Milliseconds(500));
    }
  }
  if (schedules >= 100) {
    EXPECT_GT(with_errors, schedules / 2);
  }
}

TEST(SimSchedulesTest, C22_DeadRankIsNamed) {
  CheckOneLost(SimFault::Kind::kDie, /*death_seen=*/true, absl::StatusCode::kUnavailable);
}

TEST(SimSchedulesTest, C22_DeathThatNobodySeesIsNamedAtTheDeadline) {
  CheckOneLost(SimFault::Kind::kDie, /*death_seen=*/false, absl::StatusCode::kDeadlineExceeded);
}

TEST(SimSchedulesTest, C23_StoppedRankIsNamed) {
  CheckOneLost(SimFault::Kind::kStop, /*death_seen=*/true, absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace evenkeel::comm
