// Counted work of fetch and release against the policies' formulas, for many parameters and ranks.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/byte_ledger.h"
#include "evenkeel/comm/in_process.h"
#include "evenkeel/comm/testing/run_ranks.h"
#include "evenkeel/runtime/base/status_macros.h"
#include "evenkeel/runtime/base/status_matchers.h"
#include "evenkeel/runtime/device/host_device.h"
#include "evenkeel/zero3/fetch_policy.h"
#include "evenkeel/zero3/partitioned_model.h"
#include "evenkeel/zero3/unit_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::zero3 {
namespace {

constexpr int kSteps = 4;
constexpr int kWarmSteps = 2;  // one pass records, one allocates the last views

// Three leaves of `p` parameters each, so that places are reused.
ModelDescription ThreeLeaves(int p) {
  ModelDescription model;
  model.root.type = "Model";
  for (int l = 0; l < 3; ++l) {
    ModuleNode leaf{absl::StrCat("leaf", l), "Block", {}, {}, false};
    for (int i = 0; i < p; ++i) {
      ParameterSpec spec;
      spec.name = absl::StrCat("leaf", l, ".", i);
      spec.shape = Shape({5 + i % 3});
      leaf.parameters.push_back(static_cast<int>(model.parameters.size()));
      model.parameters.push_back(spec);
    }
    model.root.children.push_back(std::move(leaf));
  }
  return model;
}

struct Traffic {
  int64_t collectives = 0;
  int64_t messages = 0;
  int64_t bytes = 0;
};

struct Counted {
  WorkCounts work;  // of `cycles` fetch + release
  int64_t cycles = 0;
  Traffic first;   // of the pass that records
  Traffic steady;  // of a later one
};

Traffic Minus(const comm::LedgerCounts& now, const comm::LedgerCounts& before) {
  const comm::LedgerCounts delta = now - before;
  Traffic traffic;
  traffic.collectives = delta.total_collectives();
  traffic.bytes = delta.bytes(comm::Axis::kWorld);
  for (const auto& axis : delta.sent) {
    for (const comm::LedgerEntry& entry : axis) traffic.messages += entry.messages_sent;
  }
  return traffic;
}

absl::Status RunRank(comm::Backend& backend, const ModelDescription& description, const std::string& policy,
                     HostDevice::StreamMode mode, Counted* out) {
  EK_ASSIGN_OR_RETURN(auto dp, backend.CreateGroup(comm::WorldGroup(backend.size())));
  auto device = HostDevice::Create({.stream_mode = mode});
  EK_ASSIGN_OR_RETURN(auto compute, device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(auto comm, device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(description, {}));
  PartitionedModelOptions options;
  options.policy = policy;
  EK_ASSIGN_OR_RETURN(auto model, PartitionedModel::Create(description.parameters, selection, options, {.dp = dp.get()},
                                                           device.get(), compute.get(), comm.get()));
  const auto pass = [&]() -> absl::Status {
    for (int l = 0; l < model->num_leaves(); ++l) {
      EK_RETURN_IF_ERROR(model->Fetch({l}).status());
      EK_RETURN_IF_ERROR(model->Release({l}));
    }
    return absl::OkStatus();
  };
  for (int i = 0; i < kWarmSteps; ++i) {
    const comm::LedgerCounts before = backend.ledger().Snapshot();
    EK_RETURN_IF_ERROR(pass());
    EK_RETURN_IF_ERROR(model->UseTrace("step"));
    if (i == 0) out->first = Minus(backend.ledger().Snapshot(), before);
  }
  // Passes without an end between them would be one longer order; the counts are taken inside each.
  for (int i = 0; i < kSteps; ++i) {
    const WorkCounts before = device->counters().Snapshot();
    const comm::LedgerCounts sent = backend.ledger().Snapshot();
    EK_RETURN_IF_ERROR(pass());
    // Memory of the last leaf goes back at the next gather: make it happen inside the count.
    EK_RETURN_IF_ERROR(model->UseTrace("step"));
    const WorkCounts delta = device->counters().Snapshot() - before;
    out->steady = Minus(backend.ledger().Snapshot(), sent);
    if (i == 0) out->work = delta;
    if (i > 0 && delta.host_operations != out->work.host_operations) {
      return absl::InternalError(
          absl::StrCat("pass ", i, " took ", delta.host_operations, ", the first ", out->work.host_operations));
    }
  }
  out->cycles = model->num_leaves();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Counted>> Count(int p, int w, const std::string& policy, HostDevice::StreamMode mode) {
  EK_ASSIGN_OR_RETURN(auto world, comm::InProcessWorld::Create({.world_size = w}));
  const ModelDescription description = ThreeLeaves(p);
  std::vector<Counted> counted(static_cast<size_t>(w));
  EK_RETURN_IF_ERROR(comm::FirstFailure(comm::RunRanks(*world, [&](comm::Backend& backend) {
    return RunRank(backend, description, policy, mode, &counted[static_cast<size_t>(backend.rank())]);
  })));
  return counted;
}

class HostOperationsTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, HostOperationsTest, ::testing::Values(2, 4, 8, 16));

// #8305 is in here too: a release half without effect would miss its frees and records.
TEST_P(HostOperationsTest, Trail64_105_CountedEqualsTheFormula) {
  const int w = GetParam();
  for (int p : {1, 3, 24, 192, 768}) {
    for (const char* policy : {"per_parameter", "coalesced", "flat"}) {
      ASSERT_OK_AND_ASSIGN(const std::vector<Counted> ranks, Count(p, w, policy, HostDevice::StreamMode::kInline));
      std::vector<ParameterSpec> specs(static_cast<size_t>(p));
      for (ParameterSpec& spec : specs) spec.shape = Shape({5});
      ASSERT_OK_AND_ASSIGN(const FetchPolicy* found, FindFetchPolicy(policy));
      const FetchCost cost = found->Cost(specs, w);
      for (const Counted& rank : ranks) {
        const int64_t n = rank.cycles;
        ASSERT_EQ(rank.work.host_operations, n * cost.host_operations) << policy << " P " << p << " W " << w;
        ASSERT_EQ(rank.work.collectives, n);
        ASSERT_EQ(rank.work.copies, n * cost.copies);
        ASSERT_EQ(rank.work.launches, n * cost.launches);
        ASSERT_EQ(rank.work.allocations, n * cost.allocations);
        ASSERT_EQ(rank.work.frees, n * cost.allocations);
        ASSERT_EQ(rank.work.event_records, n * cost.event_records);
        ASSERT_EQ(rank.work.event_waits, n * cost.event_waits);
      }
      if (std::string(policy) == "flat") {
        EXPECT_LE(ranks[0].work.host_operations, 10 * ranks[0].cycles);
        EXPECT_EQ(ranks[0].work.copies + ranks[0].work.allocations, 0);
      }
    }
  }
}

// One rank's passes beside a thread that allocates and frees all the time: what the model counts for each pass.
absl::Status CountBesideNeighbour(comm::Backend& backend, std::vector<int64_t>* counted) {
  const auto device = HostDevice::Create({.stream_mode = HostDevice::StreamMode::kWorker});
  EK_ASSIGN_OR_RETURN(const auto compute, device->CreateStream("compute"));
  EK_ASSIGN_OR_RETURN(const auto comm, device->CreateStream("comm"));
  EK_ASSIGN_OR_RETURN(const auto dp, backend.CreateGroup(comm::WorldGroup(backend.size())));
  const ModelDescription description = ThreeLeaves(24);
  EK_ASSIGN_OR_RETURN(const LeafSelection selection, SelectLeaves(description, {}));
  PartitionedModelOptions options;
  options.policy = "coalesced";
  EK_ASSIGN_OR_RETURN(const auto model,
                      PartitionedModel::Create(description.parameters, selection, options, {.dp = dp.get()},
                                               device.get(), compute.get(), comm.get()));
  std::atomic<bool> stop{false};
  std::thread neighbour([&] {
    while (!stop) (void)device->Allocate(64);
  });
  const auto pass = [&]() -> absl::Status {
    for (int l = 0; l < model->num_leaves(); ++l) {
      EK_RETURN_IF_ERROR(model->Fetch({l}).status());
      EK_RETURN_IF_ERROR(model->Release({l}));
    }
    return model->UseTrace("step");
  };
  absl::Status status;
  for (int i = 0; i < kWarmSteps + 50 && status.ok(); ++i) {
    const int64_t before = model->counts().fetch_host_operations;
    status = pass();
    if (i >= kWarmSteps) counted->push_back(model->counts().fetch_host_operations - before);
  }
  stop = true;
  neighbour.join();
  return status;
}

// What other threads do with the device meanwhile, such as work on a stream that frees its memory, is not the fetch's.
TEST(HostOperationsWorkerTest, FetchesCountTheirOwnOperationsOnly) {
  ASSERT_OK_AND_ASSIGN(const auto world, comm::InProcessWorld::Create({.world_size = 2}));
  std::vector<int64_t> counted[2];
  ASSERT_OK(comm::FirstFailure(comm::RunRanks(
      *world, [&](comm::Backend& backend) { return CountBesideNeighbour(backend, &counted[backend.rank()]); })));
  EXPECT_GT(counted[0][0], 0);
  for (const auto& passes : counted) EXPECT_EQ(passes, std::vector<int64_t>(passes.size(), counted[0][0]));
}

TEST(HostOperationsWorkerTest, WorkerStreamsMakeTheSameTwoEdges) {
  for (int p : {3, 24}) {
    for (const char* policy : {"per_parameter", "coalesced", "flat"}) {
      ASSERT_OK_AND_ASSIGN(const std::vector<Counted> inline_ranks,
                           Count(p, 3, policy, HostDevice::StreamMode::kInline));
      ASSERT_OK_AND_ASSIGN(const std::vector<Counted> ranks, Count(p, 3, policy, HostDevice::StreamMode::kWorker));
      EXPECT_EQ(ranks[1].work.host_operations, inline_ranks[1].work.host_operations) << policy;
      if (std::string(policy) == "per_parameter") continue;
      EXPECT_EQ(ranks[1].work.event_records, 2 * ranks[1].cycles) << policy;
    }
  }
}

// One collective and one message per peer and leaf, whatever the number of parameters, and not a byte beside the
// shards: no message for a small parameter (104), and the same in the first pass, before anything is known of the
// order, where expert-wise gathers made upstream's first steps ten times slower (70).
TEST(HostOperationsWorkerTest, Trail70_104_MessagesAndBytesDoNotGrowWithParameters) {
  constexpr int kRanks = 4;
  for (const char* policy : {"per_parameter", "coalesced", "flat"}) {
    for (int p : {1, 24, 192}) {
      ASSERT_OK_AND_ASSIGN(const std::vector<Counted> ranks, Count(p, kRanks, policy, HostDevice::StreamMode::kInline));
      const ModelDescription description = ThreeLeaves(p);
      ASSERT_OK_AND_ASSIGN(const FetchPolicy* found, FindFetchPolicy(policy));
      ASSERT_OK_AND_ASSIGN(const UnitLayout layout,
                           found->Layout(absl::MakeConstSpan(description.parameters).subspan(0, p), kRanks));
      for (const Counted& rank : ranks) {
        for (const Traffic& traffic : {rank.first, rank.steady}) {
          EXPECT_EQ(traffic.collectives, rank.cycles) << policy << " P " << p;
          EXPECT_EQ(traffic.messages, rank.cycles * (kRanks - 1)) << policy << " P " << p;
          EXPECT_EQ(traffic.bytes, rank.cycles * (kRanks - 1) * layout.shard_bytes) << policy << " P " << p;
        }
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel::zero3
