// Rows of the fault table that need a clock and a network of one's own: who is named, and when, to the nanosecond.
#include <dirent.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/message/tag_channels.h"
#include "evenkeel/comm/message/testing/operation_digests.h"
#include "evenkeel/comm/sim/sim_world.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/error_context.h"
#include "evenkeel/runtime/base/philox.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::comm {
namespace {

using ::evenkeel::testutil::StatusIs;
using ::testing::HasSubstr;

const absl::Duration kDeadline = absl::Seconds(1);

std::vector<int> NamedRanks(const absl::Status& status) {
  std::vector<int> ranks;
  const auto context = GetErrorContext(status);
  for (size_t i = 0; context.has_value() && i < context->findings.size(); ++i) {
    ranks.push_back(context->findings[i].rank);
  }
  return ranks;
}

std::unique_ptr<Stream> NewStream(HostDevice& device) { return *device.CreateStream("comm"); }

absl::Status Sum(Communicator& group, Stream& stream, int64_t n, float value, std::vector<float>* sums) {
  const std::vector<float> mine(static_cast<size_t>(n), value);
  sums->assign(static_cast<size_t>(n), 0.0f);
  return group.AllReduce(ConstTensorView(mine.data(), DType::kF32, Shape({n})),
                         TensorView(sums->data(), DType::kF32, Shape({n})), ReduceOp::kSum, stream);
}

// One rank makes k of n calls and leaves: the others learn it at once.
TEST(SimFaultsTest, C08_RankThatLeavesAfterEveryCallIsNamedAtOnce) {
  constexpr int kCalls = 5;
  for (const int size : {2, 3, 4}) {
    for (int odd = 0; odd < size; ++odd) {
      for (int k = 0; k < kCalls; ++k) {
        ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = size, .deadline = kDeadline}));
        const auto statuses = world->Run([odd, k](Backend& rank) -> absl::Status {
          const auto device = HostDevice::Create();
          const auto stream = NewStream(*device);
          EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(rank.size())));
          std::vector<float> sums;
          for (int call = 0; call < (rank.rank() == odd ? k : kCalls); ++call) {
            EK_RETURN_IF_ERROR(Sum(*group, *stream, 10, 1.0f, &sums));
          }
          return absl::OkStatus();
        });
        for (int rank = 0; rank < size; ++rank) {
          if (rank == odd) continue;
          EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kUnavailable, HasSubstr("a rank is gone")));
          EXPECT_EQ(NamedRanks(statuses[rank]), std::vector<int>{odd});
          EXPECT_EQ(GetErrorContext(statuses[rank])->sequence, k);
          EXPECT_LT(world->end_times()[rank], absl::Milliseconds(100));
        }
      }
    }
  }
}

// Hash of sums in buckets of several sizes; 100 runs with delays at random, another seed and piece size in each.
TEST(SimFaultsTest, C18_HundredRunsWithDelaysGiveOneHash) {
  for (const int size : {3, 4, 5}) {
    std::vector<uint64_t> first;
    for (uint64_t run = 0; run < 100; ++run) {
      const PhiloxStream random(PhiloxKey(run).Add("C18"));
      SimOptions options{.world_size = size, .deadline = absl::Hours(1), .seed = run};
      for (uint64_t i = 0; i < 5; ++i) {
        options.faults.push_back({.kind = i % 2 == 0 ? SimFault::Kind::kDelay : SimFault::Kind::kReorder,
                                  .rank = static_cast<int>(random.Below(10 * i, static_cast<uint64_t>(size))),
                                  .index = static_cast<int64_t>(random.Below(10 * i + 1, 60)),
                                  .by = absl::Milliseconds(random.Below(10 * i + 2, 500))});
      }
      options.piece_bytes = static_cast<int64_t>(64 * (1 + random.Below(99, 20)));
      ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
      std::vector<uint64_t> hashes(size);
      const auto statuses = world->Run([run, &hashes](Backend& rank) -> absl::Status {
        const auto device = HostDevice::Create();
        const auto stream = NewStream(*device);
        EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(rank.size())));
        constexpr int64_t kN = 300;
        const int64_t bucket = 50 + static_cast<int64_t>(run % 7) * 41;
        std::vector<char> data = PositionUnique(DType::kF32, kN, 18, rank.rank());
        for (int64_t begin = 0; begin < kN; begin += bucket) {
          const TensorView part(data.data() + begin * 4, DType::kF32, Shape({std::min(bucket, kN - begin)}));
          EK_RETURN_IF_ERROR(group->AllReduce(part, part, ReduceOp::kSum, *stream));
        }
        hashes[rank.rank()] = std::hash<std::string>()(std::string(data.begin(), data.end()));
        return absl::OkStatus();
      });
      ASSERT_OK(FirstFailure(statuses)) << "run " << run;
      if (first.empty()) first = hashes;
      EXPECT_EQ(hashes, first) << size << " ranks, run " << run;
    }
    EXPECT_EQ(first, std::vector<uint64_t>(size, first[0])) << "ranks differ";
  }
}

// Messages that overtake one another or come twice: every one finds its place, with nothing but the tags to tell.
TEST(SimFaultsTest, C20_ReorderedAndDoubledMessagesChangeNoBit) {
  std::vector<std::vector<OperationDigest>> expected(3);
  int64_t num_faults = 0;
  for (uint64_t run = 0; run < 200; ++run) {
    const PhiloxStream random(PhiloxKey(run).Add("C20"));
    SimOptions options{.world_size = 3, .deadline = absl::Hours(1), .seed = run};
    options.piece_bytes = 128;
    options.payload_digest = false;
    for (uint64_t i = 0; i < 40 && run > 0; ++i) {
      options.faults.push_back(
          {.kind = random.Below(4 * i, 2) == 0 ? SimFault::Kind::kReorder : SimFault::Kind::kDuplicate,
           .rank = static_cast<int>(random.Below(4 * i + 1, 3)),
           .index = static_cast<int64_t>(random.Below(4 * i + 2, 300)),
           .by = absl::Microseconds(1 + random.Below(4 * i + 3, 5000))});
    }
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    std::vector<std::vector<OperationDigest>> digests(3);
    const auto statuses = world->Run([&digests](Backend& rank) -> absl::Status {
      EK_ASSIGN_OR_RETURN(digests[rank.rank()], DigestAllOperations(rank, {DType::kBF16}, {1, 130}));
      return absl::OkStatus();
    });
    ASSERT_OK(FirstFailure(statuses)) << "run " << run;
    if (run == 0) expected = digests;
    EXPECT_EQ(digests, expected) << "run " << run;
    num_faults += world->num_faults();
  }
  EXPECT_GT(num_faults, 1000);
}

// Epochs go past the number of tag channels while one group lives on: its channel is left out, and both groups' traffic
// stays apart.
TEST(SimFaultsTest, C20_TagsOfALivingGroupAreNotReused) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 2}));
  const auto statuses = world->Run([](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    const auto stream = NewStream(*device);
    EK_ASSIGN_OR_RETURN(const auto old, rank.CreateGroup(WorldGroup(2)));
    std::vector<float> sums;
    for (int i = 0; i < kNumTagChannels + 5; ++i) {
      EK_ASSIGN_OR_RETURN(const auto fresh, rank.CreateGroup(WorldGroup(2)));
      if (TagChannel(fresh->epoch()) == TagChannel(old->epoch())) return absl::InternalError("the channel is reused");
      if (i % 100 != 0 && i < kNumTagChannels - 5) continue;
      // One rank is a call ahead in the old group while both call in the new one.
      EK_RETURN_IF_ERROR(Sum(*old, *stream, 100, 1.0f, &sums));
      if (sums != std::vector<float>(100, 2.0f)) return absl::InternalError("wrong sum in the old group");
      EK_RETURN_IF_ERROR(Sum(*fresh, *stream, 100, 2.0f, &sums));
      if (sums != std::vector<float>(100, 4.0f)) return absl::InternalError("wrong sum in the new group");
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

TEST(SimFaultsTest, C20_MoreGroupsThanTagsAreRefused) {
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create({.world_size = 2}));
  const auto statuses = world->Run([](Backend& rank) -> absl::Status {
    std::vector<std::unique_ptr<Communicator>> groups;
    for (int i = 0; i < kNumTagChannels; ++i) {
      EK_ASSIGN_OR_RETURN(auto group, rank.CreateGroup(WorldGroup(2)));
      groups.push_back(std::move(group));
    }
    const absl::Status refused = rank.CreateGroup(WorldGroup(2)).status();
    if (refused.code() != absl::StatusCode::kInvalidArgument) return refused;
    const auto device = HostDevice::Create();
    const auto stream = NewStream(*device);
    EK_RETURN_IF_ERROR(groups[17]->Barrier(*stream));
    groups.erase(groups.begin() + 17);
    EK_RETURN_IF_ERROR(rank.CreateGroup(WorldGroup(2)).status());
    return refused;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("all 4095 tag channels are in use")));
  }
}

// After a rank is gone, giving the group up costs no time: nobody is waited for.
TEST(SimFaultsTest, C25_DestructorWithPeersGoneIsBounded) {
  for (const bool seen : {false, true}) {
    SimOptions options{.world_size = 3, .deadline = kDeadline};
    options.faults = {{.kind = SimFault::Kind::kDie, .rank = 1, .index = 40}};
    if (!seen) options.death_seen_after = std::nullopt;
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    std::vector<absl::Duration> took(3);
    const auto statuses = world->Run([&](Backend& rank) -> absl::Status {
      const auto device = HostDevice::Create();
      const auto stream = NewStream(*device);
      EK_ASSIGN_OR_RETURN(auto group, rank.CreateGroup(WorldGroup(3)));
      EK_ASSIGN_OR_RETURN(auto unused, rank.CreateGroup(WorldGroup(3)));
      absl::Status status;
      std::vector<float> sums;
      for (int call = 0; call < 100 && status.ok(); ++call) status = Sum(*group, *stream, 10, 1.0f, &sums);
      const absl::Duration begin = world->now();
      group.reset();
      unused.reset();
      took[rank.rank()] = world->now() - begin;
      return status;
    });
    for (const int rank : {0, 2}) {
      EXPECT_EQ(NamedRanks(statuses[rank]), std::vector<int>{1}) << statuses[rank];
      EXPECT_LE(took[rank], absl::Milliseconds(500));
    }
  }
}

// Every subset of four ranks is missing when the others make the group.
TEST(SimFaultsTest, C26_EverySubsetThatIsMissingAtTheStartIsNamed) {
  for (int mask = 1; mask < 15; ++mask) {
    SimOptions options{.world_size = 4, .deadline = absl::Seconds(5)};
    std::vector<int> missing;
    for (int rank = 0; rank < 4; ++rank) {
      if ((mask >> rank & 1) == 0) continue;
      missing.push_back(rank);
      options.faults.push_back({.kind = SimFault::Kind::kStop, .rank = rank, .index = 0});
    }
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    const auto statuses = world->Run([](Backend& rank) { return rank.CreateGroup(WorldGroup(4)).status(); });
    for (int rank = 0; rank < 4; ++rank) {
      if ((mask >> rank & 1) != 0) continue;
      EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("has not asked")));
      EXPECT_EQ(NamedRanks(statuses[rank]), missing) << statuses[rank];
      EXPECT_LE(world->end_times()[rank], absl::Milliseconds(5500));
    }
  }
}

// Rank 0 dies at every one of its calls of the network, from the making of the group to its end.
TEST(SimFaultsTest, C29_RankZeroDiesAtEveryPoint) {
  int64_t with_errors = 0, index = 0;
  for (bool died = true; died; ++index) {
    ASSERT_LT(index, 5000);
    SimOptions options{.world_size = 3, .deadline = kDeadline};
    options.faults = {{.kind = SimFault::Kind::kDie, .rank = 0, .index = index}};
    ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
    const auto statuses = world->Run([](Backend& rank) -> absl::Status {
      const auto device = HostDevice::Create();
      const auto stream = NewStream(*device);
      EK_ASSIGN_OR_RETURN(const auto group, rank.CreateGroup(WorldGroup(3)));
      std::vector<float> sums;
      for (const int64_t n : {1, 700}) EK_RETURN_IF_ERROR(Sum(*group, *stream, n, 1.0f, &sums));
      return group->Barrier(*stream);
    });
    died = world->num_faults() > 0;
    for (const int rank : {1, 2}) {
      if (statuses[rank].ok()) continue;  // it was done before
      ++with_errors;
      EXPECT_THAT(statuses[rank], StatusIs(absl::StatusCode::kUnavailable, HasSubstr(""))) << "index " << index;
      EXPECT_EQ(NamedRanks(statuses[rank]), std::vector<int>{0}) << "index " << index << ": " << statuses[rank];
    }
  }
  EXPECT_GT(index, 30);
  EXPECT_GT(with_errors, index);
}

int64_t FromProcStatus(const char* key) {
  FILE* file = std::fopen("/proc/self/status", "re");
  char line[256];
  int64_t value = -1;
  while (file != nullptr && std::fgets(line, sizeof(line), file) != nullptr) {
    long long number = 0;
    if (std::sscanf(line, absl::StrCat(key, ": %lld").c_str(), &number) == 1) value = number;
  }
  if (file != nullptr) std::fclose(file);
  return value;
}

int NumDescriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Groups made, broken by something else each time, and made again, 500 times; the process stays as it was.
TEST(SimFaultsTest, C30_FiveHundredFaultsLeaveNothingBehind) {
  constexpr int kCycles = 500, kWarm = 100;
  SimOptions options{.world_size = 3, .deadline = kDeadline};
  for (int i = 0; i < 60; ++i) {  // lost messages, in all parts of the run but its end
    options.faults.push_back({.kind = SimFault::Kind::kDrop, .rank = i % 3, .index = 37 + 101 * i});
  }
  ASSERT_OK_AND_ASSIGN(const auto world, SimWorld::Create(options));
  int64_t threads[2] = {}, memory_kib[2] = {}, broken[3] = {};
  int descriptors[2] = {};
  const auto measure = [&](int when) {
    threads[when] = FromProcStatus("Threads");
    memory_kib[when] = FromProcStatus("VmRSS");
    descriptors[when] = NumDescriptors();
  };
  const auto statuses = world->Run([&](Backend& rank) -> absl::Status {
    const auto device = HostDevice::Create();
    std::vector<float> sums;
    for (int cycle = 0; cycle < kCycles; ++cycle) {
      if (rank.rank() == 0 && cycle == kWarm) measure(0);
      auto group = rank.CreateGroup(WorldGroup(3));
      if (!group.ok()) {
        ++broken[rank.rank()];
        continue;
      }
      const auto stream = NewStream(*device);
      absl::Status status = Sum(**group, *stream, 600, 1.0f, &sums);
      if (status.ok() && sums != std::vector<float>(600, 3.0f)) return absl::InternalError("wrong sum");
      // The odd rank wants something else; its arguments are bad every other time. Ranks may be in different cycles.
      const int64_t turn = (*group)->epoch();
      const int64_t n = rank.rank() == turn % 3 ? (turn % 2 == 0 ? 3 : -1) : 5;
      const auto fresh = NewStream(*device);
      std::vector<float> values(8, 1.0f);
      const TensorView view(values.data(), DType::kF32, Shape({std::max<int64_t>(n, 1)}));
      status = n < 0 ? (*group)->Broadcast(view, 7, *fresh) : (*group)->AllReduce(view, view, ReduceOp::kSum, *fresh);
      if (status.ok()) return absl::InternalError("the disagreement was not seen");
      ++broken[rank.rank()];
    }
    if (rank.rank() == 0) measure(1);
    // A rank that is a cycle ahead is refused once or twice more.
    absl::Status status = absl::InternalError("no attempt");
    for (int attempt = 0; attempt < 5 && !status.ok(); ++attempt) {
      const auto group = rank.CreateGroup(WorldGroup(3));
      const auto stream = NewStream(*device);
      status = group.ok() ? Sum(**group, *stream, 10, 1.0f, &sums) : group.status();
    }
    EK_RETURN_IF_ERROR(status);
    return sums == std::vector<float>(10, 3.0f) ? absl::OkStatus() : absl::InternalError("wrong sum at the end");
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
  for (const int64_t count : broken) EXPECT_EQ(count, kCycles);
  EXPECT_EQ(world->num_faults(), 60);
  EXPECT_EQ(threads[1], threads[0]);
  EXPECT_EQ(descriptors[1], descriptors[0]);
  // Lost and late messages of broken groups stay in the simulated network.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int64_t kGrowthKib = 256 << 10;  // freed memory is kept for a while, and shadowed
#else
  constexpr int64_t kGrowthKib = 16 << 10;
#endif
  EXPECT_LT(memory_kib[1] - memory_kib[0], kGrowthKib);
}

}  // namespace
}  // namespace evenkeel::comm
